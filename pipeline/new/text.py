"""A look at a user's text: how much there is, how long, in which columns. No torch.

Every record is counted, up to MOST_RECORDS; of some a sample is kept. Memory: the sample, and a
hash for each of the first HASHED records that could be a sentence (100 MB).
"""

import difflib
import json
import random
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from stages.errors import UserError
from stages.sentences.cleaning import clean_text
from stages.sentences.settings import SUFFIXES, SentencesSettings, SourceKind
from stages.sentences.sources import (
    OVER_LIMIT,
    Reject,
    Table,
    input_files,
    kind_of,
    open_bytes,
    read_table,
    suffix_of,
    text_columns,
)

MOST_RECORDS = 5_000_000
HASHED = 1_000_000
SAMPLE = 2000
# Records whose median is longer are cut into sentences: in training a student reads 128 tokens,
# some 500 characters. Others stay whole, as what it will embed is as long (docs/log.md, "what the
# quickstart reads").
LONG_CHARS = 500
# Names that columns of text go by, the most usual ones first.
USUAL = ("text", "sentence", "sentence1", "content", "body", "document", "title")
# Of a table of queries and documents: titles are short, bodies long and never cut.
PAIRS_CHARS = (3, 4000)
# Pairs that are kept out of training for the retrieval test: a share of those that have a query and
# a document of their own, at most so many, and none where that leaves too few to tell anything.
HELD_OUT_SHARE, MOST_HELD_OUT, LEAST_HELD_OUT = 0.1, 500, 20
# Beyond this share of lines that are not UTF-8, the file is in another encoding.
MOST_INVALID = 0.02


@dataclass(frozen=True)
class Source:
    """Where text is.

    told: whether the kind can be told from the suffix of every file. chosen: its columns, by the
        flags that name them: --column, or --query and --document; none for lines of text.
    columns: those that could be --column instead.
    """

    path: str
    kind: SourceKind
    told: bool
    chosen: Mapping[str, str]
    columns: tuple[str, ...] = ()

    @property
    def has_pairs(self) -> bool:
        """Whether it holds queries and documents."""
        return len(self.chosen) > 1

    @property
    def char_limits(self) -> tuple[int, int]:
        """Lengths of sentences that are kept: min_chars, max_chars."""
        usual = SentencesSettings(source="text", path=self.path)
        return PAIRS_CHARS if self.has_pairs else (usual.min_chars, usual.max_chars)


@dataclass(frozen=True)
class Text:
    """What a source holds.

    num_chars: of all records. num_sentences: distinct ones of the lengths that are kept, estimated
        where records are cut into sentences, or where there are more than HASHED; without those of
        num_held_out pairs that are kept out of training. complete: False where there are more.
    num_invalid: lines that are not UTF-8. num_over: lines of over 1 MiB.
    too_long: the share of each column's texts that are longer than what is kept.
    """

    source: Source
    num_records: int
    num_chars: int
    num_sentences: int
    num_held_out: int
    complete: bool
    num_invalid: int
    num_over: int
    split: bool
    sample: list[str]
    too_long: Mapping[str, float]

    @property
    def middle_chars(self) -> tuple[int, int]:
        """Lengths that half of the sentences lie between."""
        lengths = sorted(map(len, self.sample))
        return lengths[len(lengths) // 4], lengths[3 * len(lengths) // 4]


def find_source(path: str, chosen: Mapping[str, str]) -> Source:
    """The kind of a file or folder, and the columns that hold text.

    Args:
        chosen: as a source has them; nothing: the likely column is proposed.

    Raises:
        UserError: nothing there, empty, not text, or no such column; with the nearest one.
    """
    if not path or "://" in path:
        raise UserError(f"{path!r}: give a local file or folder of text")
    try:
        files = input_files(path, "text")
    except UserError as error:
        raise UserError(str(error).removeprefix("text: ")) from None
    first, kinds = files[0], [_kind(file) for file in files]
    kind = kinds[0][0]
    for file, (other, _) in zip(files, kinds, strict=True):
        if kind != other and "text" in (kind, other):
            raise UserError(
                f"{path}: {first.name} is read as {kind} and {file.name} as {other}; put text and "
                "tables into folders of their own, or name a file"
            )
    told = all(is_told for _, is_told in kinds)
    if kind != "parquet":
        _check_text(first, told)
    columns = text_columns(first, kind)
    if kind == "text":
        for flag, column in chosen.items():
            raise UserError(f"{flag} {column}: {first} is plain text, which has no columns")
        return Source(path, kind, told, {})
    for flag, column in chosen.items():
        if column not in columns:
            close = difflib.get_close_matches(column, columns, n=1, cutoff=0.5)
            hint = f"did you mean '{close[0]}'? " if close else ""
            known = ", ".join(columns) or "none"
            raise UserError(f"{flag} {column}: {hint}{first} has these columns of text: {known}")
    if chosen:
        return Source(path, kind, told, chosen)
    if not columns:
        raise UserError(f"{first}: no column in it holds text")
    likely = next((name for name in USUAL if name in columns), None) or _longest(
        first, kind, columns
    )
    return Source(path, kind, told, {"--column": likely}, tuple(columns))


def look(source: Source) -> Text:
    """Counts records and sentences, and samples them.

    Raises:
        UserError: a broken file, a wrong encoding, or no sentence in it.
    """
    seen, complete = _Counts(source), True
    for record in _records(source):
        if seen.num_records == MOST_RECORDS:
            complete = False
            break
        seen.add(record)
    if seen.rejected["invalid_utf8"] > MOST_INVALID * seen.num_records:
        raise UserError(
            f"{source.path}: {seen.rejected['invalid_utf8']:,} of {seen.num_records:,} lines are "
            "not UTF-8; convert it, for example with iconv -f latin1 -t utf-8"
        )
    settings = SentencesSettings(source="text", path=source.path)
    cleaned = [clean_text(text, settings.unicode) for text in seen.sample]
    whole = source.has_pairs or not cleaned
    split = not whole and statistics.median(map(len, cleaned)) > LONG_CHARS
    if split:
        import sentencex

        cleaned = [
            piece.strip()
            for text in cleaned
            for piece in sentencex.segment(settings.language, text)
        ]
    usable = [text for text in cleaned if seen.shortest <= len(text) <= seen.longest]
    seen.check(bool(usable))
    num_sentences = seen.num_distinct
    if split or seen.num_texts > HASHED:
        # the sample is of all, and of what is cut knows the lengths
        share = len(usable) / len(seen.sample)
        num_sentences = round(len(seen.hashes) / seen.num_hashed * seen.num_texts * share)
    num_held_out = int(HELD_OUT_SHARE * len(seen.paired) / 2)
    if num_held_out < LEAST_HELD_OUT:
        num_held_out = 0
    num_sentences = max(1, num_sentences - 2 * num_held_out)
    seen.draw.shuffle(usable)
    return Text(
        source, seen.num_records, seen.num_chars, num_sentences, num_held_out, complete,
        seen.rejected["invalid_utf8"], seen.rejected[OVER_LIMIT], split, usable[:SAMPLE],
        {} if split else seen.too_long,
    )  # fmt: skip


class _Counts:
    """What has been seen of a source's records.

    shortest, longest: lengths of sentences that are kept. num_distinct: texts of such lengths.
    hashes: of the first num_hashed of all num_texts. sample: of all texts alike. paired: hashes of
    pairs whose two texts are in no other. kept_of, long_of, texts_of: texts by column. rejected:
    records that are no text, by reason.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.shortest, self.longest = source.char_limits
        self.draw, self.sample = random.Random(0), list[str]()
        self.hashes, self.paired = set[int](), set[int]()
        self.names = [*source.chosen.values()] or ["text"]
        self.texts_of, self.kept_of, self.long_of = Counter[str](), Counter[str](), Counter[str]()
        self.rejected = Counter[str]()
        self.num_records = self.num_chars = self.num_texts = self.num_hashed = 0
        self.num_distinct = 0

    def add(self, record: tuple[str, ...] | Reject) -> None:
        self.num_records += 1
        if isinstance(record, Reject):
            self.rejected[record.reason] += 1
            return
        for name, cell in zip(self.names, record, strict=True):
            length = len(" ".join(cell.split()))
            self.num_chars += length
            self.texts_of[name] += length > 0
            self.kept_of[name] += self.shortest <= length <= self.longest
            self.long_of[name] += length > self.longest
        texts = [text for cell in record if (text := cell.strip())]
        if len(texts) == 2 and len(self.paired) < 2 * MOST_HELD_OUT / HELD_OUT_SHARE:
            fitting = {hash(text) for text in texts if self.shortest <= len(text) <= self.longest}
            if len(fitting) == 2 and self.paired.isdisjoint(fitting):
                self.paired |= fitting
        for text in texts:
            self._add_text(text)

    def _add_text(self, text: str) -> None:
        number = self.num_texts
        place = number if number < SAMPLE else self.draw.randrange(number + 1)
        self.num_texts += 1
        if self.num_texts <= HASHED:
            self.num_hashed += 1
            if hash(text) not in self.hashes:
                self.hashes.add(hash(text))
                length = len(" ".join(text.split()))
                self.num_distinct += self.shortest <= length <= self.longest
        if place < SAMPLE:
            self.sample[place : place + 1] = [text]

    def check(self, some_usable: bool) -> None:
        """
        Raises:
            UserError: none of what was seen, or of a column, can be used.
        """
        wanted = f"{self.shortest} to {self.longest:,} characters in"
        if not some_usable:
            over = self.rejected[OVER_LIMIT]
            why = f"; {over:,} are lines of over 1 MiB: break them into lines" if over else ""
            raise UserError(
                f"{self._source.path}: no sentence of {wanted} it "
                f"({self.num_records:,} records{why})"
            )
        for name in self.names if self._source.has_pairs else ():
            if not self.kept_of[name]:
                raise UserError(
                    f"{self._source.path}: no text of {wanted} column '{name}' "
                    f"({self.long_of[name]:,} are longer); name another, or cut its texts"
                )

    @property
    def too_long(self) -> dict[str, float]:
        """The share of each column's texts that are longer than what is kept."""
        return {name: self.long_of[name] / max(1, self.texts_of[name]) for name in self.names}


def _kind(file: Path) -> tuple[SourceKind, bool]:
    if (suffix := suffix_of(file)) and suffix not in SUFFIXES:
        return "text", False  # .log, .md, a version: text if it can be read as such
    return kind_of(file, "text"), True


def _check_text(file: Path, told: bool) -> None:
    """Refuses what is no text at all, and JSON by another name, before a line of it is read."""
    try:
        with open_bytes(file) as stream:
            start = stream.read(1 << 16)
    except (OSError, EOFError) as error:
        raise UserError(f"{file}: cannot be read ({error})") from None
    if b"\0" in start:
        raise UserError(
            f"{file}: a binary file, or text in UTF-16; give UTF-8 text, CSV, TSV, JSONL or Parquet"
        )
    if not told and (suffix_of(file) == ".json" or _is_json(start.partition(b"\n")[0])):
        raise UserError(
            f"{file}: JSON, of which the lines are no sentences; JSON lines (an object a line) are "
            "read where the name ends in .jsonl"
        )


def _is_json(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _records(source: Source) -> Iterator[tuple[str, ...] | Reject]:
    kind = None if source.told else source.kind
    columns = tuple(source.chosen.values()) or ("text",)
    flags = "--column, or in --query and --document,"
    table = Table(source.path, columns, kind, "reject", flags, has_gaps=source.has_pairs)
    return read_table(table)


def _longest(file: Path, kind: SourceKind, columns: list[str]) -> str:
    """The column with the longest text in the first rows."""
    table = Table(str(file), tuple(columns), kind, "reject", "text", optional=tuple(columns))
    totals = dict.fromkeys(columns, 0)
    for _, row in zip(range(1000), read_table(table), strict=False):
        if not isinstance(row, Reject):
            for name, cell in zip(columns, row, strict=True):
                totals[name] += len(cell)
    return max(columns, key=totals.__getitem__)
