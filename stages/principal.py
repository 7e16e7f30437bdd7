"""Factors in fewer dimensions: which directions to keep, from which rows they are learned, and what
the rest amounts to.

Shapes: N rows, D dimensions, k that are kept.
"""

import math
from typing import Any

import numpy as np


def random_order(num_rows: int, seed: int, stream: int) -> np.ndarray:
    """Rows (N,) int64 in an order that depends on these numbers alone. Memory: 16 bytes a row."""
    return np.argsort(np.random.Philox(key=[seed, stream]).random_raw(num_rows), kind="stable")


def fit_and_held_out(
    order: np.ndarray, fit_rows: int, held_out_rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rows to learn directions from, and others to measure the error on: the last ones of an order.

    Args:
        fit_rows, held_out_rows: their numbers; fewer where there are fewer, and a tenth of all
            rows is held out at most.
    """
    num_held_out = min(held_out_rows, len(order) // 10)
    rest, held_out = np.split(order, [len(order) - num_held_out])
    return rest[max(0, len(rest) - fit_rows) :], held_out


def principal_directions(vectors_ND: np.ndarray, count: int) -> np.ndarray:
    """The leading directions (D, k) float64, orthonormal, of most squared length first.

    About the origin and not the mean: what must survive are products of rows, and no other k
    directions keep more of them (Eckart-Young). k is D where `count` is more.
    Memory: 16 bytes a number of the vectors, beside them, and then some matrices (D, D) float64.
    """
    _, directions = np.linalg.eigh(vectors_ND.T.astype(np.float64) @ vectors_ND)
    return directions[:, ::-1][:, :count].copy()


def similarity_error(exact_NN: np.ndarray, factors_Nk: np.ndarray) -> dict[str, Any]:
    """Products of compressed factors against exact similarities, over all pairs of two rows.

    Returns:
        `rmse`, `max`, the exact similarities' standard deviation `spread`, and `tenths`: the pairs
        whose exact similarity lies in [from, from + 0.1), their number and squared error.
    """
    above = np.triu(np.ones(exact_NN.shape, dtype=bool), 1)
    truth, error = exact_NN[above], (factors_Nk @ factors_Nk.T - exact_NN)[above]
    tenth = np.floor(truth * 10).astype(int)
    return {
        "rmse": float(np.sqrt((error**2).mean())),
        "max": float(np.abs(error).max()),
        "spread": float(truth.std()),
        "tenths": [
            {
                "from": t / 10,
                "pairs": int((tenth == t).sum()),
                "squared_error": float((error[tenth == t] ** 2).sum()),
            }
            for t in np.unique(tenth).tolist()
        ],
    }


def band_error(error: dict[str, Any], low: float, high: float = math.inf) -> tuple[int, float]:
    """Pairs with exact similarity in [low, high), by whole tenths, and their rmse."""
    inside = [t for t in error["tenths"] if low - 0.05 < t["from"] < high - 0.05]
    pairs = sum(t["pairs"] for t in inside)
    return pairs, (sum(t["squared_error"] for t in inside) / pairs) ** 0.5 if pairs else 0.0
