"""What each kind of node does, in whatever process it runs: open inputs, call the stage, publish.

Nothing here knows about Ray; `pipeline/hosts.py` decides where these functions run.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.artifacts import Artifact
from pipeline.job import Job, Say, clock, corpus_arrays, read_texts
from pipeline.outcome import make_corpus, make_evaluation, make_export, make_speed


def make_sentences(job: Job, say: Say) -> None:
    """Reads, cleans and shards the text. A rerun reads again, since the shuffle is global."""
    from stages.sentences import build_sentences

    store = job.store
    with tempfile.TemporaryDirectory() as local:

        def emit_file(name: str, data: bytes) -> None:
            (Path(local) / name).write_bytes(data)

        def emit_shard(number: int, files: dict[str, bytes], num_rows: int) -> None:
            store.put_shard(job.folder, number, files, num_rows)
            say(f"{number * job.recipe.sentences.rows_per_shard + num_rows:,} sentences")

        stats = build_sentences(job.recipe.sentences, emit_shard, emit_file)
        num_shards = -(-stats["kept"] // job.recipe.sentences.rows_per_shard)
        job.publish(stats, store.put_files(job.folder, Path(local)), num_shards)


class ShardWorker:
    """Makes single shards of a row-wise node; lives as long as there are shards to make."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._source = row_source(job)
        self._stage: Callable[[Any], dict[str, bytes]]
        if job.node.kind == "embed":
            from stages.embed import Embedder

            self._stage = Embedder(job.encoder(job.who))
        elif job.node.kind == "ranks":
            from stages.ranks.corpus import Ranker

            self._stage = Ranker(*corpus_arrays(job.input(f"corpus:{job.who}")))
        else:
            from stages.tokens import Tokeniser

            self._stage = Tokeniser(job.located(job.recipe.student), job.who == "negated")

    def __call__(self, number: int) -> int:
        """Makes and stores one shard; returns its number of rows."""
        if self._job.node.kind == "ranks":
            rows: Any = np.load(self._source.shard_path(number, "factors.npy"), mmap_mode="r")
        else:
            rows = read_texts(self._source, number)
        self._job.store.put_shard(self._job.folder, number, self._stage(rows), len(rows))
        return len(rows)


def row_source(job: Job) -> Artifact:
    """The artifact whose shards a row-wise node reads: its first input."""
    return job.input(next(iter(job.inputs)))


def missing_shards(job: Job) -> tuple[list[int], int]:
    """Shard numbers that a row-wise node still lacks, and how many there are in all."""
    manifest = row_source(job).manifest
    finished = job.store.finished_shards(job.folder)
    todo = [shard.number for shard in manifest.shards if shard.number not in finished]
    return todo, len(manifest.shards)


def training_data(job: Job) -> Any:
    """Memory-mapped tokens and factors, and the dev set."""
    from stages.evaluate.sts import load_sts
    from stages.rows import FactorRows, TokenRows
    from stages.train.views import TrainingData

    rows_per_shard = job.recipe.sentences.rows_per_shard

    def token_rows(name: str) -> TokenRows:
        tokens = job.input(name)
        pairs = zip(tokens.shard_paths("ids.npy"), tokens.shard_paths("offsets.npy"), strict=True)
        return TokenRows(list(pairs), rows_per_shard)

    names = job.inputs_of("embed") + job.inputs_of("ranks")
    weights = {teacher.name: teacher.weight for teacher in job.recipe.teachers}
    factors = [
        FactorRows(job.input(name).shard_paths("factors.npy"), rows_per_shard) for name in names
    ]
    dev = job.recipe.train.dev
    return TrainingData(
        tokens=token_rows("tokens"),
        negated=token_rows("tokens:negated") if "tokens:negated" in job.inputs else None,
        factors=factors,
        teacher_weights=[weights[name.partition(":")[2]] for name in names],
        dev=load_sts(dev.sts) if dev else None,
    )


def make_training(job: Job, build_engine: Any, say: Say) -> None:
    """Trains on this worker and, on rank 0, publishes the student.

    Args:
        build_engine: takes student and train settings, returns the engine.
    """
    from stages.train.checkpoint import Checkpoints
    from stages.train.loop import train
    from stages.train.metrics import MetricWriter
    from stages.train.student import build_student, save_encoder

    settings = job.recipe.train
    data = training_data(job)
    student = build_student(
        job.located(job.recipe.student),
        settings.objectives,
        settings.seed,
        autocast=settings.precision == "bfloat16",
    )
    engine = build_engine(student, settings)
    live = job.store.root.local_path(f"{job.work_folder}/live") if engine.rank == 0 else None
    writer = MetricWriter(live) if live else None

    def on_metrics(row: dict[str, Any]) -> None:
        if writer:
            writer.add(row)
        if engine.rank == 0:
            say(_training_line(row), important="dev_spearman" in row)

    checkpoints = Checkpoints(job.store.root, job.work_folder)
    result = train(engine, settings, data, checkpoints, on_metrics)
    if writer:
        writer.close()
    if engine.rank == 0:
        with tempfile.TemporaryDirectory() as local:
            save_encoder(student.encoder, result.weights, Path(local) / "model")
            final = MetricWriter(Path(local) / "metrics")
            for row in result.progress.history:
                final.add(row)
            final.close()
            progress = result.progress
            stats = {
                "num_steps": progress.step,
                "best_step": progress.best_step,
                "dev_spearman": progress.best_score,
                "engine": engine.layout(),
            }
            job.publish(stats, job.store.put_files(job.folder, Path(local)))
    engine.barrier()


def _training_line(row: dict[str, Any]) -> str:
    left = (row["num_steps"] - row["step"]) * row["seconds_per_step"]
    text = (
        f"step {row['step']:,}/{row['num_steps']:,}  loss {row['loss']:.4f}  "
        f"{row['seconds_per_step']:.2f} s/step  {row['tokens_per_second']:,.0f} tokens/s  "
        f"peak {row['peak_memory_gib']:.1f} GiB  ETA {clock(left)}"
    )
    if "dev_spearman" in row:
        text += f"  dev Spearman {row['dev_spearman']:.2f}"
    return text


MAKERS: dict[str, Callable[[Job, Say], None]] = {
    "sentences": make_sentences,
    "corpus": make_corpus,
    "evaluate": make_evaluation,
    "export": make_export,
    "speed": make_speed,
}
