"""Rows spread over memory-mapped shards: teacher factors and token ids.

Row i lies in shard i // rows_per_shard. Nothing is read until a row is asked for, so memory is
bounded by what the page cache chooses to keep.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np


class FactorRows:
    """A teacher's factor matrix F (N, D): unit rows, fp16 on disk, float32 when read."""

    def __init__(self, shards: Sequence[Path], rows_per_shard: int) -> None:
        self._shards = [np.load(path, mmap_mode="r", allow_pickle=False) for path in shards]
        self._rows_per_shard = rows_per_shard
        self.num_rows = sum(len(shard) for shard in self._shards)
        self.dimension = self._shards[0].shape[1]

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Rows (B, D) float32, rescaled to length 1 so that fp16 rounding leaves the diagonal."""
        out = np.empty((len(rows), self.dimension), dtype=np.float32)
        shard_of = rows // self._rows_per_shard
        for shard in np.unique(shard_of):
            chosen = shard_of == shard
            out[chosen] = self._shards[shard][rows[chosen] - shard * self._rows_per_shard]
        out /= np.linalg.norm(out, axis=1, keepdims=True)
        return out


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
