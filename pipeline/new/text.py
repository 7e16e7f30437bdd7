"""A look at a user's text: how much there is, how long, in which column. No torch.

Every record is counted, up to MOST_RECORDS; of some a sample is kept. Memory: the sample, and a
hash for each of the first HASHED records that could be a sentence (100 MB).
"""

import difflib
import gzip
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from stages.errors import UserError
from stages.sentences.cleaning import clean_text
from stages.sentences.settings import SUFFIXES, SentencesSettings, SourceKind
from stages.sentences.sources import (
    Record,
    Reject,
    Table,
    input_files,
    kind_of,
    read_table,
    text_columns,
)

MOST_RECORDS = 5_000_000
HASHED = 1_000_000
SAMPLE = 2000
# Records whose median is longer are documents, to be cut into sentences.
LONG_CHARS = 300
# Names that columns of text go by, the most usual ones first.
USUAL = ("text", "sentence", "sentence1", "content", "body", "document", "title")
# Beyond this share of lines that are not UTF-8, the file is in another encoding.
MOST_INVALID = 0.02


@dataclass(frozen=True)
class Source:
    """Where text is. column: None for lines of text. columns: those that could be it instead."""

    path: str
    kind: SourceKind
    told: bool  # whether the kind can be told from the suffix of every file
    column: str | None
    columns: tuple[str, ...] = ()


@dataclass(frozen=True)
class Text:
    """What a source holds.

    num_sentences: distinct ones of the lengths that are kept, estimated where records are cut into
        sentences, or where there are more than HASHED. complete: False where there are more.
    num_invalid: lines that are not UTF-8.
    """

    source: Source
    num_records: int
    num_sentences: int
    complete: bool
    num_invalid: int
    split: bool
    sample: list[str]

    @property
    def middle_chars(self) -> tuple[int, int]:
        """Lengths that half of the sentences lie between."""
        lengths = sorted(map(len, self.sample))
        return lengths[len(lengths) // 4], lengths[3 * len(lengths) // 4]


def find_source(path: str, column: str | None) -> Source:
    """The kind of a file or folder, and the column that holds the text.

    Raises:
        UserError: nothing there, empty, not text, or no such column; with the nearest one.
    """
    if not path or "://" in path:
        raise UserError(f"{path!r}: give a local file or folder of text")
    try:
        files = input_files(path, "text")
    except UserError as error:
        raise UserError(str(error).removeprefix("text.path: ")) from None
    first, kind = files[0], _kind(files[0])[0]
    told = all(_kind(file)[1] for file in files)
    if kind != "parquet":
        _check_text(first)
    columns = text_columns(first, kind)
    if kind == "text":
        if column is not None:
            raise UserError(f"--column {column}: {first} is plain text, which has no columns")
        return Source(path, kind, told, None)
    if column is not None:
        if column in columns:
            return Source(path, kind, told, column)
        close = difflib.get_close_matches(column, columns, n=1, cutoff=0.5)
        hint = f"did you mean '{close[0]}'? " if close else ""
        known = ", ".join(columns) or "none"
        raise UserError(f"--column {column}: {hint}{first} has these columns of text: {known}")
    if not columns:
        raise UserError(f"{first}: no column in it holds text")
    likely = next((name for name in USUAL if name in columns), None) or _longest(
        first, kind, columns
    )
    return Source(path, kind, told, likely, tuple(columns))


def look(source: Source) -> Text:
    """Counts records and sentences, and samples them.

    Raises:
        UserError: a broken file, a wrong encoding, or no sentence in it.
    """
    settings = SentencesSettings(source="text", path=source.path)
    shortest, longest = settings.min_chars, settings.max_chars
    draw, sample = random.Random(0), list[str]()
    seen: set[int] = set()
    num_records = num_invalid = num_kept = num_hashed = 0
    complete = True
    for record in _records(source):
        if num_records == MOST_RECORDS:
            complete = False
            break
        num_records += 1
        if isinstance(record, Reject):
            num_invalid += record.reason == "invalid_utf8"
            continue
        text = record.strip()
        if not text:
            continue
        place = num_kept if num_kept < SAMPLE else draw.randrange(num_kept + 1)
        num_kept += 1
        if num_kept <= HASHED:
            seen.add(hash(text))
            num_hashed += 1
        if place < SAMPLE:
            sample[place : place + 1] = [text]
    if num_invalid > MOST_INVALID * num_records:
        raise UserError(
            f"{source.path}: {num_invalid:,} of {num_records:,} lines are not UTF-8; convert it, "
            "for example with iconv -f latin1 -t utf-8"
        )
    cleaned = [clean_text(text, settings.unicode) for text in sample]
    split = bool(cleaned) and statistics.median(map(len, cleaned)) > LONG_CHARS
    if split:
        import sentencex

        cleaned = [
            piece.strip()
            for text in cleaned
            for piece in sentencex.segment(settings.language, text)
        ]
    usable = [text for text in cleaned if shortest <= len(text) <= longest]
    if not usable:
        raise UserError(
            f"{source.path}: no sentence of {shortest} to {longest:,} characters in it "
            f"({num_records:,} records)"
        )
    distinct = len(seen) / num_hashed * num_kept
    num_sentences = max(1, round(distinct * len(usable) / len(sample)))
    draw.shuffle(usable)
    return Text(
        source, num_records, num_sentences, complete, num_invalid, split,
        usable[:SAMPLE],
    )  # fmt: skip


def _kind(file: Path) -> tuple[SourceKind, bool]:
    suffixes = [suffix for suffix in file.suffixes if suffix != ".gz"]
    if suffixes and suffixes[-1] not in SUFFIXES:
        return "text", False  # .log, .md, a version: text if it can be read as such
    kind = kind_of(file, "text")
    found: SourceKind = next(one for one in get_args(SourceKind) if one == kind)
    return found, True


def _check_text(file: Path) -> None:
    """Refuses what is no text at all before a line of it is read."""
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            start = stream.read(1 << 16)
    except (OSError, EOFError) as error:
        raise UserError(f"{file}: cannot be read ({error})") from None
    if b"\0" in start:
        raise UserError(
            f"{file}: a binary file, or text in UTF-16; give UTF-8 text, CSV, TSV, JSONL or Parquet"
        )


def _records(source: Source) -> Iterator[Record]:
    kind = None if source.told else source.kind
    table = Table(source.path, (source.column or "text",), kind, "reject", "text")
    for row in read_table(table):
        yield row if isinstance(row, Reject) else row[0]


def _longest(file: Path, kind: SourceKind, columns: list[str]) -> str:
    """The column with the longest text in the first rows."""
    table = Table(str(file), tuple(columns), kind, "reject", "text", optional=tuple(columns))
    totals = dict.fromkeys(columns, 0)
    for _, row in zip(range(1000), read_table(table), strict=False):
        if not isinstance(row, Reject):
            for name, cell in zip(columns, row, strict=True):
                totals[name] += len(cell)
    return max(columns, key=totals.__getitem__)
