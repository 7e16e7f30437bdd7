"""The bootstrap: a figure of the same items drawn anew, with replacement, many times.

All encoders are tested on the same items, and equal seeds draw equal items. So the differences of
two encoders' resampled figures are those of a paired bootstrap (Efron and Tibshirani 1993, 8.3).

Shapes: N items, R resamples. How often each item was drawn (R, N) weighs it, so that what is sorted
is sorted once.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from stages.contract import Artifact
from stages.rows import npy_bytes

# Of so many items together: 1 MB, which stays in a core's cache (twice as fast as 32 MB)
WEIGHTS = 1 << 17
NUM_RESAMPLES = 1000

Statistic = Literal["mean", "mean of repetitions", "spearman", "average precision"]


@dataclass(frozen=True)
class Items:
    """What a figure was computed from.

    values: of mean (N,); of mean of repetitions (N, K), which are drawn anew, too, as those of
        another encoder fall out otherwise; of spearman (N, 2), prediction and gold score; of
        average precision (N, 2), prediction and whether it is one (0 or 1).
    """

    statistic: Statistic
    values: np.ndarray

    def figure(self) -> float:
        """Of the items as they are."""
        if self.statistic == "mean of repetitions":  # else some of them would be drawn
            return float(self.values.mean())
        return float(_STATISTICS[self.statistic](self.values)(np.ones((1, len(self.values))))[0])

    def resampled(self, num_resamples: int = NUM_RESAMPLES, seed: int = 0) -> np.ndarray:
        """(R,) float64; nan where a resample has no figure, and where a value is no number."""
        if not np.isfinite(self.values).all():
            return np.full(num_resamples, np.nan)
        of_weights = _STATISTICS[self.statistic](self.values)
        found = [of_weights(part) for part in _weights(len(self.values), num_resamples, seed)]
        return np.concatenate([np.empty(0), *found])


def interval(figures_R: np.ndarray) -> tuple[float, float]:
    """95%: from the 2.5th to the 97.5th percentile of those that are numbers; nan without any."""
    if np.isnan(figures_R).all():
        return float("nan"), float("nan")
    low, high = np.nanpercentile(figures_R, [2.5, 97.5])
    return float(low), float(high)


def interval_of_mean(values_N: np.ndarray) -> tuple[float, float] | None:
    """95%, by standard error; None of fewer than two items, or of some that are no number."""
    if len(values_N) < 2 or not np.isfinite(values_N).all():
        return None
    mean = float(np.mean(values_N))
    error = 1.96 * float(np.std(values_N, ddof=1)) / len(values_N) ** 0.5
    return mean - error, mean + error


def pseudo_values(figure: float, influences_N: np.ndarray) -> np.ndarray:
    """Items whose mean is a figure that is no mean, and the standard error of that the figure's
    (the jackknife: Efron and Tibshirani 1993, 11.5).

    Args:
        influences_N: how much each of N items adds to the figure: what it loses without it.
    """
    return np.asarray(figure + (len(influences_N) - 1) * (influences_N - influences_N.mean()))


def pseudo_values_of_pairs(
    figure: float, influences_N: np.ndarray, squares_of_pairs: float
) -> np.ndarray:
    """`pseudo_values` of a figure over pairs of N items.

    What a pair adds is added to both its items. So squares count it twice, which is taken off
    (Aronow, Samii and Assenova 2015): without that the error over few pairs would be up to 1.4
    times too large.

    Args:
        squares_of_pairs: sum of the squares of what each pair adds.
    """
    squares = influences_N @ influences_N
    once = 1 - squares_of_pairs / squares if squares else 1.0
    return pseudo_values(figure, np.sqrt(np.maximum(once, 0.5)) * influences_N)


def write_items(items: Mapping[str, Items], folder: Path) -> dict[str, Any]:
    """Writes arrays of items by figure into a folder; returns what the manifest says of them."""
    for place, one in enumerate(items.values()):
        (folder / _file(place)).write_bytes(npy_bytes(one.values))
    return {"items": {name: one.statistic for name, one in items.items()}}


def read_items(artifact: Artifact) -> dict[str, Items]:
    """What an artifact of figures has kept of their items, by figure."""
    statistics: dict[str, Statistic] = artifact.stats.get("items", {})
    return {
        name: Items(statistic, np.load(artifact.file_path(_file(place)), allow_pickle=False))
        for place, (name, statistic) in enumerate(statistics.items())
    }


def _file(place: int) -> str:
    return f"items-{place}.npy"


def _weights(size: int, num_resamples: int, seed: int) -> Iterator[np.ndarray]:
    """How often each item is drawn (r, N), some resamples at a time."""
    random = np.random.default_rng(seed)
    rows = max(1, WEIGHTS // max(1, size))
    for start in range(0, num_resamples, rows):
        count = min(rows, num_resamples - start)
        draws = (random.integers(0, size, size) for _ in range(count))
        yield np.stack([np.bincount(draw, minlength=size) for draw in draws]).astype(np.float64)


OfWeights = Callable[[np.ndarray], np.ndarray]


def _mean(values_N: np.ndarray) -> OfWeights:
    return lambda weights_RN: weights_RN @ values_N / weights_RN.sum(1)


def _mean_of_repetitions(values_NK: np.ndarray) -> OfWeights:
    random, num_repetitions = np.random.default_rng(0), values_NK.shape[1]

    def of_weights(weights_RN: np.ndarray) -> np.ndarray:
        means_RK = weights_RN @ values_NK / weights_RN.sum(1, keepdims=True)
        drawn_RK = random.integers(0, num_repetitions, means_RK.shape)
        return np.asarray(np.take_along_axis(means_RK, drawn_RK, axis=1).mean(1))

    return of_weights


def _spearman(values_N2: np.ndarray) -> OfWeights:
    prediction, gold = (_ranks(column) for column in values_N2.T)

    def of_weights(weights_RN: np.ndarray) -> np.ndarray:
        ranks = [ranks_of(weights_RN) for ranks_of in (prediction, gold)]
        weighted = [weights_RN * one for one in ranks]
        a, b = (np.einsum("rn,rn->r", *pair) for pair in zip(weighted, ranks, strict=True))
        products = np.einsum("rn,rn->r", weighted[0], ranks[1])
        # a constant side leaves rounding only
        scale = np.sqrt(np.where((a > 1e-9) & (b > 1e-9), a * b, np.nan))
        return np.asarray(products / scale)

    return of_weights


def _ranks(values_N: np.ndarray) -> OfWeights:
    """Average ranks, less their mean, of items that are there so many times."""
    order, first, group_N = _groups(values_N)

    def of_weights(weights_RN: np.ndarray) -> np.ndarray:
        counts = np.add.reduceat(weights_RN[:, order], first, axis=1)
        ends = counts.cumsum(1)
        ranks = ends - (counts - 1) / 2 - (ends[:, -1:] + 1) / 2
        return ranks[:, group_N]

    return of_weights


def _average_precision(values_N2: np.ndarray) -> OfWeights:
    order, first, _ = _groups(-values_N2[:, 0])
    positive_N = values_N2[order, 1]

    def of_weights(weights_RN: np.ndarray) -> np.ndarray:
        weights_RN = weights_RN[:, order]
        found = np.add.reduceat(weights_RN * positive_N, first, axis=1)
        seen = np.add.reduceat(weights_RN, first, axis=1).cumsum(1)
        with np.errstate(invalid="ignore"):  # before the first item, and without positives
            precision = np.nan_to_num(found.cumsum(1) / seen)
            return np.asarray((found * precision).sum(1) / found.sum(1))

    return of_weights


def _groups(values_N: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Items in rising order; places in it where another value begins; which value each item has."""
    order = np.argsort(values_N, kind="stable")
    _, first, group_N = np.unique(values_N, return_index=True, return_inverse=True)
    starts = np.searchsorted(values_N[order], values_N[first])
    return order, starts, group_N


_STATISTICS: dict[Statistic, Callable[[np.ndarray], OfWeights]] = {
    "mean": _mean,
    "mean of repetitions": _mean_of_repetitions,
    "spearman": _spearman,
    "average precision": _average_precision,
}
