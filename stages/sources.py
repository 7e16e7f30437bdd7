"""Raw text records from files, tables and data sets, streamed.

Memory: one line (at most MAX_LINE_BYTES) or one Parquet batch at a time.
"""

import csv
import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from stages.errors import UserError
from stages.sentences_settings import SUFFIXES, SentencesSettings

# A text line longer than this is dropped unread: no sentence is a megabyte.
MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True)
class Reject:
    """A record that is dropped, and why."""

    reason: str
    text: str


Record = str | Reject


def read_records(settings: SentencesSettings) -> Iterator[Record]:
    """Every text of the source, in its own order.

    Raises:
        UserError: missing or empty input, missing column, broken file; with its place.
    """
    if settings.dataset is not None:
        for row in load_hub_dataset(
            settings.dataset, settings.dataset_split, settings.dataset_file
        ):
            yield from _cell(row, settings.column, f"data set {settings.dataset}")
        return
    for file in input_files(str(settings.path)):
        kind = settings.source or kind_of(file)
        try:
            if kind == "parquet":
                yield from _parquet(file, settings.column)
            elif kind == "text":
                for _, line in _lines(file, settings):
                    yield line
            elif kind == "jsonl":
                yield from _jsonl(file, settings)
            else:
                yield from _table(file, settings, tab=kind == "tsv")
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(
                f"{file}: the gzip file is damaged or cut off ({error}); fetch it again"
            ) from None


def input_files(path: str) -> list[Path]:
    """The file itself, or a folder's files in name order.

    Raises:
        UserError: there is nothing there, or a file is empty.
    """
    place = Path(path).expanduser()
    if not place.exists():
        raise UserError(f"sentences.path: there is no file or folder {place}")
    files = [place]
    if place.is_dir():
        files = sorted(f for f in place.iterdir() if f.is_file() and not f.name.startswith("."))
        if not files:
            raise UserError(f"sentences.path: the folder {place} has no files")
    for file in files:
        if file.stat().st_size == 0:
            raise UserError(f"sentences.path: the file {file} is empty")
    return files


def kind_of(file: Path) -> str:
    """The kind of a file by its suffix, looking through .gz."""
    suffixes = [suffix for suffix in file.suffixes if suffix != ".gz"] or [".txt"]
    kind = SUFFIXES.get(suffixes[-1])
    if kind is None:
        raise UserError(
            f"{file}: the suffix '{suffixes[-1]}' is not known; set sentences.source to one of "
            "text, parquet, jsonl, csv, tsv"
        )
    return kind


def load_hub_dataset(name: str, split: str, file: str | None = None) -> Any:
    """Rows of a Hugging Face data set (hub id or local folder), streamed.

    Raises:
        UserError: the extra is not installed, or the data set cannot be loaded.
    """
    try:
        import datasets
    except ImportError:
        raise UserError(
            "Hugging Face data sets need an extra: pip install 'sentray[hub]'"
        ) from None
    try:
        return datasets.load_dataset(name, data_files=file, split=split, streaming=True)
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"data set '{name}': cannot be loaded ({reason})") from error


def _open(file: Path) -> IO[bytes]:
    return gzip.open(file) if file.suffix == ".gz" else file.open("rb")  # type: ignore[return-value]


def _lines(file: Path, settings: SentencesSettings) -> Iterator[tuple[int, Record]]:
    with _open(file) as stream:
        number = 0
        while raw := stream.readline(MAX_LINE_BYTES):
            number += 1
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")  # the byte order mark of Windows programs
            if len(raw) == MAX_LINE_BYTES and not raw.endswith(b"\n"):
                while (rest := stream.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                    pass
                yield number, Reject("line_over_1_mib", raw[:200].decode("utf-8", "replace"))
                continue
            try:
                yield number, raw.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                if settings.invalid_utf8 == "error":
                    raise UserError(
                        f"{file}, line {number}: not valid UTF-8 (byte {error.start} of the "
                        "line). Convert the file, or set sentences.invalid_utf8: reject."
                    ) from None
                yield number, Reject("invalid_utf8", raw[:200].decode("utf-8", "replace"))


def _jsonl(file: Path, settings: SentencesSettings) -> Iterator[Record]:
    for number, line in _lines(file, settings):
        if isinstance(line, Reject):
            yield line
        elif line.strip():
            where = f"{file}, line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{where}: not JSON ({error})") from None
            if not isinstance(row, dict):
                raise UserError(f"{where}: not a JSON object")
            yield from _cell(row, settings.column, where)


def _table(file: Path, settings: SentencesSettings, tab: bool) -> Iterator[Record]:
    header: list[str] | None = None
    rejected: list[Reject] = []

    def plain() -> Iterator[str]:
        for _, line in _lines(file, settings):
            if isinstance(line, Reject):
                rejected.append(line)
            else:
                yield line + "\n"

    csv.field_size_limit(MAX_LINE_BYTES)
    # TSV is read without quoting, as corpora are written; CSV with the usual rules
    reader = csv.reader(
        plain(),
        delimiter="\t" if tab else ",",
        quoting=csv.QUOTE_NONE if tab else csv.QUOTE_MINIMAL,
    )
    try:
        for cells in reader:
            if header is None:
                header = cells
                _check_column(settings.column, header, str(file))
                place = header.index(settings.column)
                continue
            yield from rejected
            rejected.clear()
            yield cells[place] if place < len(cells) else Reject("missing_cell", ",".join(cells))
    except csv.Error as error:
        raise UserError(f"{file}, line {reader.line_num}: cannot be read ({error})") from None
    yield from rejected


def _parquet(file: Path, column: str) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(file)
        _check_column(column, table.schema_arrow.names, str(file))
        for batch in table.iter_batches(columns=[column], batch_size=8192):
            for value in batch.column(0).to_pylist():
                yield from _cell({column: value}, column, str(file))
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{file}: not a readable Parquet file ({error})") from None


def _check_column(column: str, names: list[str], where: str) -> None:
    if column not in names:
        raise UserError(
            f"{where}: there is no column '{column}'; it has {', '.join(names)}. "
            "Set sentences.column."
        )


def _cell(row: dict[str, Any], column: str, where: str) -> Iterator[Record]:
    if column not in row:
        _check_column(column, list(row), where)
    value = row[column]
    if isinstance(value, str):
        yield value
    elif value is None:
        yield Reject("missing_cell", "")
    else:
        raise UserError(f"{where}: column '{column}' holds {type(value).__name__}, not text")
