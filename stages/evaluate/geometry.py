"""Alignment and uniformity (Wang and Isola, ICML 2020): where an encoder puts its vectors."""

import numpy as np
from pydantic import Field

from stages.contract import Figure, Work
from stages.errors import UserError
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

    def load(self) -> StsSet:
        """Raises UserError: as `load_sts`; or no pair means the same."""
        pairs = load_sts(self)
        check_positives(pairs, self.positives_above, "evaluate.geometry")
        return pairs

    def score(self, tested: Tested, work: Work) -> Result:
        return score_geometry(self.load(), self.positives_above, tested.encode)


def score_geometry(pairs: StsSet, positives_above: float, encode: Encode) -> Result:
    """Alignment of pairs that mean the same, uniformity of all sentences; lower is better.

    Args:
        positives_above: pairs with a higher gold score mean the same.
        encode: texts to vectors (N, D), which are scaled to length 1.
    """
    # compressed rank vectors are a little shorter than 1, where both figures are defined
    left, right = unit_rows(encode(pairs.sentence1)), unit_rows(encode(pairs.sentence2))
    same = pairs.gold > positives_above
    values = geometry(left, right, same)
    return Result(
        [
            Figure(
                name, float(several.mean()), "lower", interval=interval_of_mean(several), decimals=3
            )
            for name, several in values.items()
        ],
        ("Alignment of pairs that mean the same, uniformity of all: lower is better.",),
        {"num_positives": int(same.sum())},
        {name: Items("mean", several) for name, several in values.items()},
    )  # fmt: skip


def check_positives(pairs: StsSet, positives_above: float, where: str) -> None:
    """Raises UserError: no pair means the same."""
    if not (pairs.gold > positives_above).any():
        raise UserError(
            f"{where}.positives_above is {positives_above:g}, and no pair of '{pairs.name}' has a "
            f"higher gold score (the highest: {pairs.gold.max():g})"
        )


def geometry(
    left_ND: np.ndarray, right_ND: np.ndarray, same_N: np.ndarray
) -> dict[str, np.ndarray]:
    """Alignment of those pairs of unit vectors that mean the same, and uniformity of all: values
    whose means are the figures."""
    return {
        "alignment": alignment(left_ND[same_N], right_ND[same_N]),
        "uniformity": uniformity(left_ND, right_ND),
    }


def alignment(left_ND: np.ndarray, right_ND: np.ndarray) -> np.ndarray:
    """|x - y|^2 (N,) of pairs of unit vectors, whose mean is the figure."""
    return np.asarray(((left_ND - right_ND) ** 2).sum(1))


def uniformity(left_ND: np.ndarray, right_ND: np.ndarray) -> np.ndarray:
    """Pseudo-values (N,) of log mean over pairs i < j of exp(-2 |x_i - x_j|^2), all 2 N unit
    vectors; their mean is the figure. An item is a row of the set, of two sentences. In tiles of
    1,024 rows.
    """
    count = len(left_ND)
    vectors = np.stack([left_ND, right_ND], 1).reshape(2 * count, -1)  # a row's side by side
    squares = (vectors**2).sum(1)
    by_row, total, squared = np.zeros(count), 0.0, 0.0
    for start in range(0, count, TILE_ROWS):
        some = slice(2 * start, 2 * (start + TILE_ROWS))
        products = vectors[some] @ vectors[2 * start :].T
        distances = squares[some, None] + squares[None, 2 * start :] - 2 * products
        near = np.exp(-2 * distances.astype(np.float64))
        # of two rows together: the four pairs of their sentences
        rows = np.triu(near.reshape(len(near) // 2, 2, -1, 2).sum((1, 3)), 1)
        by_row[start : start + TILE_ROWS] += rows.sum(1)
        by_row[start:] += rows.sum(0)
        total += rows.sum()
        squared += (rows**2).sum()
    within = np.exp(-2 * alignment(left_ND, right_ND).astype(np.float64))
    sum_of_all = total + within.sum()
    # two rows together, and a row's own pair, each less their mean
    num_pairs = count * (count - 1) / 2
    usual = total / max(num_pairs, 1)
    influences = by_row - (count - 1) * usual + within - within.mean()
    squared -= num_pairs * usual**2
    return pseudo_values_of_pairs(
        float(np.log(sum_of_all / (count * (2 * count - 1)))),
        influences / sum_of_all,  # the logarithm's slope
        squared / sum_of_all**2,
    )
