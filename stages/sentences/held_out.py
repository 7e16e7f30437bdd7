"""Pairs of a query and the document that answers it that are kept out of training.

Those of two columns of a table; of texts that are split, the first sentence and the rest. Which
ones depends on the *set* of pairs and the seed alone: by BLAKE2b(seed, query), the least first,
and no text twice, as a query or as a document, since who looks for one would find the other. So the
source is read twice: nobody knows the least before the end.

Memory: 75 bytes for every pair, and the text of those that are held out.
"""

import hashlib
from array import array

import numpy as np

from stages.errors import UserError
from stages.sentences.cleaning import cleaned, fault_of, pieces_of
from stages.sentences.settings import SentencesSettings
from stages.sentences.sources import Reject, Row, read_records


class HeldOut:
    """The held-out pairs; `see` every row of the source, then ask.

    Raises:
        UserError: as `read_records`, or there are fewer pairs than asked for.
    """

    def __init__(self, settings: SentencesSettings) -> None:
        self._settings = settings
        self._chosen = self._choose()
        self._found: dict[int, tuple[str, str]] = {}
        self._sentences: set[str] = set()

    def see(self, row: Row) -> None:
        """Keeps the row's pair if it is one of the chosen."""
        pair = self._pair(row)
        if pair is not None and self._chosen.get(self._key(pair[0])) == self._key(pair[1]):
            self._found[self._key(pair[0])] = pair
            texts = {*pair, *self._cells(row)}
            self._sentences |= texts
            self._sentences |= {p for text in texts for p in pieces_of(text, self._settings)}

    @property
    def pairs(self) -> list[dict[str, str]]:
        """Query and document, cleaned and whole."""
        found = (self._found[key] for key in self._chosen)
        return [{"query": query, "document": document} for query, document in found]

    def sentences(self) -> set[str]:
        """What must not be trained on: the texts of all pairs, and the sentences in them."""
        return self._sentences

    def _choose(self) -> dict[int, int]:
        """Keys of the chosen documents, by those of their queries."""
        columns = array("Q"), array("Q")
        for row in read_records(self._settings):
            pair = self._pair(row)
            if pair and pair[0] != pair[1] and all(self._may_be(text) for text in pair):
                for column, text in zip(columns, pair, strict=True):
                    column.append(self._key(text))
        queries, documents = (np.frombuffer(column, np.uint64) for column in columns)
        asked, chosen, taken = self._settings.holdout_pairs, dict[int, int](), set[int]()
        for place in np.lexsort((documents, queries)):
            keys = int(queries[place]), int(documents[place])
            if taken.isdisjoint(keys):
                taken.update(keys)
                chosen[keys[0]] = keys[1]
                if len(chosen) == asked:
                    return chosen
        names = " and ".join(f"'{name}'" for name in self._settings.text_columns)
        what = f"pairs of {names}" if self._settings.columns else "texts of several sentences"
        raise UserError(
            f"sentences.holdout_pairs is {asked}, but there are only {len(chosen)} "
            f"{what} that share no text, with nothing that is dropped; lower it or give more text"
        )

    def _pair(self, row: Row) -> tuple[str, str] | None:
        """Query and document, cleaned; None where a row has none."""
        texts = self._cells(row)
        if self._settings.columns is not None:
            return (texts[0], texts[1]) if texts else None
        first, *rest = pieces_of(texts[0], self._settings) if texts else [""]
        return (first, " ".join(rest)) if rest else None

    def _cells(self, row: Row) -> list[str]:
        return [] if isinstance(row, Reject) else [cleaned(cell, self._settings) for cell in row]

    def _may_be(self, text: str) -> bool:
        # what is split is judged in pieces, and tested whole
        return bool(text) and (self._settings.split_sentences or not fault_of(text, self._settings))

    def _key(self, text: str) -> int:
        seed = self._settings.seed.to_bytes(8, "little")
        return int.from_bytes(
            hashlib.blake2b(text.encode(), digest_size=8, key=seed).digest(), "big"
        )
