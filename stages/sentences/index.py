"""Which row of the corpus a sentence is, for files that are joined to it by text or by id."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np
from pydantic import Field, model_validator

from stages.settings import Settings

MOST_DIGITS = 1000  # of an id, zeros before it included; Python reads no number of over 4,300


class JoinedByKey(Settings):
    """Settings of a file whose rows belong to sentences."""

    sentence_column: str | None = Field(
        "sentence1", description="Column of the sentence; rows are joined by its text."
    )
    id_column: str | None = Field(
        None,
        description="Column of the sentence's id in the artifact `sentences`, to join by that "
        "instead.",
    )

    @model_validator(mode="after")
    def _one_key(self) -> Self:
        if (self.sentence_column is None) == (self.id_column is None):
            raise ValueError("set either sentence_column or id_column, and the other to null")
        return self

    @property
    def key(self) -> str:
        """The column to join by."""
        return self.sentence_column or self.id_column or ""


class SentenceIndex:
    """Rows of sentences, found by text or by id (the row itself, in decimal digits).

    Memory: by text 16 bytes a sentence, its digest and its row; 24 while it is built.

    Args:
        shard_texts: the corpus, a list of sentences for each shard.
    """

    def __init__(self, shard_texts: Iterable[Sequence[str]], by_text: bool) -> None:
        self.starts = [0]
        digests = [np.empty(0, np.uint64)]
        for texts in shard_texts:
            self.starts.append(self.starts[-1] + len(texts))
            if by_text:
                digests.append(np.array([_digest(text) for text in texts], np.uint64))
        self._by_text = by_text
        whole = np.concatenate(digests)
        del digests
        self._rows = np.argsort(whole, kind="stable")
        self._digests = whole[self._rows]

    @property
    def num_rows(self) -> int:
        return self.starts[-1]

    def row_of(self, key: str) -> int | None:
        """The row of a sentence (cleaned as the corpus was) or id; None where it has none."""
        if not self._by_text:
            is_id = key.isdecimal() and len(key) <= MOST_DIGITS
            return int(key) if is_id and int(key) < self.num_rows else None
        digest = _digest(key)
        place = int(np.searchsorted(self._digests, np.uint64(digest)))
        if place == len(self._digests) or int(self._digests[place]) != digest:
            return None
        return int(self._rows[place])


def _digest(text: str) -> int:
    # 8 bytes: two of 10 million sentences are mistaken for each other once in 370,000 corpora
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
