"""What each kind of node does, in whatever process it runs: open inputs, call the stage, publish.

Nothing here knows about Ray; `pipeline/hosts.py` decides where these functions run.
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.artifacts import Artifact, ArtifactStore, FileRecord, new_manifest
from pipeline.graph import Node
from pipeline.recipe import Recipe, dump_recipe
from pipeline.table import results_table
from stages.encoder.settings import EncoderSettings

Say = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """One node to be made. Small and picklable: it travels to the process that does the work."""

    recipe: Recipe
    node: Node
    folders: dict[str, str]
    started: float

    @property
    def folder(self) -> str:
        return self.folders[self.node.name]

    @property
    def store(self) -> ArtifactStore:
        return ArtifactStore(self.recipe.storage)

    @property
    def work_folder(self) -> str:
        """Where unfinished work of this node lies until it is published."""
        return f"work/{self.folder}"

    def input(self, name: str) -> Artifact:
        return self.store.open(self.folders[name])

    def publish(
        self,
        stats: dict[str, Any],
        files: dict[str, FileRecord] | None = None,
        num_shards: int | None = None,
    ) -> None:
        """Publishes shards 0 to `num_shards` - 1 of the ledger (null: all) and `files`."""
        store = self.store
        shards = store.finished_shards(self.folder)
        manifest = new_manifest(
            kind=self.node.kind,
            title=self.node.title,
            fingerprint=self.node.fingerprint,
            identity=self.node.settings,
            inputs={name: self.folders[name] for name in self.node.inputs},
            shards=[s for n, s in shards.items() if num_shards is None or n < num_shards],
            files=files or {},
            stats=stats | {"node": self.node.name},
            started=self.started,
            recipe=self.recipe.name,
        )
        store.publish(self.folder, manifest)
        store.root.delete(self.work_folder)

    def teacher(self) -> EncoderSettings:
        """The teacher that this node embeds or evaluates."""
        name = self.node.name.partition(":")[2]
        return next(t for t in self.recipe.teachers if t.name == name).encoder()


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
        self._sentences = job.input("sentences")
        self._stage: Callable[[list[str]], dict[str, bytes]]
        if job.node.kind == "embed":
            from stages.embed import Embedder

            self._stage = Embedder(job.teacher())
        else:
            from stages.tokens import Tokeniser

            self._stage = Tokeniser(job.recipe.student.encoder())

    def __call__(self, number: int) -> int:
        """Makes and stores one shard; returns its number of rows."""
        import pyarrow.parquet as pq

        path = self._sentences.shard_path(number, "rows.parquet")
        texts = pq.read_table(path, columns=["text"]).column(0).to_pylist()
        self._job.store.put_shard(self._job.folder, number, self._stage(texts), len(texts))
        return len(texts)


def missing_shards(job: Job) -> tuple[list[int], int]:
    """Shard numbers that a row-wise node still lacks, and how many there are in all."""
    manifest = job.input("sentences").manifest
    finished = job.store.finished_shards(job.folder)
    todo = [shard.number for shard in manifest.shards if shard.number not in finished]
    return todo, len(manifest.shards)


def training_data(job: Job) -> Any:
    """Memory-mapped tokens and factors, and the dev set."""
    from stages.evaluate.sts import load_sts
    from stages.rows import FactorRows, TokenRows
    from stages.train.loop import TrainingData

    rows_per_shard = job.recipe.sentences.rows_per_shard
    tokens = job.input("tokens")
    pairs = zip(tokens.shard_paths("ids.npy"), tokens.shard_paths("offsets.npy"), strict=True)
    names = [name for name in job.node.inputs if name.startswith("embed:")]
    factors = [
        FactorRows(job.input(name).shard_paths("factors.npy"), rows_per_shard) for name in names
    ]
    dev = job.recipe.train.dev
    return TrainingData(
        tokens=TokenRows(list(pairs), rows_per_shard),
        factors=factors,
        teacher_weights=[teacher.weight for teacher in job.recipe.teachers[: len(names)]],
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
        job.recipe.student, settings.seed, autocast=settings.precision == "bfloat16"
    )
    engine = build_engine(student, settings)
    live = job.store.root.local_path(f"{job.work_folder}/live") if engine.rank == 0 else None
    writer = MetricWriter(live) if live else None

    def on_metrics(row: dict[str, Any]) -> None:
        if writer:
            writer.add(row)
        if engine.rank == 0:
            say(_training_line(row))

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


def clock(seconds: float) -> str:
    """Seconds as 1:02:03 or 2:03."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def trained_settings(job: Job) -> EncoderSettings:
    """Settings that load the trained student for use."""
    model = job.input("train").folder_path("model")
    about = json.loads((model / "sentray.json").read_text())
    return EncoderSettings(
        model=str(model),
        pooling=about["pooling"],
        template=about["template"],
        max_length=job.recipe.evaluate.max_length,
        tokens_per_batch=job.recipe.student.tokens_per_batch,
        device=job.recipe.student.device,
        trust_remote_code=job.recipe.student.trust_remote_code,
    )


def make_evaluation(job: Job, say: Say) -> None:
    """Scores one encoder on the recipe's STS sets and retrieval pairs."""
    import pyarrow.parquet as pq

    from stages.encoder.model import load_for_inference
    from stages.evaluate.retrieval import score_retrieval
    from stages.evaluate.speed import size_of
    from stages.evaluate.sts import load_sts, score_sts

    evaluate = job.recipe.evaluate
    sets = [load_sts(one) for one in evaluate.sts]
    who = job.node.name.partition(":")[2]
    if who == "after":
        settings = trained_settings(job)
    else:
        settings = job.recipe.student.encoder() if who == "before" else job.teacher()
    settings = settings.model_copy(update={"max_length": evaluate.max_length})
    encoder = load_for_inference(settings)
    result: dict[str, Any] = {"size": size_of(encoder), "sts": {}}
    for pairs in sets:
        say(f"{pairs.name}: {len(pairs.gold):,} pairs")
        result["sts"][pairs.name] = score_sts(pairs, encoder.encode, evaluate.num_bootstrap)
    if evaluate.retrieval:
        held_out = pq.read_table(job.input("sentences").file_path("holdout.parquet"))
        rows = held_out.slice(0, evaluate.retrieval.num_pairs).to_pydict()
        say(f"retrieval: {len(rows['summary']):,} pairs")
        result["retrieval"] = score_retrieval(rows["summary"], rows["description"], encoder.encode)
    job.publish(result)


def evaluations(folders: dict[str, str], store: ArtifactStore) -> dict[str, Any]:
    """Published evaluation results by encoder: before, after, and each teacher."""
    found = {}
    for name, folder in folders.items():
        if name.startswith("evaluate:"):
            manifest = store.manifest(folder)
            if manifest is not None:
                found[name.partition(":")[2]] = manifest.stats
    return found


def make_export(job: Job, say: Say) -> None:
    """Writes the sentence-transformers folder and its card."""
    from stages.export import export_student, model_card

    settings = trained_settings(job)
    model = job.input("train").folder_path("model")
    config = json.loads((model / "config.json").read_text())
    table = results_table(evaluations(job.folders, job.store), None)
    sentences = job.store.manifest(job.folders["sentences"])
    assert sentences is not None
    card = model_card(job.recipe.name, dump_recipe(job.recipe), sentences.stats, table)
    with tempfile.TemporaryDirectory() as local:
        export_student(
            model, settings, config["hidden_size"], settings.max_length, card,
            Path(local) / "model",
        )  # fmt: skip
        job.publish({}, job.store.put_files(job.folder, Path(local)))


def make_speed(job: Job, say: Say) -> None:
    """Times student and teachers on the first sentences of the corpus, all in float32."""
    import pyarrow.parquet as pq

    from stages.encoder.model import load_for_inference
    from stages.evaluate.speed import compare_speed

    path = job.input("sentences").shard_path(0, "rows.parquet")
    texts = pq.read_table(path, columns=["text"]).column(0).to_pylist()[:512]
    alike = {"max_length": job.recipe.evaluate.max_length, "precision": "float32"}
    student = load_for_inference(trained_settings(job))
    teachers = {
        teacher.name: load_for_inference(teacher.encoder().model_copy(update=alike))
        for teacher in job.recipe.teachers
    }
    say(f"{len(texts)} sentences, student and {len(teachers)} teacher(s) in turn")
    job.publish(compare_speed(student, teachers, texts))


MAKERS: dict[str, Callable[[Job, Say], None]] = {
    "sentences": make_sentences,
    "evaluate": make_evaluation,
    "export": make_export,
    "speed": make_speed,
}
