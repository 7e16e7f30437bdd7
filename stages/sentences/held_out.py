"""Pairs of a table (a query, and the document that answers it) that are kept out of training.

Which pairs depends on the *set* of pairs and the seed alone: by BLAKE2b(seed, query), the least
first, with distinct queries and distinct documents. So the table is read twice: nobody knows the
least before the end.

Memory: 16 bytes for every pair of the table, and the text of those that are held out.
"""

import hashlib
from array import array

import numpy as np

from stages.errors import UserError
from stages.sentences.cleaning import cleaned, fault_of, pieces_of
from stages.sentences.settings import SentencesSettings
from stages.sentences.sources import Reject, read_records


class HeldOut:
    """The held-out pairs of a table; `see` every pair of it, then ask.

    Raises:
        UserError: as `read_records`, or there are fewer pairs than asked for.
    """

    def __init__(self, settings: SentencesSettings) -> None:
        self._settings = settings
        self._chosen = self._choose() if settings.holdout_pairs else {}
        self._found: dict[int, tuple[str, str]] = {}

    def see(self, query: str, document: str) -> None:
        """Keeps the pair, as it is in the table, if it is one of the chosen."""
        if self._chosen:
            pair = self._clean(query, document)
            keys = self._key(pair[0]), self._key(pair[1])
            if self._chosen.get(keys[0]) == keys[1]:
                self._found[keys[0]] = pair

    @property
    def pairs(self) -> list[dict[str, str]]:
        """Query and document, cleaned and whole."""
        found = (self._found[key] for key in self._chosen)
        return [{"query": query, "document": document} for query, document in found]

    def sentences(self) -> set[str]:
        """What must not be trained on: the texts of all pairs, and the sentences in them."""
        texts = {text for pair in self._found.values() for text in pair}
        return texts | {piece for text in texts for piece in pieces_of(text, self._settings)}

    def _choose(self) -> dict[int, int]:
        """Keys of the chosen documents, by those of their queries."""
        columns = array("Q"), array("Q")
        for row in read_records(self._settings):
            pair = () if isinstance(row, Reject) else self._clean(*row)
            if pair and all(self._may_be(text) for text in pair):
                for column, text in zip(columns, pair, strict=True):
                    column.append(self._key(text))
        queries, documents = (np.frombuffer(column, np.uint64) for column in columns)
        order = np.lexsort((documents, queries))
        for key in (queries, documents):  # of pairs that share one, the least stays
            order = order[np.sort(np.unique(key[order], return_index=True)[1])]
        asked = self._settings.holdout_pairs
        if len(order) < asked:
            names = " and ".join(f"'{name}'" for name in self._settings.text_columns)
            raise UserError(
                f"sentences.holdout_pairs is {asked}, but there are only {len(order)} distinct "
                f"pairs of {names} with nothing that is dropped; lower it or give more text"
            )
        order = order[:asked]
        return dict(zip(queries[order].tolist(), documents[order].tolist(), strict=True))

    def _clean(self, query: str, document: str) -> tuple[str, str]:
        return cleaned(query, self._settings), cleaned(document, self._settings)

    def _may_be(self, text: str) -> bool:
        # what is split is judged in pieces, and tested whole
        return bool(text) and (self._settings.split_sentences or not fault_of(text, self._settings))

    def _key(self, text: str) -> int:
        seed = self._settings.seed.to_bytes(8, "little")
        return int.from_bytes(
            hashlib.blake2b(text.encode(), digest_size=8, key=seed).digest(), "big"
        )
