"""Rewrites of your own: a table's rows joined to the sentences, by text or by id.

The join streams: memory holds 16 bytes per sentence of the corpus (see `SentenceIndex`). What is
joined waits in a temporary database, whose few megabytes of cache go to disk when they are full.
"""

import errno
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from stages.contract import Work
from stages.errors import UserError
from stages.fields import TextsPath
from stages.rewrite.base import RewriteSource
from stages.rewrite.rewrites import Rewrite
from stages.rewrite.stage import Rewrites
from stages.sentences.cleaning import clean_text
from stages.sentences.index import JoinedByKey, SentenceIndex
from stages.sentences.settings import SourceKind
from stages.sentences.sources import Reject, Table, read_table
from stages.sentences.texts import read_texts

if TYPE_CHECKING:
    from stages.planning import Graph
    from stages.rewrite.settings import PerturbSettings

MAX_UNKNOWN_KEPT = 1000


class Pairs(JoinedByKey, RewriteSource):
    """Rewrites from a file of yours: a sentence (or its id) and a rewrite in each row."""

    path: TextsPath = Field(
        description="A table file, or a folder, whose files and folders are read in name order."
    )
    source: SourceKind | None = Field(None, description="Kind of file; null: told from its suffix.")
    invalid_utf8: Literal["error", "reject"] = Field(
        "error",
        description="What to do with lines that are not UTF-8: stop, or drop and count them.",
    )
    rewrite_column: str = Field("sentence2", description="Column of the rewrite.")
    negative_column: str | None = Field(
        None, description="Column of the hard negative, if there is one."
    )
    unknown: Literal["error", "reject"] = Field(
        "error",
        description="What to do with rows whose sentence is not in the corpus: stop, or drop and "
        "count.",
    )

    @property
    def gives_negatives(self) -> bool:
        return self.negative_column is not None

    def plan(self, graph: "Graph", whole: "PerturbSettings", where: str) -> None:
        stage = JoinedPairs(whole, where, self, graph.recipe.sentences.unicode)
        graph.add(f"perturb:{whole.name}", stage, ["sentences"], whole.name)

    def table(self, setting: str) -> Table:
        """The columns to read: key, rewrite and, if there are any, negative."""
        negative = (self.negative_column,) if self.negative_column else ()
        return Table(
            self.path,
            (self.key, self.rewrite_column, *negative),
            self.source,
            self.invalid_utf8,
            setting,
            numbers=(self.id_column,) if self.id_column else (),
            optional=negative,
        )


@dataclass(frozen=True)
class JoinedPairs(Rewrites):
    """Joins a file to the sentences, all shards in one go.

    unicode: normal form of the sentences; keys and rewrites are cleaned alike.
    """

    pairs: Pairs
    unicode: str

    def check(self) -> None:
        super().check()
        next(read_table(self.pairs.table(f"{self.where}.pairs")), None)

    def make(self, work: Work, loaded: Any) -> None:
        sentences = work.input("sentences")
        texts = (read_texts(sentences, number) for number in sentences.shard_numbers)
        pairs = PairFile(self.pairs, texts, self.unicode, f"{self.where}.pairs")
        for number, rewrites in enumerate(pairs.shards()):
            work.put_shard(number, self.kept(read_texts(sentences, number), rewrites))
        if pairs.num_unknown:
            left_out = f"{pairs.num_unknown:,} rows of {self.pairs.path} were left out"
            work.say(left_out, important=True)
        self.publish(work, pairs.unknown, {"rows_left_out": pairs.num_unknown})


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
        self._settings = settings
        self.unknown: list[dict[str, str]] = []
        self.num_unknown = 0
        self._setting = setting
        self._form = form
        self._index = SentenceIndex(shard_texts, by_text=settings.id_column is None)

    def shards(self) -> Iterator[list[Rewrite]]:
        """The rewrites of every shard, in shard order."""
        import sqlite3  # some builds of Python lack it, and other sources do without

        with closing(sqlite3.connect("")) as database:  # a temporary file, if it grows
            database.execute("CREATE TABLE joined (row INTEGER, text TEXT, negative TEXT)")
            try:
                database.executemany("INSERT INTO joined VALUES (?, ?, ?)", self._joined())
                database.execute("CREATE INDEX rows ON joined (row)")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                    raise
                raise OSError(errno.ENOSPC, str(error)) from error
            if database.execute("SELECT 1 FROM joined").fetchone() is None:
                raise UserError(
                    f"{self._setting}: none of the {self.num_unknown:,} pairs in "
                    f"{self._settings.path} belongs to a sentence of the corpus; check "
                    f"{'sentence_column' if self._settings.id_column is None else 'id_column'}"
                )
            of_shard = (
                "SELECT row - :start, text, negative FROM joined "
                "WHERE row >= :start AND row < :end ORDER BY row, rowid"
            )
            for start, end in pairwise(self._index.starts):
                found = database.execute(of_shard, {"start": start, "end": end})
                yield [Rewrite(*one) for one in found]

    def _joined(self) -> Iterator[tuple[int, str, str | None]]:
        """Row, rewrite and negative of every pair whose sentence is known."""
        for cells in read_table(self._settings.table(self._setting)):
            if isinstance(cells, Reject):
                self._keep_unknown(cells.reason, cells.text)
                continue
            key, text, *negative = (clean_text(cell, self._form) for cell in cells)
            row = self._index.row_of(key)
            if row is not None:
                yield row, text, "".join(negative) or None
            elif self._settings.unknown == "reject":
                self._keep_unknown("unknown_sentence", f"{key} -> {text}")
            else:
                what = "id" if self._settings.id_column else "sentence"
                raise UserError(
                    f"{self._setting}: {self._settings.path} has a pair whose {what} is not in the "
                    f"corpus: '{key[:80]}'. It may have been left out by sentences.limit, "
                    "min_chars or max_chars; to leave such pairs out, set `unknown: reject` there."
                )

    def _keep_unknown(self, reason: str, text: str) -> None:
        self.num_unknown += 1
        if len(self.unknown) < MAX_UNKNOWN_KEPT:
            self.unknown.append({"reason": reason, "text": text[:2000]})
