"""What a student reads while training: sentences, rewrites, views that objectives ask for."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from stages.contract import Artifact, Work
from stages.kinds import Kinds
from stages.sentences.texts import read_kinds, read_texts

if TYPE_CHECKING:
    from stages.recipe import Recipe
    from stages.train.objectives.base import View


@dataclass(frozen=True)
class Texts:
    """Texts of a node's shards.

    node: that has them. suffix: of the names of nodes that read them: "" for the sentences.
    column: of a shard of rewrites; None where sentences are read.
    view: what is done to a sentence beforehand.
    """

    node: str = "sentences"
    suffix: str = ""
    column: Literal["text", "negative"] | None = None
    view: "View | None" = None

    def identity(self) -> dict[str, Any]:
        found = {} if self.column is None else {"column": self.column}
        return found | (self.view.identity() if self.view else {})

    def inputs(self, has_kinds: bool) -> list[str]:
        """What a node that reads them has as its first inputs; a rewrite has the prompt of its
        sentence's kind."""
        return [self.node, *["sentences"] * (has_kinds and self.node != "sentences")]

    def open(self, work: Work, has_kinds: bool) -> "Callable[[int], ShardTexts]":
        """What reads a shard of the node's first input by its number."""
        source = work.input(work.input_names[0])
        sentences = work.input("sentences") if has_kinds else None
        change = self.view.load() if self.view else None

        def read(number: int) -> ShardTexts:
            kinds = read_kinds(sentences, number) if sentences else None
            if self.column is not None:
                owners, rewrites = _read_rewrites(source, number, self.column)
                owned = kinds and [kinds[place] for place in owners.tolist()]
                return ShardTexts(rewrites, owned, owners)
            texts = read_texts(source, number)
            return ShardTexts(change(texts) if change else texts, kinds)

        return read

    def expected_rows(self, source: Artifact) -> dict[int, int] | None:
        """Rows of each shard by number; None: those of the source's."""
        if self.column is None:
            return None
        counted = "rewrites" if self.column == "text" else "negatives"
        return {
            number: json.loads(source.shard_path(number, "stats.json").read_text())[counted]
            for number in source.shard_numbers
        }


@dataclass(frozen=True)
class ShardTexts:
    """Texts of a shard.

    kinds: of each. owners: of rewrites, the places of the sentences that they belong to (int64,
        ascending).
    """

    texts: Sequence[str]
    kinds: Kinds = None
    owners: Any = None


def texts_of(recipe: "Recipe") -> list[Texts]:
    """Everything that the recipe's student reads while training, the sentences first."""
    found, objectives = [Texts()], recipe.train.objectives
    for source in recipe.perturb:
        node, suffix = f"perturb:{source.name}", f":{source.name}"
        found.append(Texts(node, suffix, "text"))
        # a rewrite's hard negative is another row of tokens with the same owner
        if objectives.needs_negatives:
            found.append(Texts(node, f"{suffix}+negatives", "negative"))
    return found + [Texts(suffix=f":{view.name}", view=view) for view in objectives.views]


def _read_rewrites(
    perturbed: Artifact, number: int, column: Literal["text", "negative"]
) -> tuple[Any, list[str]]:
    """Places of the sentences and their rewrites or negatives in one shard."""
    import numpy as np
    import pyarrow.parquet as pq

    path = perturbed.shard_path(number, "rewrites.parquet")
    table = pq.read_table(path, columns=["row", column])
    table = table.filter(table.column(column).is_valid())
    return table.column("row").to_numpy().astype(np.int64), table.column(column).to_pylist()
