"""Rows spread over memory-mapped shards: teacher factors and token ids.

Row i lies in shard i // rows_per_shard. Nothing is read until a row is asked for, so memory is
bounded by what the page cache chooses to keep.
"""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from stages.ranks.positions import rank_factor


def npy_bytes(array: np.ndarray) -> bytes:
    """The array as an `.npy` file, ready to be memory-mapped."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def unit_rows(vectors: np.ndarray) -> np.ndarray:
    """Rows scaled to length 1 in float32; a zero row stays zero."""
    vectors = vectors.astype(np.float32)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(norms, 1e-8))


class FactorRows:
    """A teacher's factor matrix F (N, D): what it scores a batch with is F F^T of its rows.

    On disk fp16 (an encoder's unit vectors, compressed rank vectors), or integer rank positions,
    which become exact rank factors when read.
    """

    def __init__(self, shards: Sequence[Path], rows_per_shard: int) -> None:
        self._shards = [np.load(path, mmap_mode="r", allow_pickle=False) for path in shards]
        self._rows_per_shard = rows_per_shard
        self.num_rows = sum(len(shard) for shard in self._shards)
        self.dimension = self._shards[0].shape[1]

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Rows (B, D) float32."""
        stored = self._shards[0].dtype
        out = np.empty((len(rows), self.dimension), dtype=stored)
        shard_of = rows // self._rows_per_shard
        for shard in np.unique(shard_of):
            chosen = shard_of == shard
            out[chosen] = self._shards[shard][rows[chosen] - shard * self._rows_per_shard]
        return rank_factor(out) if stored.kind == "u" else out.astype(np.float32)


class TokenRows:
    """Token ids of every sentence: flat ids and row offsets, one pair of files a shard."""

    def __init__(self, shards: Sequence[tuple[Path, Path]], rows_per_shard: int) -> None:
        self._ids = [np.load(ids, mmap_mode="r", allow_pickle=False) for ids, _ in shards]
        self._offsets = [np.load(offsets, allow_pickle=False) for _, offsets in shards]
        self._rows_per_shard = rows_per_shard
        self.num_rows = sum(len(offsets) - 1 for offsets in self._offsets)

    def take(self, rows: np.ndarray) -> list[np.ndarray]:
        """One id array per row, in the order asked for."""
        out = []
        for row in rows:
            shard, place = divmod(int(row), self._rows_per_shard)
            start, end = self._offsets[shard][place : place + 2]
            out.append(self._ids[shard][start:end])
        return out
