"""A teacher's vectors that are there already: an `.npy` file or Parquet, joined to the sentences.

Memory: 17 bytes for each sentence of the corpus (25 while the join is prepared) and one batch of
vectors. Joined vectors wait in a temporary file of 2 bytes a number, as their order may be any.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from stages.contract import Artifact, Fingerprinted, Shard, Stage, Work
from stages.embed.basis import basis_in, reduced
from stages.errors import UserError
from stages.fields import TextsPath
from stages.plain import shortened
from stages.rows import directions, npy_bytes
from stages.samples import factor_rows
from stages.sentences.cleaning import clean_text
from stages.sentences.index import JoinedByKey, SentenceIndex
from stages.sentences.settings import SourceKind
from stages.sentences.sources import (
    Reject,
    Table,
    check_columns,
    input_files,
    is_text,
    read_table,
)
from stages.sentences.texts import read_texts, texts_of_rows

BATCH_ROWS = 8192

Keys = Sequence[str]


class VectorsSettings(JoinedByKey):
    """Vectors from a file, one for each sentence; rows of other sentences are left out."""

    path: TextsPath = Field(
        description="An .npy file with a matrix of a row for each sentence, or Parquet (a file or "
        "folder) with a column of lists."
    )
    sentences: TextsPath | None = Field(
        None,
        description="For .npy: a file with the sentence of each row, in the same order (text, or a "
        "table with `sentence_column` or `id_column`).",
    )
    source: SourceKind | None = Field(
        None, description="Kind of the file `sentences`; null: told from its suffix."
    )
    invalid_utf8: Literal["error", "reject"] = Field(
        "error",
        description="What to do with lines of `sentences` that are not UTF-8: stop, or leave their "
        "vectors out.",
    )
    sentence_column: str | None = Field(
        "text", description="Column of the sentence; vectors are joined by its text."
    )
    vector_column: str = Field("vector", description="Parquet: column of the vector.")

    @model_validator(mode="after")
    def _says_whose(self) -> "VectorsSettings":
        if self.is_matrix and self.sentences is None:
            raise ValueError(
                "an .npy file does not say whose vectors it has: set `sentences` to a file with "
                "the sentence (or id) of each row. Their order in the corpus is another one"
            )
        if self.sentences is not None and not self.is_matrix:
            raise ValueError("`sentences` is for an .npy file; Parquet has them in a column")
        return self

    @property
    def is_matrix(self) -> bool:
        return self.path.lower().endswith(".npy")


@dataclass(frozen=True)
class GivenVectors(Stage):
    """Vectors of yours to `factors.npy`: unit rows (N, D) fp16 in each shard, or reduced ones.

    unicode: normal form of the sentences; texts in the file are cleaned alike.
    basis: input with what the rows are reduced to; "" keeps them whole.
    """

    settings: VectorsSettings
    where: str
    unicode: str
    basis: str = ""

    kind = "vectors"
    version = 1
    row_wise = True

    def identity(self, inputs: Mapping[str, Fingerprinted]) -> dict[str, Any]:
        found = self.settings.identity(self.where)
        return {f"vectors.{key}": value for key, value in found.items() if value is not None}

    def check(self) -> None:
        self.width()

    def width(self) -> int | None:
        for _, vectors in read_vectors(self.settings, self.where):
            return int(vectors.shape[1])
        return None

    def sampled(
        self, work: Work, rows: np.ndarray, has_width: Callable[[int], None]
    ) -> tuple[np.ndarray, dict[str, Any]]:
        order = np.argsort(rows)
        ascending = rows[order]
        found = np.empty((0, 0), np.float32)
        matching = self._matching(work)
        for known, units in matching:
            if not found.size:
                has_width(units.shape[1])
                found = np.empty((len(rows), units.shape[1]), np.float32)
            places = np.minimum(np.searchsorted(ascending, known), len(rows) - 1)
            wanted = ascending[places] == known
            found[order[places[wanted]]] = units[wanted]
        self._check_complete(work, matching.missing)
        return found, {}

    def make(self, work: Work, loaded: Any) -> None:
        numbers, matching = work.input("sentences").shard_numbers, self._matching(work)
        with tempfile.TemporaryDirectory() as folder:
            factors = join(matching, Path(folder) / "factors", basis_in(work, self.basis))
            self._check_complete(work, matching.missing)
            for number, (start, end) in zip(numbers, pairwise(matching.index.starts), strict=True):
                part = npy_bytes(np.asarray(factors[start:end]))
                work.put_shard(number, Shard({"factors.npy": part}, end - start))
        left_out = {"rows_left_out": matching.num_unknown, "rows_twice": matching.num_twice}
        work.say(
            f"{len(factors):,} vectors of {factors.shape[1]} dimensions; left out: "
            f"{matching.num_unknown:,} of no sentence here, {matching.num_twice:,} of one that had "
            "its vector",
            important=any(left_out.values()),
        )
        work.publish(left_out)

    def _matching(self, work: Work) -> "Matching":
        sentences = work.input("sentences")
        texts = (read_texts(sentences, number) for number in sentences.shard_numbers)
        index = SentenceIndex(texts, by_text=self.settings.id_column is None)
        return Matching(self.settings, self.where, self.unicode, index)

    def _check_complete(self, work: Work, missing: np.ndarray) -> None:
        if not len(missing):
            return
        sentences = work.input("sentences")
        (first,), _ = texts_of_rows(sentences, [int(missing[0])])
        raise UserError(
            f"{self.where}: {self.settings.path} has no vector for {len(missing):,} of "
            f"{sentences.num_rows:,} sentences, the first being {first!r} (id {missing[0]}). Add "
            "them, or give the corpus that it has vectors of."
        )

    @classmethod
    def sample(
        cls, artifact: Artifact, open_input: Callable[[str], Artifact], num_rows: int
    ) -> list[str]:
        return factor_rows(artifact.shard_path(artifact.shard_numbers[0], "factors.npy"), num_rows)


class Matching:
    """Vectors of a file as those of rows of the corpus: rows (n,) and unit vectors (n, D) float64,
    in batches, each row once.

    num_unknown: vectors so far of no sentence of the corpus. num_twice: of sentences that had
    theirs; the first one counts.

    Args:
        where: where the recipe says so, for messages.
        form: Unicode normal form of the sentences.
    """

    def __init__(
        self, settings: VectorsSettings, where: str, form: str, index: SentenceIndex
    ) -> None:
        self._settings, self._where, self._form, self.index = settings, where, form, index
        self._seen = np.zeros(index.num_rows, dtype=bool)
        self.num_unknown = self.num_twice = 0

    @property
    def missing(self) -> np.ndarray:
        """Rows (n,) int64 without a vector so far."""
        return np.flatnonzero(~self._seen)

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """
        Raises:
            UserError: the file cannot be read, its vectors are not of one width or not finite, or
                it has another number of rows than sentences.
        """
        what = f"{self._where}: {self._settings.path}"
        for keys, vectors in read_vectors(self._settings, self._where):
            places = [self.index.row_of(clean_text(key, self._form)) for key in keys]
            found = np.array([-1 if place is None else place for place in places])
            known = np.flatnonzero(found >= 0)
            _, first = np.unique(found[known], return_index=True)
            taken = known[np.sort(first)]
            taken = taken[~self._seen[found[taken]]]
            self.num_unknown += len(vectors) - len(known)
            self.num_twice += len(known) - len(taken)
            rows = found[taken]
            self._seen[rows] = True
            named = [repr(shortened(keys[place])) for place in taken]
            yield rows, directions(vectors[taken], what, named.__getitem__)


def join(matching: Matching, file: Path, basis_Dk: np.ndarray | None = None) -> np.ndarray:
    """The corpus's factors (N, D) fp16, or reduced ones (N, k), in a file that it writes.

    Those of rows without a vector (`matching.missing`) may be anything. Raises like `matching`.
    """
    factors = np.empty((0, 0), np.float16)
    for rows, units in matching:
        part = reduced(units, basis_Dk)
        if not factors.size:
            factors = _empty_matrix(file, (matching.index.num_rows, part.shape[1]))
        factors[rows] = part
    return factors


def _empty_matrix(file: Path, shape: tuple[int, int]) -> np.ndarray:
    with file.open("wb") as opened:  # a full disk is an error here, and a dead process later
        os.posix_fallocate(opened.fileno(), 0, max(1, 2 * shape[0] * shape[1]))
    return np.memmap(file, np.float16, "r+", shape=shape)


def read_vectors(settings: VectorsSettings, where: str) -> Iterator[tuple[Keys, np.ndarray]]:
    """Keys (texts or ids) and their vectors (n, D), in batches.

    Raises:
        UserError: see `Matching`.
    """
    if settings.is_matrix:
        yield from _read_matrix(settings, where)
    else:
        yield from _read_parquet(settings, where)


def _read_matrix(settings: VectorsSettings, where: str) -> Iterator[tuple[Keys, np.ndarray]]:
    file = input_files(settings.path, f"{where}.path")[0]
    if settings.sentences is not None:
        input_files(settings.sentences, f"{where}.sentences")
    try:
        matrix = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise UserError(f"{where}: {file} is not a readable .npy file ({error})") from None
    if not isinstance(matrix, np.ndarray):
        raise UserError(f"{where}: {file} is not an .npy file, but an archive of some")
    if matrix.ndim != 2 or matrix.dtype.kind != "f" or not matrix.size:
        raise UserError(
            f"{where}: {file} holds {matrix.dtype} of shape {matrix.shape}; vectors are floating "
            "point numbers of shape (sentences, dimensions)"
        )
    numbers = (settings.id_column,) if settings.id_column else ()
    table = Table(
        settings.sentences or "", (settings.key,), settings.source, settings.invalid_utf8, where,
        numbers,
    )  # fmt: skip
    rows = ("" if isinstance(row, Reject) else row[0] for row in read_table(table))
    count = 0
    while keys := list(islice(rows, BATCH_ROWS)):
        if count + len(keys) <= len(matrix):
            yield keys, matrix[count : count + len(keys)]
        count += len(keys)
    if count != len(matrix):
        raise UserError(
            f"{where}: {file} has {len(matrix):,} rows, but {settings.sentences} has {count:,} "
            "sentences; it must have one for each of them, in their order"
        )


def _read_parquet(settings: VectorsSettings, where: str) -> Iterator[tuple[Keys, np.ndarray]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def is_key(kind: Any) -> bool:
        return is_text(kind) or bool(pa.types.is_integer(kind))

    table = Table(settings.path, (settings.key, settings.vector_column), None, "error", where)
    width = 0
    for file in input_files(settings.path, f"{where}.path"):
        try:
            whole = pq.ParquetFile(file)
            check_columns(table, whole.schema_arrow.names, str(file))
            for batch in whole.iter_batches(columns=list(table.columns), batch_size=BATCH_ROWS):
                vectors = _matrix(batch.column(settings.vector_column), f"{where}: {file}")
                if width and vectors.shape[1] != width:
                    raise UserError(
                        f"{where}: {file} has vectors of {vectors.shape[1]} dimensions, after some "
                        f"of {width}; make all with one model"
                    )
                width = vectors.shape[1]
                keys = batch.column(settings.key)
                if not (is_text if settings.id_column is None else is_key)(keys.type):
                    wanted = "text" if settings.id_column is None else "whole numbers or text"
                    raise UserError(
                        f"{where}: column '{settings.key}' of {file} holds {keys.type}, not "
                        f"{wanted}"
                    )
                yield ["" if key is None else str(key) for key in keys.to_pylist()], vectors
        except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
            raise UserError(f"{file}: not a readable Parquet file ({error})") from None


def _matrix(column: Any, what: str) -> np.ndarray:
    """A column of lists, of fixed size or not, as (n, D)."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    is_list = any(
        test(kind) for test in (pa.types.is_list, pa.types.is_large_list,
                                pa.types.is_fixed_size_list)
    )  # fmt: skip
    if not is_list or not pa.types.is_floating(kind.value_type):
        raise UserError(f"{what} has vectors of type {kind}; a list of floating point numbers is")
    lengths = pc.unique(pc.list_value_length(column)).to_pylist()
    if len(lengths) > 1 or not lengths[0]:
        shown = ", ".join("missing" if one is None else str(one) for one in lengths)
        raise UserError(
            f"{what} has vectors of several widths or none: {shown}; make all with one model"
        )
    flat = pc.list_flatten(column).to_numpy(zero_copy_only=False)
    return np.asarray(flat, dtype=np.float32).reshape(len(column), -1)
