"""Alignment and uniformity (Wang and Isola, ICML 2020): where an encoder puts its vectors."""

import numpy as np
from pydantic import Field

from stages.contract import Figure, Work
from stages.evaluate.base import Encode, Evaluation, Result, Tested
from stages.evaluate.resampling import Items, interval_of_mean, pseudo_values_of_pairs
from stages.evaluate.sets import StsSet, StsSettings, load_sts
from stages.rows import unit_rows

TILE_ROWS = 1024


class GeometrySettings(StsSettings, Evaluation):
    """Alignment of pairs that mean the same, and uniformity of all sentences."""

    positives_above: float = Field(
        4.0,
        description="Pairs with a higher gold score count as meaning the same (4 of 5 in the "
        "papers).",
    )

    @property
    def title(self) -> str:
        return f"geometry-{self.name}"

    def score(self, tested: Tested, work: Work) -> Result:
        return score_geometry(load_sts(self), self.positives_above, tested.encode)


def score_geometry(pairs: StsSet, positives_above: float, encode: Encode) -> Result:
    """Alignment of pairs that mean the same, uniformity of all sentences; lower is better.

    Args:
        positives_above: pairs with a higher gold score mean the same.
        encode: texts to vectors (N, D), which are scaled to length 1.
    """
    # compressed rank vectors are a little shorter than 1, where both figures are defined
    left, right = unit_rows(encode(pairs.sentence1)), unit_rows(encode(pairs.sentence2))
    same = pairs.gold > positives_above
    values = {
        "alignment": alignment(left[same], right[same]),
        "uniformity": uniformity(left, right),
    }
    return Result(
        [
            Figure(
                name, _mean(several), "lower", interval=interval_of_mean(several), decimals=3
            )
            for name, several in values.items()
        ],
        ("Alignment of pairs that mean the same, uniformity of all: lower is better.",),
        (("num_positives", int(same.sum())),),
        {name: Items("mean", several) for name, several in values.items() if len(several)},
    )  # fmt: skip


def _mean(values_N: np.ndarray) -> float:
    return float(values_N.mean()) if len(values_N) else float("nan")


def alignment(left_ND: np.ndarray, right_ND: np.ndarray) -> np.ndarray:
    """|x - y|^2 (N,) of pairs of unit vectors, whose mean is the figure."""
    return np.asarray(((left_ND - right_ND) ** 2).sum(1))


def uniformity(left_ND: np.ndarray, right_ND: np.ndarray) -> np.ndarray:
    """Pseudo-values (N,) of log mean over pairs i < j of exp(-2 |x_i - x_j|^2), all 2 N unit
    vectors, in tiles of 1,024 rows; their mean is the figure. An item is a row of the set, of two
    sentences. Where these are nearly alike their error is up to 1.4 times too large, as what is
    taken off for pairs that count twice is of single vectors' pairs.
    """
    vectors, count = np.concatenate([left_ND, right_ND]), len(left_ND)
    squares = (vectors**2).sum(1)
    by_vector, squared = np.zeros(2 * count), 0.0
    for start in range(0, 2 * count, TILE_ROWS):
        rows = slice(start, start + TILE_ROWS)
        products = vectors[rows] @ vectors[start:].T
        distances = squares[rows, None] + squares[None, start:] - 2 * products
        near = np.triu(np.exp(-2 * distances.astype(np.float64)), 1)
        by_vector[rows] += near.sum(1)
        by_vector[start:] += near.sum(0)
        squared += (near**2).sum()
    within = np.exp(-2 * alignment(left_ND, right_ND).astype(np.float64))
    num_pairs = count * (2 * count - 1)
    mean = by_vector.sum() / 2 / num_pairs
    # each row's 4 N - 3 pairs, less as many of the mean
    by_row = by_vector[:count] + by_vector[count:] - within - (4 * count - 3) * mean
    scale = num_pairs * mean  # the logarithm's slope
    squared = (squared - num_pairs * mean**2) / scale**2
    return pseudo_values_of_pairs(float(np.log(mean)), by_row / scale, squared)
