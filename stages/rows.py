"""Rows spread over memory-mapped shards: teacher factors and token ids.

Row i lies in shard i // rows_per_shard. Nothing is read until a row is asked for, so memory is
bounded by what the page cache chooses to keep.
"""

import io
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from stages.errors import UserError
from stages.ranks.positions import rank_factor

# Of one array over many shards; a kernel grants a process 65,530 maps, and a training reads some
# arrays. Opening one anew takes 0.1 ms.
MOST_MAPS = 8_000


def npy_bytes(array: np.ndarray) -> bytes:
    """The array as an `.npy` file, ready to be memory-mapped."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def mapped(path: Path) -> np.ndarray:
    """An `.npy` file in a memory map that holds no file open, read-only.

    numpy's maps keep a descriptor each, of which a process has 1,024 by default.

    Raises:
        ValueError: it is no such file, or is cut off.
    """
    import torch

    with path.open("rb") as file:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0}
        shape, fortran, dtype = read.get(version, np.lib.format.read_array_header_2_0)(file)
        begin, size = file.tell(), path.stat().st_size
    count = math.prod(shape)
    if fortran or dtype.hasobject or begin + count * dtype.itemsize != size:
        raise ValueError(f"{path}: not a whole array of numbers, row by row")
    whole = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).numpy()
    array = np.frombuffer(whole, dtype, count, begin).reshape(shape)
    array.flags.writeable = False
    return array


def unit_rows(vectors: np.ndarray) -> np.ndarray:
    """Rows scaled to length 1 in float32; a zero row stays zero."""
    vectors = vectors.astype(np.float32)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(norms, 1e-8))


def without_direction(norms: np.ndarray) -> np.ndarray:
    """Which rows cannot be scaled to length 1, by their lengths: not finite, or zero."""
    return np.flatnonzero(~(np.isfinite(norms) & (norms > 1e-8)))


def directions(vectors: np.ndarray, what: str, name_of: Callable[[int], object]) -> np.ndarray:
    """Unit rows (n, D) float64 of vectors that somebody else made.

    Args:
        what: where they come from; starts the message.
        name_of: the sentence of a row, as the message calls it.

    Raises:
        UserError: a vector that is not finite or has no direction.
    """
    vectors = vectors.astype(np.float64)  # whose squares do not overflow
    norms = np.linalg.norm(vectors, axis=1)
    bad = without_direction(norms)
    if len(bad):
        raise UserError(
            f"{what}: the vector of sentence {name_of(int(bad[0]))} is "
            f"{'zero' if np.isfinite(norms[bad[0]]) else 'not finite'} (and of {len(bad) - 1} "
            "more in this batch); such a vector has no direction, so make it again"
        )
    return np.asarray(vectors / norms[:, None])


# What rounding to fp16 can do to the length of a unit vector: half a unit in the last of 11 bits
FP16_ROUNDING = 2.0**-11


class FactorRows:
    """A teacher's factor matrix F (N, D): what it scores a batch with is F F^T of its rows.

    On disk fp16 (an encoder's unit vectors, compressed rank vectors, reduced vectors), or integer
    rank positions, which become exact rank factors when read. Rounding changed the unit vectors'
    lengths, which orders near sentences anew; they are scaled back when read. Compressed rank
    vectors and reduced vectors are shorter than 1 by what was cut off, which is more than rounding
    does, and stay so.

    Args:
        renormalise: False for rows as they were stored.
    """

    def __init__(
        self, shards: Sequence[Path], rows_per_shard: int, renormalise: bool = True
    ) -> None:
        self._renormalise = renormalise
        self._shards, self._mapped = shards, lru_cache(MOST_MAPS)(mapped)
        self._rows_per_shard = rows_per_shard
        self.num_rows = sum(len(self._mapped(path)) for path in shards)
        first = self._mapped(shards[0])
        self.dimension, self._dtype = first.shape[1], first.dtype

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Rows (B, D) float32."""
        out = np.empty((len(rows), self.dimension), dtype=self._dtype)
        shard_of = rows // self._rows_per_shard
        for shard in np.unique(shard_of):
            chosen = shard_of == shard
            array = self._mapped(self._shards[shard])
            out[chosen] = array[rows[chosen] - shard * self._rows_per_shard]
        if self._dtype.kind == "u":
            return rank_factor(out)
        factors = out.astype(np.float32)
        if self._renormalise:
            norms = np.linalg.norm(factors, axis=1, keepdims=True)
            factors /= np.where(np.abs(norms - 1) <= FP16_ROUNDING, norms, 1)
        return factors


class TokenRows:
    """Token ids row by row: flat ids and row offsets, one pair of files a shard of any length."""

    def __init__(self, shards: Sequence[tuple[Path, Path]]) -> None:
        self._ids, self._mapped = [ids for ids, _ in shards], lru_cache(MOST_MAPS)(mapped)
        for path in self._ids:
            self._mapped(path)  # one that is cut off is found now
        self._offsets = [np.load(offsets, allow_pickle=False) for _, offsets in shards]
        self._starts = np.cumsum([0, *(len(offsets) - 1 for offsets in self._offsets)])
        self.num_rows = int(self._starts[-1])

    def take(self, rows: np.ndarray) -> list[np.ndarray]:
        """One id array per row, in the order asked for."""
        out = []
        shards = np.searchsorted(self._starts, rows, side="right") - 1
        for shard, place in zip(shards, rows - self._starts[shards], strict=True):
            start, end = self._offsets[shard][place : place + 2]
            out.append(self._mapped(self._ids[shard])[start:end])
        return out


class OwnedRows:
    """Token ids of rows that belong to sentences, several to one or none: rewrites, negatives.

    Memory: 8 bytes for every such row, and 8 for every sentence that has any.

    Args:
        sources: for each source its tokens and, row by row, the owning sentence (int64,
            ascending).
    """

    def __init__(self, sources: Sequence[tuple[TokenRows, np.ndarray]]) -> None:
        self._sources = sources
        self.owners = np.unique(np.concatenate([owners for _, owners in sources]))

    def take(self, sentences: np.ndarray, draws: np.ndarray) -> list[np.ndarray]:
        """One of the rows of each sentence.

        Args:
            sentences: (b,) int64; each owns at least one row.
            draws: (b,) in [0, 1): which of its rows, counted over all sources.
        """
        spans = [
            [np.searchsorted(owners, sentences, side) for side in ("left", "right")]
            for _, owners in self._sources
        ]
        total = sum(end - start for start, end in spans)
        wanted = (draws * total).astype(np.int64)
        out: list[np.ndarray] = [np.empty(0)] * len(sentences)
        for (tokens, _), (start, end) in zip(self._sources, spans, strict=True):
            here = np.flatnonzero((wanted >= 0) & (wanted < end - start))
            for place, row in zip(here, tokens.take((start + wanted)[here]), strict=True):
                out[place] = row
            wanted -= end - start  # below 0 once found
        return out
