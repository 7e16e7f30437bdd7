"""What a ranking is worth when some of its documents are relevant; as trec_eval computes it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stages.contract import Figure
from stages.evaluate.resampling import Items, interval_of_mean


def trec_order(scores: np.ndarray, id_ranks: np.ndarray) -> np.ndarray:
    """Places by falling score; of equal ones the greater id first, as in trec_eval.

    Args:
        id_ranks: (n,) places of the ids in their own order.
    """
    return np.lexsort((id_ranks, scores.astype(np.float32)))[::-1]


def average_precision(relevant: np.ndarray, num_relevant: int) -> float:
    """Mean of the precision at each relevant document; what was not found counts as 0.

    Args:
        relevant: (n,) bool in ranked order. num_relevant: in all, found or not.
    """
    places = np.flatnonzero(relevant)
    return float((np.arange(1, len(places) + 1) / (places + 1)).sum() / num_relevant)


def reciprocal_rank(relevant: np.ndarray, most: int | None = None) -> float:
    """1 over the place of the first relevant document, if that is not beyond `most`."""
    places = np.flatnonzero(relevant[:most])
    return 1 / (1 + int(places[0])) if len(places) else 0.0


def ndcg(gains: np.ndarray, all_gains: Sequence[float], most: int) -> float:
    """Normalised discounted cumulative gain of the first `most`; gains count as they are.

    Args:
        gains: (n,) in ranked order. all_gains: of all relevant documents, found or not.
    """
    best = np.sort(np.asarray(all_gains, float))[::-1][:most]
    return _discounted(gains[:most]) / _discounted(best)


def mean_figures(
    name: str, values: Mapping[str, Sequence[float]], averaged: bool = False
) -> list[Figure]:
    """Means x 100 over queries or sentences with their 95% intervals, by standard error: from 0, or
    -100 where a value is negative, to 100.

    Args:
        name: of the set; "" for none. values: by measure, one for each query.
        averaged: over the sets of a table, by measure.
    """
    figures = []
    for measure, several in values.items():
        interval = interval_of_mean(100 * np.asarray(several))
        if interval is not None:
            least = 0 if min(several) >= 0 else -100
            interval = max(interval[0], least), min(interval[1], 100)
        figures.append(
            Figure(
                _heading(measure, name), 100 * float(np.mean(several)), interval=interval,
                percent=True,
                averaged=measure if averaged else "",
            )
        )  # fmt: skip
    return figures


def mean_items(name: str, values: Mapping[str, Sequence[float]]) -> dict[str, Items]:
    """What `mean_figures` are computed from."""
    return {
        _heading(measure, name): Items("mean", np.asarray(several))
        for measure, several in values.items()
    }


def _heading(measure: str, name: str) -> str:
    return f"{measure} {name}".rstrip()


def _discounted(gains: np.ndarray) -> float:
    found: Any = (gains / np.log2(np.arange(2, len(gains) + 2))).sum()
    return float(found)
