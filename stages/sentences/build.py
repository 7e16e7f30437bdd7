"""Sentences: read, clean, split, de-duplicate, shuffle, shard.

De-duplication and shuffle are one mechanism: each sentence gets the key BLAKE2b(seed, text);
sentences are spread over 256 buckets by the key's first byte, and each bucket is sorted by key.
Equal sentences meet, and the result is a uniform shuffle that depends on the *set* of sentences
and the seed alone, not on their order or on how they were spread over files.

Memory: the larger of MEMORY_BYTES and one bucket (1/256 of the cleaned text, roughly tripled by
Python's strings): 100 GiB of text stay under 2 GiB. Disk: a copy of the cleaned text, for a while.
"""

import hashlib
import io
import re
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stages.errors import UserError
from stages.sentences.python_docs import read_python_docs
from stages.sentences.settings import SentencesSettings
from stages.sentences.sources import Record, Reject, read_records

MEMORY_BYTES = 256 << 20
NUM_BUCKETS = 256
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200b\ufeff]")

EmitShard = Callable[[int, dict[str, bytes], int], None]
EmitFile = Callable[[str, bytes], None]


def build_sentences(
    settings: SentencesSettings, emit_shard: EmitShard, emit_file: EmitFile
) -> dict[str, Any]:
    """Runs the stage.

    Args:
        emit_shard: takes shard number, files and row count. A shard's `rows.parquet` has the
            columns id (int64, the row number over all shards) and text (string).
        emit_file: takes `rejects.parquet` (reason, text) and, from python-docs, `holdout.parquet`
            (name, summary, description).

    Returns:
        counts: read, kept, and rejected by reason.

    Raises:
        UserError: bad input, or no sentence left.
    """
    records: Iterator[Record]
    if settings.source == "python-docs":
        records, holdout = read_python_docs(settings)
        if holdout:
            emit_file("holdout.parquet", parquet_bytes(pa.Table.from_pylist(holdout)))
    else:
        records = read_records(settings)
    rejects = _Rejects(settings.max_rejects_kept)
    num_read = 0
    with tempfile.TemporaryDirectory(prefix="sentray-sentences-") as folder:
        buckets = _Buckets(Path(folder), settings.seed)
        for record in records:
            num_read += 1
            for sentence in _clean(record, settings, rejects):
                buckets.add(sentence)
        kept = 0
        rows: list[str] = []
        for sentence in buckets.unique_in_key_order(rejects):
            if settings.limit is not None and kept == settings.limit:
                rejects.counts["over_limit"] += 1  # counted, not kept: nothing is wrong with them
                continue
            rows.append(sentence)
            kept += 1
            if len(rows) == settings.rows_per_shard:
                _emit(rows, kept, settings, emit_shard)
                rows = []
        if rows:
            _emit(rows, kept, settings, emit_shard)
    if not kept:
        reasons = ", ".join(f"{count} {reason}" for reason, count in rejects.counts.items())
        raise UserError(
            f"sentences: nothing is left of {num_read} texts ({reasons or 'no text at all'}). "
            "Look at the input, or change min_chars and max_chars."
        )
    if rejects.kept:
        emit_file("rejects.parquet", parquet_bytes(pa.Table.from_pylist(rejects.kept)))
    return {"read": num_read, "kept": kept, "rejected": dict(rejects.counts)}


def _emit(rows: list[str], kept: int, settings: SentencesSettings, emit_shard: EmitShard) -> None:
    first = kept - len(rows)
    table = pa.table(
        {"id": pa.array(range(first, kept), pa.int64()), "text": pa.array(rows, pa.string())}
    )
    shard = first // settings.rows_per_shard
    emit_shard(shard, {"rows.parquet": parquet_bytes(table)}, len(rows))


def parquet_bytes(table: pa.Table) -> bytes:
    """The table as a Parquet file (zstd)."""
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


def clean_text(text: str, form: str) -> str:
    """Unicode-normalised, without control characters, white space squeezed."""
    if form != "none":
        text = unicodedata.normalize(form, text)  # type: ignore[arg-type]
    return " ".join(CONTROL.sub("", text).split())


def _clean(record: Record, settings: SentencesSettings, rejects: "_Rejects") -> Iterator[str]:
    if isinstance(record, Reject):
        rejects.add(record.reason, record.text)
        return
    # a lone surrogate (from JSON escapes) cannot be encoded; it marks text that was cut apart
    text = clean_text(record.encode("utf-8", "replace").decode("utf-8"), settings.unicode)
    pieces = [text]
    if settings.split_sentences:
        import sentencex

        pieces = [piece.strip() for piece in sentencex.segment(settings.language, text)]
    for piece in pieces:
        if not piece:
            rejects.add("blank", record)
        elif len(piece) < settings.min_chars:
            rejects.add("too_short", piece)
        elif len(piece) > settings.max_chars:
            rejects.add("too_long", piece)
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

    def add(self, sentence: str) -> None:
        text = sentence.encode("utf-8")
        key = hashlib.blake2b(text, digest_size=16, key=self._key).digest()
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

    def unique_in_key_order(self, rejects: _Rejects) -> Iterator[str]:
        for number, bucket in enumerate(self._held):
            file = self._folder / str(number)
            if file.exists():
                for line in file.read_bytes().split(b"\n")[:-1]:
                    bucket.append((bytes.fromhex(line[:32].decode()), line[32:]))
            bucket.sort()
            before = None
            for pair in bucket:
                text = pair[1].decode("utf-8")
                if pair == before:
                    rejects.add("duplicate", text)
                else:
                    yield text
                before = pair
            bucket.clear()
