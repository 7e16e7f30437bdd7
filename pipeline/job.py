"""One node to be made: its inputs, the encoders of its recipe, and how its result is published."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from pipeline.artifacts import Artifact, ArtifactStore, FileRecord, ShardRecord, new_manifest
from pipeline.graph import ROW_WISE, Node
from pipeline.recipe import Recipe
from stages.encoder.settings import EncoderSettings

E = TypeVar("E", bound=EncoderSettings)


class Say(Protocol):
    """Tells the user how far a node is; what is not important is said now and then only."""

    def __call__(self, text: str, important: bool = False) -> None: ...


@dataclass(frozen=True)
class Job:
    """One node to be made. Small and picklable: it travels to the process that does the work.

    inputs: folders of the artifacts it reads, by what its recipe calls them.
    """

    node: Node
    folder: str
    inputs: dict[str, str]
    started: float

    @property
    def recipe(self) -> Recipe:
        return self.node.recipe

    @property
    def store(self) -> ArtifactStore:
        return ArtifactStore(self.recipe.storage)

    @property
    def work_folder(self) -> str:
        """Where unfinished work of this node lies until it is published."""
        return f"work/{self.folder}"

    def input(self, name: str) -> Artifact:
        return self.store.open(self.inputs[name], self.node.inputs.get(name))

    def inputs_of(self, kind: str) -> list[str]:
        """Names of the inputs of one kind, in the recipe's order."""
        return [name for name in self.inputs if name.partition(":")[0] == kind]

    def expected_rows(self) -> dict[int, int]:
        """Rows that every shard must have, by its number; of a row-wise node, its source's."""
        if self.node.kind not in ROW_WISE:
            return {}
        source = row_source(self)
        if self.node.kind == "tokens" and source.manifest.kind == "perturb":
            column = "rewrites" if self.node.settings["column"] == "text" else "negatives"
            paths = enumerate(source.shard_paths("stats.json"))
            return {number: json.loads(path.read_text())[column] for number, path in paths}
        return {shard.number: shard.num_rows for shard in source.shards}

    def whole_shards(self) -> list[ShardRecord]:
        """Finished shards of a row-wise node; raises UserError unless all of them are there."""
        return self.store.whole_shards(self.folder, self.expected_rows())

    def publish(
        self,
        stats: dict[str, Any],
        files: dict[str, FileRecord] | None = None,
        rows: Mapping[int, int] | None = None,
    ) -> None:
        """Publishes the shards of the ledger and `files`: all of them, or nothing.

        Args:
            rows: number of rows of every shard that was made, by its number; null: those of the
                source of a row-wise node, no shards of others.

        Raises:
            UserError: a shard is missing, or has another number of rows.
        """
        store = self.store
        rows = self.expected_rows() if rows is None else rows
        manifest = new_manifest(
            kind=self.node.kind,
            title=self.node.title,
            fingerprint=self.node.fingerprint,
            identity=self.recipe.unexpanded(self.node.settings),
            inputs=self.inputs,
            shards=store.whole_shards(self.folder, rows),
            files=files or {},
            stats=stats | {"node": self.node.name},
            started=self.started,
            recipe=self.recipe.name,
        )
        store.publish(self.folder, manifest, rows)
        store.root.delete(self.work_folder)

    @property
    def who(self) -> str:
        """The encoder that this node embeds or evaluates: before, after, or a teacher's name."""
        return self.node.name.partition(":")[2].removesuffix("+ranks")

    def encoder(self, who: str) -> EncoderSettings:
        """Settings that load the student before or after training, or a teacher."""
        if who == "after":
            start = self.recipe.student
            return EncoderSettings(
                model=str(self.input("train").folder_path("model")),
                max_length=self.recipe.evaluate.max_length,
                **{key: getattr(start, key) for key in ("tokens_per_batch", "device",
                                                        "trust_remote_code")},
            )  # fmt: skip
        if who == "before":
            return self.located(self.recipe.student.encoder())
        return self.located(next(t for t in self.recipe.teachers if t.name == who).encoder())

    def located(self, settings: E) -> E:
        """The settings with the student of another recipe named by its folder."""
        if settings.recipe_file is None:
            return settings
        model = self.input(settings.model).folder_path("model")
        return settings.model_copy(update={"model": str(model)})


def read_texts(sentences: Artifact, number: int) -> list[str]:
    """Sentences of one shard."""
    import pyarrow.parquet as pq

    path = sentences.shard_path(number, "rows.parquet")
    return list(pq.read_table(path, columns=["text"]).column(0).to_pylist())


def read_rewrites(
    perturbed: Artifact, number: int, column: Literal["text", "negative"]
) -> tuple[np.ndarray, list[str]]:
    """Places of the sentences (int64, ascending) and their rewrites or negatives in one shard."""
    import pyarrow.parquet as pq

    path = perturbed.shard_path(number, "rewrites.parquet")
    table = pq.read_table(path, columns=["row", column])
    table = table.filter(table.column(column).is_valid())
    return table.column("row").to_numpy().astype(np.int64), table.column(column).to_pylist()


def row_source(job: Job) -> Artifact:
    """The artifact whose shards a row-wise node reads: its first input."""
    return job.input(next(iter(job.inputs)))


def missing_shards(job: Job) -> tuple[list[int], int]:
    """Shard numbers that a row-wise node still lacks, and how many there are in all."""
    rows = job.expected_rows()
    finished = job.store.finished_shards(job.folder)
    found = {number: shard.num_rows for number, shard in finished.items()}
    return [number for number in sorted(rows) if found.get(number) != rows[number]], len(rows)


def corpus_arrays(corpus: Artifact) -> tuple[np.ndarray, np.ndarray | None]:
    """Corpus vectors (n, D), and the basis (n, k) when ranks are compressed."""
    vectors = np.load(corpus.file_path("corpus.npy"), mmap_mode="r")
    if "basis.npy" not in corpus.manifest.files:
        return vectors, None
    return vectors, np.load(corpus.file_path("basis.npy"), mmap_mode="r")


class TextRows:
    """Sentences by row number; one shard is in memory at a time."""

    def __init__(self, sentences: Artifact) -> None:
        self._sentences = sentences

    def take(self, rows: np.ndarray) -> list[str]:
        """Texts in the order asked for."""
        found: dict[int, str] = {}
        start = 0
        for shard in self._sentences.shards:
            inside = rows[(rows >= start) & (rows < start + shard.num_rows)]
            if len(inside):
                texts = read_texts(self._sentences, shard.number)
                found |= {row: texts[row - start] for row in inside.tolist()}
            start += shard.num_rows
        return [found[row] for row in rows.tolist()]


def clock(seconds: float) -> str:
    """Seconds as 1:02:03 or 2:03."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
