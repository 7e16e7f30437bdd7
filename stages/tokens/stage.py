"""The student's token ids of sentences, of their rewrites, and of views that objectives ask for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stages.contract import Artifact, Fingerprinted, RowWise, Shard, Work
from stages.encoder.prompts import prompts_left_out
from stages.encoder.source import EncoderSource
from stages.planning import Graph, Inputs
from stages.tokens.texts import Texts, texts_of

if TYPE_CHECKING:
    from stages.train.student_settings import StudentSettings

# What of the student decides its token ids.
TOKENIZER_SETTINGS = (
    "model", "template", "second_template", "prompt", "prompt_name", "prompts",
    "prompt_names", "pooling", "max_length", "final_period", "template_tokens",
)  # fmt: skip


def tokenizer_identity(
    student: EncoderSource["StudentSettings"], inputs: Mapping[str, Fingerprinted]
) -> dict[str, Any]:
    """What of the student's identity decides its token ids."""
    whole = student.identity(inputs, "student")
    names = [f"encoder.{name}" for name in TOKENIZER_SETTINGS]
    found = {name: whole[name] for name in names if name in whole}
    # a static table leaves out what its model's own files put around a sentence
    return found | ({"encoder.layers": 0} if student.settings.is_static else {})


@dataclass(frozen=True)
class Tokens(RowWise):
    """Texts to `ids.npy` and `offsets.npy` in each shard; of rewrites also `owners.npy`."""

    student: EncoderSource["StudentSettings"]
    texts: Texts

    kind = "tokens"
    version = 2

    def identity(self, inputs: Mapping[str, Fingerprinted]) -> dict[str, Any]:
        return tokenizer_identity(self.student, inputs) | self.texts.identity()

    def check(self) -> None:
        self.student.check()

    def open(self, work: Work) -> Callable[[int], Shard]:
        from stages.rows import npy_bytes
        from stages.tokens.tokeniser import Tokeniser

        student = self.student.located(work)
        if self.student.has_kinds and (warning := prompts_left_out(student)):
            work.say(warning, important=True)
        tokenise = Tokeniser(student.view_settings())
        read = self.texts.open(work, self.student.has_kinds)

        def make(number: int) -> Shard:
            found = read(number)
            more = {} if found.owners is None else {"owners.npy": npy_bytes(found.owners)}
            return Shard(tokenise(found.texts, found.kinds) | more, len(found.texts))

        return make

    def expected_rows(self, source: Artifact) -> dict[int, int]:
        return self.texts.expected_rows(source) or super().expected_rows(source)

    @classmethod
    def sample(
        cls, artifact: Artifact, open_input: Callable[[str], Artifact], num_rows: int
    ) -> list[str]:
        import numpy as np

        first = artifact.shard_numbers[0]
        ids = np.load(artifact.shard_path(first, "ids.npy"), mmap_mode="r")
        offsets = np.load(artifact.shard_path(first, "offsets.npy"))
        count = min(num_rows, len(offsets) - 1)
        rows = [f"    {ids[offsets[i] : offsets[i + 1]].tolist()}" for i in range(count)]
        return ["  sample", *rows]


def plan(graph: Graph) -> None:
    student = graph.student()
    for texts in texts_of(graph.recipe):
        inputs: Inputs = [*texts.inputs(student.has_kinds), *student.inputs]
        graph.add(f"tokens{texts.suffix}", Tokens(student, texts), inputs, where="student")
