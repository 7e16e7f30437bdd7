"""Your own rewrites: a table's rows joined to the sentences, by text or by id.

The join streams: memory holds 16 bytes per sentence of the corpus (its digest and its row) and up
to MEMORY_BYTES of joined rows; more are laid aside on disk, by shard.
"""

import hashlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from stages.errors import UserError
from stages.rewrite.rewrites import Rewrite
from stages.rewrite.settings import Pairs
from stages.sentences.build import clean_text
from stages.sentences.sources import Reject, Table, read_table

MEMORY_BYTES = 256 << 20
MAX_UNKNOWN_KEPT = 1000


class PairFile:
    """Reads the pairs of a corpus.

    Args:
        shard_texts: the corpus, a list of sentences for each shard.
        form: Unicode normal form of the sentences; keys and rewrites are cleaned alike.
        setting: where the recipe says so, for messages.

    Raises:
        UserError: the file cannot be read, has not these columns, none of its sentences is known,
            or one is not and the settings say that this is an error.
    """

    def __init__(
        self, settings: Pairs, shard_texts: Iterator[Sequence[str]], form: str, setting: str
    ) -> None:
        self.settings = settings
        self.unknown: list[dict[str, str]] = []
        self.num_unknown = 0
        self._setting = setting
        self._form = form
        self._starts = [0]
        digests = []
        for texts in shard_texts:
            self._starts.append(self._starts[-1] + len(texts))
            if settings.id_column is None:
                digests.append(np.array([_digest(text) for text in texts], np.uint64))
        if digests:
            whole = np.concatenate(digests)
            self._rows = np.argsort(whole, kind="stable")
            self._digests = whole[self._rows]

    def shards(self) -> Iterator[list[Rewrite]]:
        """The rewrites of every shard, in shard order."""
        with tempfile.TemporaryDirectory(prefix="sentray-pairs-") as folder:
            num_joined = self._join(Path(folder))
            if not num_joined:
                raise UserError(
                    f"{self._setting}: none of the {self.num_unknown:,} pairs in "
                    f"{self.settings.path} belongs to a sentence of the corpus; check "
                    f"{'sentence_column' if self.settings.id_column is None else 'id_column'}"
                )
            for number in range(len(self._starts) - 1):
                file = Path(folder) / str(number)
                lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
                yield [Rewrite(*json.loads(line)) for line in lines]

    def _join(self, folder: Path) -> int:
        held: dict[int, list[str]] = {}
        held_bytes = num_joined = 0
        for key, text, negative in self._pairs():
            row = self._row_of(key)
            if row is None:
                self._is_unknown(key, text)
                continue
            shard = int(np.searchsorted(self._starts, row, side="right")) - 1
            place = row - self._starts[shard]
            line = json.dumps([place, text, negative or None])  # ASCII: no line breaks inside
            held.setdefault(shard, []).append(line)
            num_joined += 1
            held_bytes += len(line) + 60
            if held_bytes > MEMORY_BYTES:
                _lay_aside(folder, held)
                held_bytes = 0
        _lay_aside(folder, held)
        return num_joined

    def _pairs(self) -> Iterator[tuple[str, str, str]]:
        """Cleaned key, rewrite and negative ("" without one) of every row that has them."""
        for cells in read_table(pair_table(self.settings, self._setting)):
            if isinstance(cells, Reject):
                self._keep_unknown(cells.reason, cells.text)
                continue
            key, text, *rest = (clean_text(cell, self._form) for cell in cells)
            yield key, text, rest[0] if rest else ""

    def _row_of(self, key: str) -> int | None:
        if self.settings.id_column is not None:
            known = key.isdecimal() and int(key) < self._starts[-1]
            return int(key) if known else None
        digest = _digest(key)
        place = int(np.searchsorted(self._digests, np.uint64(digest)))
        if place == len(self._digests) or int(self._digests[place]) != digest:
            return None
        return int(self._rows[place])

    def _is_unknown(self, key: str, text: str) -> None:
        if self.settings.unknown == "error":
            what = "id" if self.settings.id_column else "sentence"
            raise UserError(
                f"{self._setting}: {self.settings.path} has a pair whose {what} is not in the "
                f"corpus: '{key[:80]}'. It may have been left out by sentences.limit, min_chars or "
                "max_chars; to leave such pairs out, set `unknown: reject` there."
            )
        self._keep_unknown("unknown_sentence", f"{key} -> {text}")

    def _keep_unknown(self, reason: str, text: str) -> None:
        self.num_unknown += 1
        if len(self.unknown) < MAX_UNKNOWN_KEPT:
            self.unknown.append({"reason": reason, "text": text[:2000]})


def pair_table(settings: Pairs, setting: str) -> Table:
    """The columns to read: key, rewrite and, if there are any, negative."""
    key = settings.sentence_column or settings.id_column or ""
    negative = (settings.negative_column,) if settings.negative_column else ()
    return Table(
        settings.path,
        (key, settings.rewrite_column, *negative),
        settings.source,
        settings.invalid_utf8,
        setting,
        numbers=(settings.id_column,) if settings.id_column else (),
        optional=negative,
    )


def _digest(text: str) -> int:
    # 8 bytes: two of 10 million sentences are mistaken for each other once in 370,000 corpora
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _lay_aside(folder: Path, held: dict[int, list[str]]) -> None:
    for shard, lines in held.items():
        with (folder / str(shard)).open("a", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines)
    held.clear()
