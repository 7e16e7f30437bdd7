"""Teacher factors of an encoder: every sentence through it, once."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from stages.contract import Artifact, Fingerprinted, Resources, RowWise, Shard, Work
from stages.embed.basis import Basis, basis_in
from stages.embed.endpoint import AskedVectors
from stages.embed.given import GivenVectors
from stages.encoder.prompts import prompts_left_out
from stages.encoder.source import EncoderSource
from stages.planning import Graph, Inputs
from stages.samples import factor_rows
from stages.sentences.texts import read_kinds, read_texts, texts_of_rows

if TYPE_CHECKING:
    import numpy as np

    from stages.embed.embedder import Embedder
    from stages.recipe import TeacherSettings


@dataclass(frozen=True)
class Embed(RowWise):
    """Sentences to `factors.npy`: unit rows (N, D) fp16 in each shard, or reduced ones (N, k).

    basis: input with what they are reduced to; "" keeps them whole.
    """

    encoder: EncoderSource[Any]
    basis: str = ""

    kind = "embed"
    version = 1

    def identity(self, inputs: Mapping[str, Fingerprinted]) -> dict[str, Any]:
        return self.encoder.identity(inputs)

    @property
    def packages(self) -> tuple[str, ...]:
        return self.encoder.packages

    def resources(self) -> Resources:
        return Resources(gpu=True)

    def check(self) -> None:
        self.encoder.check()

    def width(self) -> int | None:
        return self.encoder.width()

    def sampled(
        self, work: Work, rows: "np.ndarray", has_width: Callable[[int], None]
    ) -> "tuple[np.ndarray, dict[str, Any]]":
        embed = self._embedder(work)
        has_width(embed.dimension)
        return embed.units(*texts_of_rows(work.input("sentences"), rows.tolist())), {}

    def _embedder(self, work: Work) -> "Embedder":
        from stages.embed.embedder import Embedder

        settings, basis = self.encoder.located(work), basis_in(work, self.basis)
        if self.encoder.has_kinds and (warning := prompts_left_out(settings)):
            work.say(warning, important=True)
        embed = Embedder(settings, work.count_tokens, basis)
        if embed.arithmetic:
            work.say(embed.arithmetic, important=True)
        return embed

    def open(self, work: Work) -> Callable[[int], Shard]:
        embed = self._embedder(work)
        sentences = work.input("sentences")

        def make(number: int) -> Shard:
            texts = read_texts(sentences, number)
            return Shard(embed(texts, read_kinds(sentences, number)), len(texts))

        return make

    @classmethod
    def sample(
        cls, artifact: Artifact, open_input: Callable[[str], Artifact], num_rows: int
    ) -> list[str]:
        return factor_rows(artifact.shard_path(artifact.shard_numbers[0], "factors.npy"), num_rows)


def cosine_factors(graph: Graph, teacher: "TeacherSettings", where: str, teaches: bool) -> str:
    """What a teacher with `similarity: cosine` teaches: its vectors, whole or reduced."""
    if not teaches:
        return ""
    stage: Embed | AskedVectors | GivenVectors
    inputs: Inputs = ["sentences"]
    if teacher.endpoint is not None:
        stage = AskedVectors(teacher.endpoint, f"{where}.endpoint")
    elif teacher.vectors is not None:
        form = graph.recipe.sentences.unicode
        stage = GivenVectors(teacher.vectors, f"{where}.vectors", form)
    else:
        stage, inputs = _embedding(graph, teacher)
    if teacher.factor_width is not None:
        basis = Basis(stage, teacher.factor_width, teacher.name, where)
        node = graph.add(f"basis:{teacher.name}", basis, inputs, teacher.name, where)
        stage, inputs = replace(stage, basis=node), [*inputs, node]
    return graph.add(f"{stage.kind}:{teacher.name}", stage, inputs, teacher.name, where)


def add_embedding(graph: Graph, teacher: "TeacherSettings", where: str) -> str:
    """Adds the node `embed:NAME` of a teacher, with whole vectors, and returns its name."""
    stage, inputs = _embedding(graph, teacher)
    return graph.add(f"embed:{teacher.name}", stage, inputs, teacher.name, where)


def _embedding(graph: Graph, teacher: "TeacherSettings") -> tuple[Embed, Inputs]:
    encoder = graph.encoder(teacher.encoder())
    return Embed(encoder), ["sentences", *encoder.inputs]
