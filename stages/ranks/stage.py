"""Rank vectors (RankEncoder): the corpus of an encoder, and the rank factors over it."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.contract import Artifact, Fingerprinted, Resources, RowWise, Shard, Stage, Work
from stages.embed.stage import add_embedding
from stages.encoder.source import EncoderSource
from stages.planning import Graph
from stages.ranks.settings import RanksSettings
from stages.samples import factor_rows
from stages.sentences.texts import texts_of_rows

if TYPE_CHECKING:
    import numpy as np

    from stages.recipe import TeacherSettings


@dataclass(frozen=True)
class Corpus(Stage):
    """Corpus vectors of one encoder, and the basis of compressed ranks with its error.

    embedded: input with the encoder's vectors of all sentences; without it the corpus sentences go
        through `student`, the recipe's own after training.
    band: thresholds of the rank regression, for the measured error; None without one.
    """

    settings: RanksSettings
    name: str
    rows_per_shard: int
    embedded: str = ""
    student: EncoderSource[Any] | None = None
    band: tuple[float, float] | None = None

    kind = "corpus"
    version = 1

    def identity(self, inputs: Mapping[str, Fingerprinted]) -> dict[str, Any]:
        found = {f"ranks.{key}": value for key, value in self.settings.identity("ranks").items()}
        found.pop("ranks.inference_weight")
        if self.student is not None:
            found["evaluate.max_length"] = self.student.settings.max_length
        return found

    @property
    def packages(self) -> tuple[str, ...]:
        return ("scipy",)

    def resources(self) -> Resources:
        return Resources(gpu=self.student is not None)

    def check_rows(self, num_rows: int) -> None:
        from stages.ranks.corpus import sample_rows

        sample_rows(num_rows, self.settings)

    def make(self, work: Work, loaded: Any) -> None:
        from stages.principal import band_error
        from stages.ranks.corpus import corpus_files

        settings, sentences = self.settings, work.input("sentences")
        work.say(f"{settings.corpus_size:,} corpus sentences")
        files, stats = corpus_files(self._vectors(work), sentences.num_rows, settings, self.name)
        if stats["duplicate_vectors"] > settings.corpus_size // 100:
            work.say(
                f"WARNING: {stats['duplicate_vectors']:,} corpus vectors equal another one; their "
                "ranks are in corpus order, not in order of meaning",
                important=True,
            )
        if "error" in stats:
            error = stats["error"]
            line = f"{settings.dimensions} dimensions: rmse {error['rmse']:.4f}"
            line += f", max {error['max']:.3f}"
            if self.band is not None:
                pairs, inside = band_error(error, *self.band)
                line += f", {inside:.4f} on {pairs:,} pairs in [{self.band[0]}, {self.band[1]}]"
            line += f"; spread of exact rank similarities {error['spread']:.3f}"
            work.say(line, important=True)
        with tempfile.TemporaryDirectory() as local:
            for name, data in files.items():
                (Path(local) / name).write_bytes(data)
            work.publish(stats, Path(local))

    def _vectors(self, work: Work) -> "Callable[[np.ndarray], np.ndarray]":
        """Unit vectors of sentence rows under the encoder that ranks."""
        if self.student is None:
            from stages.rows import FactorRows

            paths = work.input(self.embedded).shard_paths("factors.npy")
            return FactorRows(paths, self.rows_per_shard, renormalise=False).take
        from stages.encoder.model import load_told

        encoder, sentences = load_told(self.student.located(work), work), work.input("sentences")
        return lambda rows: encoder.encode_unit(*texts_of_rows(sentences, rows.tolist()))


@dataclass(frozen=True)
class Ranks(RowWise):
    """Vectors to rank factors over the corpus, exact or compressed: `factors.npy` in each shard."""

    corpus: str

    kind = "ranks"
    version = 1

    def identity(self, inputs: Mapping[str, Fingerprinted]) -> dict[str, Any]:
        return {}

    def open(self, work: Work) -> Callable[[int], Shard]:
        import numpy as np

        from stages.ranks.corpus import Ranker

        ranker = Ranker(*corpus_arrays(work.input(self.corpus)))
        vectors = work.input(work.input_names[0])

        def make(number: int) -> Shard:
            rows = np.load(vectors.shard_path(number, "factors.npy"), mmap_mode="r")
            return Shard(ranker(rows), len(rows))

        return make

    @classmethod
    def sample(
        cls, artifact: Artifact, open_input: Callable[[str], Artifact], num_rows: int
    ) -> list[str]:
        return factor_rows(artifact.shard_path(artifact.shard_numbers[0], "factors.npy"), num_rows)


def rank_factors(graph: Graph, teacher: "TeacherSettings", where: str, teaches: bool) -> str:
    """What a teacher with `similarity: ranks` teaches: Spearman's rho of its rank vectors."""
    recipe = graph.recipe
    assert recipe.ranks is not None
    embed = add_embedding(graph, teacher, where)
    regression = recipe.train.objectives.rank_regression
    corpus = graph.add(
        f"corpus:{teacher.name}",
        Corpus(
            recipe.ranks,
            teacher.name,
            recipe.sentences.rows_per_shard,
            embedded=embed,
            band=(regression.low, regression.high) if regression else None,
        ),
        ["sentences", embed],
        teacher.name,
    )
    if not teaches:
        return ""
    return graph.add(f"ranks:{teacher.name}", Ranks(corpus), [embed, corpus], teacher.name)


def plan_student(graph: Graph) -> None:
    """Adds the trained student's own corpus, where it is used with rank vectors (Eq. 7)."""
    recipe = graph.recipe
    if recipe.ranks is None or recipe.ranks.inference_weight is None:
        return
    student = graph.trained_student()
    stage = Corpus(recipe.ranks, "after", recipe.sentences.rows_per_shard, student=student)
    graph.add("corpus:after", stage, ["sentences", *student.inputs])


def corpus_arrays(corpus: Artifact) -> "tuple[np.ndarray, np.ndarray | None]":
    """Corpus vectors (n, D), and the basis (n, k) when ranks are compressed."""
    import numpy as np

    vectors = np.load(corpus.file_path("corpus.npy"), mmap_mode="r")
    if "basis.npy" not in corpus.files:
        return vectors, None
    return vectors, np.load(corpus.file_path("basis.npy"), mmap_mode="r")
