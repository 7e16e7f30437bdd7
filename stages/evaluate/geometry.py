"""Alignment and uniformity (Wang and Isola, ICML 2020): where an encoder puts its vectors."""

import numpy as np
from pydantic import Field

from stages.contract import Figure, Work
from stages.evaluate.base import Encode, Evaluation, Result, Tested
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
        "uniformity": uniformity(np.concatenate([left, right])),
    }
    return Result(
        [Figure(name, value, "lower", decimals=3) for name, value in values.items()],
        ("Alignment of pairs that mean the same, uniformity of all: lower is better.",),
        (("num_positives", int(same.sum())),),
    )


def alignment(left_ND: np.ndarray, right_ND: np.ndarray) -> float:
    """Mean of |x - y|^2 over pairs of unit vectors; nan without pairs."""
    return float(((left_ND - right_ND) ** 2).sum(1).mean()) if len(left_ND) else float("nan")


def uniformity(vectors_ND: np.ndarray) -> float:
    """log mean over pairs i < j of exp(-2 |x_i - x_j|^2), unit vectors, in tiles of 1,024 rows."""
    squares = (vectors_ND**2).sum(1)
    total = 0.0
    for start in range(0, len(vectors_ND), TILE_ROWS):
        rows = slice(start, start + TILE_ROWS)
        products = vectors_ND[rows] @ vectors_ND[start:].T
        distances = squares[rows, None] + squares[None, start:] - 2 * products
        total += np.triu(np.exp(-2 * distances.astype(np.float64)), 1).sum()
    return float(np.log(total / (len(vectors_ND) * (len(vectors_ND) - 1) / 2)))
