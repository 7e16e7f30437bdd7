"""Two kinds of sentence for retrieval: queries, and the documents that are to be found.

Imports nothing heavy.
"""

from collections.abc import Sequence
from typing import Literal

Kind = Literal["query", "document"]
KINDS: tuple[Kind, ...] = ("query", "document")
# Of texts: the kind of all of them, of each, or none
Kinds = Kind | Sequence[Kind | None] | None


def kind_of_each(kinds: Kinds, count: int) -> Sequence[Kind | None]:
    """The kind of each of `count` texts."""
    if kinds is None or isinstance(kinds, str):
        return [kinds] * count
    assert len(kinds) == count, "a kind for each text"
    return kinds


def rows_of_kinds(kinds: Kinds, count: int) -> dict[Kind | None, list[int]]:
    """Which of `count` texts are of a kind, for those who encode one kind at a time."""
    found: dict[Kind | None, list[int]] = {}
    for row, kind in enumerate(kind_of_each(kinds, count)):
        found.setdefault(kind, []).append(row)
    return found
