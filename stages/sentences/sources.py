"""Raw text records from files, tables and data sets, streamed.

Memory: one line (at most MAX_LINE_BYTES) or one Parquet batch at a time.
"""

import csv
import difflib
import gzip
import itertools
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from stages.content import HIDDEN, files_of
from stages.errors import UserError
from stages.sentences.data_sets import load_hub_dataset
from stages.sentences.settings import SUFFIXES, SentencesSettings, SourceKind

# A text line longer than this is dropped unread: no sentence is a megabyte.
MAX_LINE_BYTES = 1 << 20
OVER_LIMIT = "line_over_1_mib"
# Rows of JSON lines that are looked at to tell which keys hold text.
FIRST_ROWS = 1000


@dataclass(frozen=True)
class Reject:
    """A record that is dropped, and why."""

    reason: str
    text: str


Record = str | Reject
Row = tuple[str, ...] | Reject


@dataclass(frozen=True)
class Table:
    """Which columns of which files.

    setting: where the recipe says so, for messages. numbers: columns that may hold integers.
    optional: columns whose cells may be missing, which makes them "". has_gaps: so may all cells,
        though not their columns.
    """

    path: str
    columns: tuple[str, ...]
    source: SourceKind | None
    invalid_utf8: Literal["error", "reject"]
    setting: str
    numbers: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    has_gaps: bool = False


def read_records(settings: SentencesSettings) -> Iterator[Row]:
    """Every text of the source, or pair of texts (`SentencesSettings.kinds`), in its own order.

    Raises:
        UserError: missing or empty input, missing column, broken file; with its place.
    """
    table = Table(
        settings.path or "", settings.text_columns, settings.source, settings.invalid_utf8,
        "sentences", has_gaps=settings.columns is not None,
    )  # fmt: skip
    if settings.dataset is None:
        yield from read_table(table)
    else:
        found = load_hub_dataset(
            settings.dataset, settings.dataset_split, settings.dataset_config, settings.dataset_file
        )
        yield from (_cells(row, table, f"data set {settings.dataset}") for row in found)


def read_table(table: Table) -> Iterator[Row]:
    """The cells of the columns asked for, row by row; a text file is one column.

    Raises:
        UserError: missing or empty input, missing column, broken file; with its place.
    """
    for file in input_files(table.path, f"{table.setting}.path"):
        kind = table.source or kind_of(file, table.setting)
        try:
            if kind == "parquet":
                yield from _parquet(file, table)
            elif kind == "text":
                if len(table.columns) > 1:
                    raise UserError(
                        f"{file}: a text file has no columns; give a table with "
                        f"{', '.join(table.columns)} (tsv, csv, jsonl or parquet)"
                    )
                for _, line in _lines(file, table):
                    yield line if isinstance(line, Reject) else (line,)
            elif kind == "jsonl":
                yield from _jsonl(file, table)
            else:
                yield from _delimited(file, table, tab=kind == "tsv")
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(
                f"{file}: the gzip file is damaged or cut off ({error}); fetch it again"
            ) from None


def text_columns(file: Path, kind: str) -> list[str]:
    """Columns of a table's file that may hold text; of JSON lines, the keys that hold one
    in the first row, or nothing but texts and null in the first FIRST_ROWS. [] for a text file,
    which has none.

    Raises:
        UserError: a broken file; with its place.
    """
    table = Table(str(file), (), None, "reject", "sentences")
    if kind == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            schema = pq.read_schema(file)
        except (pa.ArrowInvalid, OSError) as error:
            raise UserError(f"{file}: not a readable Parquet file ({error})") from None
        return [one.name for one in schema if is_text(one.type)]
    lines = (
        (number, line) for number, line in _lines(file, table)
        if isinstance(line, str) and line.strip()
    )  # fmt: skip
    if kind == "jsonl":
        begun: set[str] = set()  # keys that hold a text in the first row
        holds: dict[str, bool] = {}
        for place, (number, line) in enumerate(itertools.islice(lines, FIRST_ROWS)):
            for key, value in _json_object(line, f"{file}, line {number}").items():
                if place == 0 and isinstance(value, str):
                    begun.add(key)
                holds[key] = holds.get(key, True) and isinstance(value, str | None)
        return [key for key, texts in holds.items() if texts or key in begun]
    if kind in ("tsv", "csv"):
        first = next(lines, (1, ""))[1]
        try:
            both = itertools.chain([first], (line for _, line in lines))
            plain = (line + "\n" for line in both)
            names = next(csv.reader(plain, **dialect(tab=kind == "tsv")), [])
        except csv.Error as error:
            raise _not_csv(file, 1, error) from None
        other = next((one for one in ";\t|" if len(names) == 1 and one in first), None)
        if kind == "csv" and other is not None:
            raise UserError(
                f"{file}: its columns are parted by {other!r}, not by commas; parted by tabs and "
                "named .tsv, or by commas, it can be read"
            )
        return names
    return []


def input_files(path: str, setting: str) -> list[Path]:
    """The file itself, or the files in a folder and in its folders, in the order of their paths.

    Args:
        setting: that names it, for messages.

    Raises:
        UserError: there is nothing there, a file is empty, or a link leads nowhere.
    """
    place = Path(path).expanduser()
    if not place.exists():
        raise UserError(f"{setting}: there is no file or folder {place}")
    files = [place]
    if place.is_dir():
        files = files_of(place, setting, hidden=HIDDEN)
        if not files:
            raise UserError(
                f"{setting}: the folder {place} has no files but those whose names begin with a "
                "dot or an underscore"
            )
    for file in files:
        if file.stat().st_size == 0:
            raise UserError(f"{setting}: the file {file} is empty")
    return files


def suffix_of(file: Path) -> str:
    """The last one in lower case, looking through .gz; "" without any."""
    suffixes = [one.lower() for one in file.suffixes]
    return next((one for one in reversed(suffixes) if one != ".gz"), "")


def kind_of(file: Path, setting: str) -> SourceKind:
    """The kind of a file by its suffix, looking through .gz."""
    suffix = suffix_of(file) or ".txt"
    kind = SUFFIXES.get(suffix)
    if kind is None:
        raise UserError(
            f"{file}: the suffix '{suffix}' is not known; set {setting}.source to one of "
            "text, parquet, jsonl, csv, tsv"
        )
    return kind


def open_bytes(file: Path) -> IO[bytes]:
    """The file as it is, or what a gzip file holds."""
    return gzip.open(file) if file.suffix.lower() == ".gz" else file.open("rb")  # type: ignore[return-value]


def _lines(file: Path, table: Table) -> Iterator[tuple[int, Record]]:
    with open_bytes(file) as stream:
        number = 0
        while raw := stream.readline(MAX_LINE_BYTES):
            number += 1
            is_whole = len(raw) < MAX_LINE_BYTES or raw.endswith(b"\n")
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")  # the byte order mark of Windows programs
            if not is_whole:
                while (rest := stream.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                    pass
                yield number, Reject(OVER_LIMIT, raw[:200].decode("utf-8", "replace"))
                continue
            try:
                yield number, raw.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                if table.invalid_utf8 == "error":
                    raise UserError(
                        f"{file}, line {number}: not valid UTF-8 (byte {error.start} of the "
                        f"line). Convert the file, or set {table.setting}.invalid_utf8: reject."
                    ) from None
                yield number, Reject("invalid_utf8", raw[:200].decode("utf-8", "replace"))


def _jsonl(file: Path, table: Table) -> Iterator[Row]:
    never = set(table.columns) if table.has_gaps else set()  # a row may leave out an empty cell
    row: dict[str, Any] = {}
    for number, line in _lines(file, table):
        if isinstance(line, Reject):
            yield line
        elif line.strip():
            where = f"{file}, line {number}"
            row = _json_object(line, where)
            never -= row.keys()
            yield _cells(
                dict.fromkeys(table.columns) | row if table.has_gaps else row, table, where
            )
    if never and row:
        check_columns(table, [*row], str(file))


def _json_object(text: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except RecursionError:
        raise UserError(f"{where}: JSON that is nested too deep") from None
    except ValueError as error:  # also a number of 5,000 digits
        raise UserError(f"{where}: not JSON ({error})") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: not a JSON object")
    return row


def _delimited(file: Path, table: Table, tab: bool) -> Iterator[Row]:
    names: list[str] | None = None
    rejected: list[Reject] = []

    last = blanks = 0

    def plain() -> Iterator[str]:
        nonlocal last
        for number, line in _lines(file, table):
            last = number
            if isinstance(line, Reject):
                rejected.append(line)
            else:
                # a carriage return within a line ends no line of a TSV file, and is blank in a cell
                yield (line.replace("\r", " ") if tab else line) + "\n"

    csv.field_size_limit(MAX_LINE_BYTES)
    reader = csv.reader(plain(), **dialect(tab))
    try:
        for cells in reader:
            if not cells:  # no row, unless it is an empty cell between those of the only column
                blanks += names is not None and len(names) == 1
                continue
            if names is None:
                check_columns(table, cells, str(file))
                names = cells
                continue
            yield from rejected
            rejected.clear()
            yield from [Reject("missing_cell", "")] * blanks
            blanks = 0
            if any(cells[len(names) :]):  # an unquoted delimiter: which cell is it of?
                yield Reject("extra_cell", ("\t" if tab else ",").join(cells))
                continue
            row = dict(zip(names, cells, strict=False))
            gaps = table.columns if table.has_gaps else table.optional
            if all(column in row or column in gaps for column in table.columns):
                yield tuple(row.get(column, "") for column in table.columns)
            else:
                yield Reject("missing_cell", ",".join(cells))
    except csv.Error as error:
        raise _not_csv(file, last, error, rejected) from None
    yield from rejected


def _not_csv(
    file: Path, number: int, error: csv.Error, dropped: Sequence[Reject] = ()
) -> UserError:
    hint = about_quotes(error)
    why = f"{file}, line {number}: cannot be read ({error}){hint}"
    if hint and dropped:
        why += f", also in lines that were left out ({dropped[0].reason})"
    return UserError(why)


def about_quotes(error: csv.Error) -> str:
    """What to look for where the quotation marks of a CSV file are to blame; "" elsewhere."""
    if "expected after" not in str(error) and "end of data" not in str(error):
        return ""
    return (
        "; a cell that begins with a quotation mark ends at the next one that is not doubled, "
        "right before a comma: look for one too many or too few, there or above"
    )


def dialect(tab: bool) -> dict[str, Any]:
    """TSV is read without quoting, as corpora are written; CSV with the usual rules, strictly: a
    quotation mark that is not closed would else swallow the rest of the file."""
    if tab:
        return {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    return {"delimiter": ",", "quoting": csv.QUOTE_MINIMAL, "strict": True}


def _parquet(file: Path, table: Table) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        whole = pq.ParquetFile(file)
        check_columns(table, whole.schema_arrow.names, str(file))
        for batch in whole.iter_batches(columns=list(table.columns), batch_size=8192):
            for row in batch.to_pylist():
                yield _cells(row, table, str(file))
    except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: not a readable Parquet file ({error})") from None


def is_text(kind: Any) -> bool:
    """Whether a column of an Arrow type holds text, also as a dictionary (pandas' category)."""
    import pyarrow as pa

    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    known = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(is_it(kind) for is_it in known)


def check_columns(table: Table, names: Sequence[str], where: str) -> None:
    for column in table.columns:
        if column not in names:
            close = difflib.get_close_matches(column, names, n=1, cutoff=0.5)
            hint = f" Did you mean '{close[0]}'?" if close else ""
            raise UserError(
                f"{where}: there is no column '{column}'; it has {', '.join(names)}.{hint} Say in "
                f"{table.setting} which columns to read."
            )
        if names.count(column) > 1:
            raise UserError(f"{where}: the column '{column}' is there twice")


def _cells(row: dict[str, Any], table: Table, where: str) -> Row:
    check_columns(table, [*(row | dict.fromkeys(table.optional))], where)
    found = []
    for column in table.columns:
        value = row.get(column)
        if value is None and (table.has_gaps or column in table.optional):
            value = ""
        elif value is None:
            return Reject("missing_cell", "")
        elif column in table.numbers and isinstance(value, int):
            value = str(value)
        if not isinstance(value, str):
            raise UserError(f"{where}: column '{column}' holds {type(value).__name__}, not text")
        # a lone surrogate (from JSON escapes) cannot be encoded
        found.append(value.encode("utf-8", "replace").decode("utf-8"))
    return tuple(found)
