"""The student's token ids of sentences, of their rewrites, and of views that objectives ask for."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from stages.contract import Artifact, Fingerprinted, RowWise, Shard, Work
from stages.encoder.source import EncoderSource
from stages.planning import Graph
from stages.sentences.texts import read_kinds, read_texts

if TYPE_CHECKING:
    from stages.train.objectives.base import View
    from stages.train.settings import StudentSettings

# What of the student decides its token ids.
TOKENIZER_SETTINGS = (
    "model", "template", "second_template", "prompt", "prompt_name", "prompts",
    "prompt_names", "pooling", "max_length", "final_period", "template_tokens",
)  # fmt: skip


@dataclass(frozen=True)
class Tokens(RowWise):
    """Texts to `ids.npy` and `offsets.npy` in each shard; of rewrites also `owners.npy`.

    column: of a shard of rewrites; None where sentences are read.
    view: what is done to a sentence beforehand.
    """

    student: EncoderSource["StudentSettings"]
    column: Literal["text", "negative"] | None = None
    view: "View | None" = None

    kind = "tokens"
    version = 2

    def identity(self, inputs: Mapping[str, Fingerprinted]) -> dict[str, Any]:
        whole = self.student.identity(inputs, "student")
        names = [f"encoder.{name}" for name in TOKENIZER_SETTINGS]
        found = {name: whole[name] for name in names if name in whole}
        if self.column is not None:
            found["column"] = self.column
        return found | (self.view.identity() if self.view else {})

    def check(self) -> None:
        self.student.check()

    def open(self, work: Work) -> Callable[[int], Shard]:
        from stages.rows import npy_bytes
        from stages.tokens.tokeniser import Tokeniser

        tokenise = Tokeniser(self.student.located(work).view_settings())
        change = self.view.load() if self.view else None
        source = work.input(work.input_names[0])

        sentences = work.input("sentences") if self.student.has_kinds else None

        def make(number: int) -> Shard:
            kinds = read_kinds(sentences, number) if sentences else None
            if self.column is not None:
                owners, rewrites = read_rewrites(source, number, self.column)
                more = {"owners.npy": npy_bytes(owners)}
                owned = kinds and [kinds[place] for place in owners.tolist()]
                return Shard(tokenise(rewrites, owned) | more, len(rewrites))
            texts: Sequence[str] = read_texts(source, number)
            return Shard(tokenise(change(texts) if change else texts, kinds), len(texts))

        return make

    def expected_rows(self, source: Artifact) -> dict[int, int]:
        if self.column is None:
            return super().expected_rows(source)
        counted = "rewrites" if self.column == "text" else "negatives"
        return {
            number: json.loads(source.shard_path(number, "stats.json").read_text())[counted]
            for number in source.shard_numbers
        }

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
    recipe = graph.recipe
    objectives, student = recipe.train.objectives, graph.encoder(recipe.student)

    def add(name: str, stage: Tokens, source: str) -> None:
        # a rewrite has the prompt of its sentence's kind
        kinds = ["sentences"] if student.has_kinds and source != "sentences" else []
        graph.add(name, stage, [source, *kinds, *student.inputs], where="student")

    add("tokens", Tokens(student), "sentences")
    for source in recipe.perturb:
        rewrites = f"perturb:{source.name}"
        add(f"tokens:{source.name}", Tokens(student, "text"), rewrites)
        # a rewrite's hard negative is another row of tokens with the same owner
        if objectives.needs_negatives:
            add(f"tokens:{source.name}+negatives", Tokens(student, "negative"), rewrites)
    for view in objectives.views:
        add(f"tokens:{view.name}", Tokens(student, view=view), "sentences")


def read_rewrites(
    perturbed: Artifact, number: int, column: Literal["text", "negative"]
) -> tuple[Any, list[str]]:
    """Places of the sentences (int64, ascending) and their rewrites or negatives in one shard."""
    import numpy as np
    import pyarrow.parquet as pq

    path = perturbed.shard_path(number, "rewrites.parquet")
    table = pq.read_table(path, columns=["row", column])
    table = table.filter(table.column(column).is_valid())
    return table.column("row").to_numpy().astype(np.int64), table.column(column).to_pylist()
