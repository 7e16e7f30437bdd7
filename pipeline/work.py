"""What each kind of node does, in whatever process it runs: open inputs, call the stage, publish.

Nothing here knows about Ray; `pipeline/hosts.py` decides where these functions run.
"""

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.job import (
    Job,
    Say,
    clock,
    corpus_arrays,
    read_rewrites,
    read_texts,
    row_source,
)
from pipeline.outcome import make_corpus, make_evaluation, make_export, make_speed
from stages.rows import npy_bytes


def make_sentences(job: Job, say: Say) -> None:
    """Reads, cleans and shards the text. A rerun reads again, since the shuffle is global."""
    from stages.sentences import build_sentences

    store = job.store
    rows: dict[int, int] = {}
    with tempfile.TemporaryDirectory() as local:

        def emit_file(name: str, data: bytes) -> None:
            (Path(local) / name).write_bytes(data)

        def emit_shard(number: int, files: dict[str, bytes], num_rows: int) -> None:
            store.put_shard(job.folder, number, files, num_rows)
            rows[number] = num_rows
            say(f"{number * job.recipe.sentences.rows_per_shard + num_rows:,} sentences")

        stats = build_sentences(job.recipe.sentences, emit_shard, emit_file)
        job.publish(stats, store.put_files(job.folder, Path(local)), rows)


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
        rows, more = self._read(number)
        files = self._stage(rows) | more
        self._job.store.put_shard(self._job.folder, number, files, len(rows))
        return len(rows)

    def _read(self, number: int) -> tuple[Any, dict[str, bytes]]:
        """The shard's rows, and files that go with what is made of them."""
        if self._job.node.kind == "ranks":
            path = self._source.shard_path(number, "factors.npy")
            return np.load(path, mmap_mode="r"), {}
        if self._source.manifest.kind == "perturb":
            owners, texts = read_rewrites(self._source, number, self._job.node.settings["column"])
            return texts, {"owners.npy": npy_bytes(owners)}
        return read_texts(self._source, number), {}


def training_data(job: Job) -> Any:
    """Memory-mapped tokens and factors, and the dev set."""
    from stages.evaluate.sts import load_sts
    from stages.rows import FactorRows, OwnedRows, TokenRows
    from stages.train.views import TrainingData

    rows_per_shard = job.recipe.sentences.rows_per_shard

    def token_rows(name: str) -> TokenRows:
        tokens = job.input(name)
        pairs = zip(tokens.shard_paths("ids.npy"), tokens.shard_paths("offsets.npy"), strict=True)
        return TokenRows(list(pairs))

    def owned_rows(suffix: str) -> OwnedRows | None:
        found = []
        for source in job.recipe.perturb:
            name = f"tokens:{source.name}{suffix}"
            tokens = job.input(name)
            owners = [
                np.load(tokens.shard_path(shard.number, "owners.npy"))
                + shard.number * rows_per_shard
                for shard in tokens.shards
            ]
            found.append((token_rows(name), np.concatenate(owners)))
        return OwnedRows(found) if found else None

    settings = job.recipe.train
    names = job.inputs_of("embed") + job.inputs_of("ranks")
    weights = {teacher.name: teacher.weight for teacher in job.recipe.teachers}
    factors = [
        FactorRows(job.input(name).shard_paths("factors.npy"), rows_per_shard) for name in names
    ]
    dev = settings.dev
    return TrainingData(
        tokens=token_rows("tokens"),
        negated=token_rows("tokens:negated") if "tokens:negated" in job.inputs else None,
        factors=factors,
        teacher_weights=[weights[name.partition(":")[2]] for name in names],
        dev=[load_sts(one) for one in dev.sts] if dev else [],
        rewrites=owned_rows(""),
        negatives=owned_rows("+negatives") if settings.objectives.needs_negatives else None,
    )


def start_training(job: Job, build_engine: Any, checkpointed: bool = True) -> Any:
    """The training of this worker.

    Args:
        build_engine: takes student and train settings, returns the engine.
        checkpointed: whether it saves checkpoints and begins at the newest one.
    """
    from stages.train.checkpoint import Checkpoints
    from stages.train.loop import Training
    from stages.train.student import build_student

    settings = job.recipe.train
    student = build_student(
        job.located(job.recipe.student),
        settings.objectives,
        settings.seed,
        autocast=settings.precision == "bfloat16",
    )
    checkpoints = Checkpoints(job.store.root, job.work_folder) if checkpointed else None
    return Training(build_engine(student, settings), settings, training_data(job), checkpoints)


def publish_training(job: Job, training: Any, **more: Any) -> None:
    """Publishes the trained student on rank 0, with metrics and `more` about it."""
    from stages.train.metrics import MetricWriter
    from stages.train.student import save_encoder

    engine, result = training.engine, training.trained
    if engine.rank == 0:
        with tempfile.TemporaryDirectory() as local:
            save_encoder(engine.student.encoder, result.weights, Path(local) / "model")
            writer = MetricWriter(Path(local) / "metrics")
            for row in result.progress.history:
                writer.add(row)
            writer.close()
            stats = {
                "num_steps": result.progress.step,
                "best_step": result.progress.best_step,
                "dev_spearman": result.progress.best_score,
                "engine": engine.layout(),
            }
            if training.warning:
                stats["warning"] = training.warning
            job.publish(stats | more, job.store.put_files(job.folder, Path(local)))
    engine.barrier()


def make_training(job: Job, build_engine: Any, say: Say) -> None:
    """Trains on this worker and, on rank 0, publishes the student."""
    from stages.train.metrics import MetricWriter

    training = start_training(job, build_engine)
    is_first = training.engine.rank == 0
    live = job.store.root.local_path(f"{job.work_folder}/live") if is_first else None
    writer = MetricWriter(live) if live else None
    for row in training.rows():
        if writer:
            writer.add(row)
        if is_first:
            say(_training_line(row), important="dev_spearman" in row)
    if writer:
        writer.close()
    if is_first and training.warning:
        say(f"WARNING: {training.warning}", important=True)
    publish_training(job, training)


def _training_line(row: dict[str, Any]) -> str:
    left = (row["num_steps"] - row["step"]) * row["seconds_per_step"]
    text = (
        f"step {row['step']:,}/{row['num_steps']:,}  loss {row['loss']:.4f}  "
        f"{row['seconds_per_step']:.2f} s/step  {row['tokens_per_second']:,.0f} tokens/s  "
        f"peak {row['peak_memory_gib']:.1f} GiB  ETA {clock(left)}"
    )
    if "dev_spearman" in row:
        score = row["dev_spearman"]
        text += f"  dev Spearman {score:.2f}" + " (no number, never chosen)" * math.isnan(score)
    return text


MAKERS: dict[str, Callable[[Job, Say], None]] = {
    "sentences": make_sentences,
    "corpus": make_corpus,
    "evaluate": make_evaluation,
    "export": make_export,
    "speed": make_speed,
}
