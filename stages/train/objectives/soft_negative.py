"""SNCSE's soft negatives (Wang et al. 2022, arXiv 2201.05979)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, model_validator

from stages.tokens.negation import Negator, negation_identity
from stages.train.objectives.base import Objective, Scores, View

if TYPE_CHECKING:
    from torch import Tensor


class SoftNegative(Objective):
    """SNCSE: a sentence's negation, its third view, stays a margin below its other view."""

    contrastive: ClassVar[bool] = True
    views: ClassVar[tuple[View, ...]] = (View("negated", Negator, negation_identity),)

    weight: float = Field(
        1e-3, ge=0, description="lambda: weight of this loss; 1e-3 for BERT, 5e-4 for RoBERTa."
    )
    low: float = Field(
        0.1,
        description="alpha: how far the negation's cosine stays below the positive's, at least.",
    )
    high: float = Field(0.3, description="beta: how far, at most.")

    @model_validator(mode="after")
    def _ordered(self) -> SoftNegative:
        if self.low > self.high:
            raise ValueError(f"low {self.low} (alpha) is above high {self.high} (beta)")
        return self

    def value(self, scores: Scores) -> Tensor:
        return soft_negative_margin(scores.C, scores.own["negated"], self.low, self.high)


def soft_negative_margin(C: Tensor, soft_B: Tensor, low: float, high: float) -> Tensor:
    """mean_i [relu(d_i + alpha) + relu(-d_i - beta)], d_i = cos(u_i, n_i) - C_ii (SNCSE Eq. 3).

    Zero where the negation is between alpha and beta less similar than the other view.
    """
    difference_B = soft_B - C.diagonal()
    return ((difference_B + low).relu() + (-difference_B - high).relu()).mean()
