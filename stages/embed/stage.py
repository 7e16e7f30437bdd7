"""Teacher factors of an encoder: every sentence through it, once."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stages.contract import Artifact, Fingerprinted, Resources, RowWise, Shard, Work
from stages.embed.endpoint import AskedVectors
from stages.embed.given import GivenVectors
from stages.encoder.prompts import prompts_left_out
from stages.encoder.source import EncoderSource
from stages.planning import Graph, Inputs
from stages.samples import factor_rows
from stages.sentences.texts import read_kinds, read_texts

if TYPE_CHECKING:
    from stages.recipe import TeacherSettings


@dataclass(frozen=True)
class Embed(RowWise):
    """Sentences to `factors.npy`: unit rows (N, D) fp16 in each shard."""

    encoder: EncoderSource[Any]

    kind = "embed"
    version = 1

    def identity(self, inputs: Mapping[str, Fingerprinted]) -> dict[str, Any]:
        return self.encoder.identity(inputs)

    def resources(self) -> Resources:
        return Resources(gpu=True)

    def check(self) -> None:
        self.encoder.check()

    def open(self, work: Work) -> Callable[[int], Shard]:
        from stages.embed.embedder import Embedder

        settings = self.encoder.located(work)
        if self.encoder.has_kinds and (warning := prompts_left_out(settings)):
            work.say(warning, important=True)
        embed = Embedder(settings, work.count_tokens)
        if embed.arithmetic:
            work.say(embed.arithmetic, important=embed.arithmetic.startswith("WARNING"))
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
    """What a teacher with `similarity: cosine` teaches: its vectors."""
    if not teaches:
        return ""
    if teacher.endpoint is not None:
        asked = AskedVectors(teacher.endpoint, f"{where}.endpoint")
        return graph.add(f"endpoint:{teacher.name}", asked, ["sentences"], teacher.name, where)
    if teacher.vectors is None:
        return add_embedding(graph, teacher, where)
    form = graph.recipe.sentences.unicode
    stage = GivenVectors(teacher.vectors, f"{where}.vectors", form)
    return graph.add(f"vectors:{teacher.name}", stage, ["sentences"], teacher.name, where)


def add_embedding(graph: Graph, teacher: "TeacherSettings", where: str) -> str:
    """Adds the node `embed:NAME` of a teacher and returns its name."""
    encoder = graph.encoder(teacher.encoder())
    inputs: Inputs = ["sentences", *encoder.inputs]
    return graph.add(f"embed:{teacher.name}", Embed(encoder), inputs, teacher.name, where)
