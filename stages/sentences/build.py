"""Sentences: read, clean, split, de-duplicate, shuffle, shard.

De-duplication and shuffle are one mechanism: each sentence gets the key BLAKE2b(seed, text), so
that a text which is there as both kinds lies beside itself: the first ones of a corpus are kept
from training (all but the last one surely as either kind). Sentences are spread over 256 buckets
by the key's first byte, and each bucket is sorted by key.
Equal sentences meet, and the result is a uniform shuffle that depends on the *set* of sentences
and the seed alone, not on their order or on how they were spread over files.

Memory: the larger of MEMORY_BYTES and one bucket (1/256 of the cleaned text, roughly tripled by
Python's strings): 100 GiB of text stay under 2 GiB. Disk: a copy of the cleaned text, for a while.
"""

import hashlib
import io
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stages.errors import UserError
from stages.kinds import KINDS, Kind
from stages.sentences.cleaning import cleaned, fault_of, pieces_of
from stages.sentences.held_out import HeldOut
from stages.sentences.python_docs import read_python_docs
from stages.sentences.settings import SentencesSettings
from stages.sentences.sources import Record, Reject, Row, read_records

MEMORY_BYTES = 256 << 20
NUM_BUCKETS = 256
# In front of a sentence of a kind while it is stored, so that a text may be there as either
MARKS: dict[Kind | None, bytes] = {None: b"", "query": b"\x01", "document": b"\x02"}

EmitShard = Callable[[int, dict[str, bytes], int], None]
EmitFile = Callable[[str, bytes], None]


def build_sentences(
    settings: SentencesSettings, emit_shard: EmitShard, emit_file: EmitFile
) -> dict[str, Any]:
    """Runs the stage.

    Args:
        emit_shard: takes shard number, files and row count. A shard's `rows.parquet` has the
            columns id (int64, the row number over all shards) and text (string), and kind
            (dictionary of strings) where sentences are of two kinds.
        emit_file: takes `rejects.parquet` (reason, text) and `holdout.parquet`: from python-docs
            (name, summary, description), from pairs of a table (query, document).

    Returns:
        counts: read, kept, and rejected by reason; of two kinds also those kept of each.

    Raises:
        UserError: bad input, or no sentence left.
    """
    records: Iterator[Row]
    holdout: list[dict[str, str]] = []
    if settings.source == "python-docs":
        records, holdout = read_python_docs(settings)
    else:
        records = read_records(settings)
    pairs = HeldOut(settings) if settings.holds_out_pairs else None
    rejects = _Rejects(settings.max_rejects_kept)
    num_read = 0
    with tempfile.TemporaryDirectory(prefix="sentray-sentences-") as folder:
        buckets = _Buckets(Path(folder), settings.seed)
        for row in records:
            cells: Sequence[Record] = [row] if isinstance(row, Reject) else row
            num_read += len(cells)
            for kind, cell in zip(settings.kinds, cells, strict=False):
                for sentence in _clean(cell, settings, rejects):
                    buckets.add(sentence, kind)
            if pairs is not None:
                pairs.see(row)
        held = pairs.sentences() if pairs else set()
        kept = 0
        rows: list[tuple[str, Kind | None]] = []
        count_of: Counter[Kind | None] = Counter()
        for sentence, kind in buckets.unique_in_key_order(rejects):
            if sentence in held:
                rejects.add("held_out", sentence)
                continue
            if settings.limit is not None and kept == settings.limit:
                rejects.counts["over_limit"] += 1  # counted, not kept: nothing is wrong with them
                continue
            rows.append((sentence, kind))
            count_of[kind] += 1
            kept += 1
            if len(rows) == settings.rows_per_shard:
                _emit(rows, kept, settings, emit_shard)
                rows = []
        if rows:
            _emit(rows, kept, settings, emit_shard)
    for kind in settings.kinds:
        if not count_of[kind]:
            reasons = ", ".join(f"{count} {reason}" for reason, count in rejects.counts.items())
            raise UserError(
                f"sentences: {f'no {kind}' if kind else 'nothing'} is left of {num_read} texts "
                f"({reasons or 'no text at all'}). Look at the input, or change min_chars and "
                "max_chars."
            )
    if pairs is not None:
        holdout = pairs.pairs
    if holdout:
        emit_file("holdout.parquet", parquet_bytes(pa.Table.from_pylist(holdout)))
    if rejects.kept:
        emit_file("rejects.parquet", parquet_bytes(pa.Table.from_pylist(rejects.kept)))
    stats = {"read": num_read, "kept": kept, "rejected": dict(rejects.counts)}
    return stats | ({"kinds": dict(count_of)} if settings.columns else {})


def _emit(
    rows: list[tuple[str, Kind | None]],
    kept: int,
    settings: SentencesSettings,
    emit_shard: EmitShard,
) -> None:
    first = kept - len(rows)
    columns = {
        "id": pa.array(range(first, kept), pa.int64()),
        "text": pa.array([text for text, _ in rows], pa.string()),
    }
    if settings.columns:
        places = pa.array([KINDS.index(kind) for _, kind in rows if kind], pa.int8())
        columns["kind"] = pa.DictionaryArray.from_arrays(places, list(KINDS))
    table = pa.table(columns)
    shard = first // settings.rows_per_shard
    emit_shard(shard, {"rows.parquet": parquet_bytes(table)}, len(rows))


def parquet_bytes(table: pa.Table) -> bytes:
    """The table as a Parquet file (zstd)."""
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


def _clean(record: Record, settings: SentencesSettings, rejects: "_Rejects") -> Iterator[str]:
    if isinstance(record, Reject):
        rejects.add(record.reason, record.text)
        return
    for piece in pieces_of(cleaned(record, settings), settings):
        fault = fault_of(piece, settings)
        if fault:
            rejects.add(fault, piece or record)
        else:
            yield piece


class _Rejects:
    def __init__(self, max_kept: int) -> None:
        self.counts: Counter[str] = Counter()
        self.kept: list[dict[str, str]] = []
        self._max_kept = max_kept

    def add(self, reason: str, text: str) -> None:
        self.counts[reason] += 1
        if self.counts[reason] <= self._max_kept:
            self.kept.append({"reason": reason, "text": text[:2000]})


class _Buckets:
    """Sentences by the first byte of their key; spilled to files when memory is used up."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._key = seed.to_bytes(8, "little")
        self._held: list[list[tuple[bytes, bytes]]] = [[] for _ in range(NUM_BUCKETS)]
        self._held_bytes = 0

    def add(self, sentence: str, kind: Kind | None) -> None:
        text = sentence.encode("utf-8")  # clean text has no control characters
        key = hashlib.blake2b(text, digest_size=16, key=self._key).digest()
        text = MARKS[kind] + text
        self._held[key[0]].append((key, text))
        self._held_bytes += len(text) + 200  # the tuple, two bytes objects and the key
        if self._held_bytes > MEMORY_BYTES:
            self._spill()

    def _spill(self) -> None:
        for number, bucket in enumerate(self._held):
            with (self._folder / str(number)).open("ab") as file:
                # cleaned text has no line breaks, and a key has fixed length
                file.writelines(key.hex().encode() + text + b"\n" for key, text in bucket)
            bucket.clear()
        self._held_bytes = 0

    def unique_in_key_order(self, rejects: _Rejects) -> Iterator[tuple[str, Kind | None]]:
        kind_of = {mark: kind for kind, mark in MARKS.items() if kind}
        for number, bucket in enumerate(self._held):
            file = self._folder / str(number)
            if file.exists():
                for line in file.read_bytes().split(b"\n")[:-1]:
                    bucket.append((bytes.fromhex(line[:32].decode()), line[32:]))
            bucket.sort()
            before = None
            for pair in bucket:
                kind = kind_of.get(pair[1][:1])
                text = pair[1][len(MARKS[kind]) :].decode("utf-8")
                if pair == before:
                    rejects.add("duplicate", text)
                else:
                    yield text, kind
                before = pair
            bucket.clear()
