"""Regression on a teacher's similarities (RankEncoder: Seonwoo et al., Findings of ACL 2023)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from stages.train.objectives.base import Objective, Scores

if TYPE_CHECKING:
    from torch import Tensor


class RankRegression(Objective):
    """RankEncoder: the student's cosines approach the teacher's similarities.

    Defaults are the paper's. Two of its released runs use `combine: sum` and `high: 0.9999`.
    """

    needs_teacher: ClassVar[bool] = True

    weight: float = Field(0.05, ge=0, description="lambda: weight of this loss.")
    low: float = Field(
        0.5, ge=-1, le=1, description="tau_l: leave out pairs that the teacher finds less similar."
    )
    high: float = Field(
        0.8, ge=-1, le=1, description="tau_u: leave out pairs that the teacher finds more similar."
    )
    combine: Literal["maximum", "sum"] = Field(
        "maximum",
        description="maximum: take the larger of this loss and the contrastive ones (infonce plus "
        "soft_negative), then add all others. sum: add it like the others.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> RankRegression:
        if self.low > self.high:
            raise ValueError(
                f"low {self.low} (tau_l) is above high {self.high} (tau_u), so no pair would pass"
            )
        return self

    @property
    def replaces_contrastive(self) -> bool:
        return self.combine == "maximum"

    def value(self, scores: Scores) -> Tensor:
        return rank_regression(scores.C, scores.teacher, self.low, self.high)


def rank_regression(C: Tensor, T: Tensor, low: float, high: float) -> Tensor:
    """sum_ij w_ij (T_ij - C_ij)^2 / sum_ij w_ij with w_ij = [low <= T_ij <= high].

    RankEncoder Eq. 3 and 4 (Seonwoo et al., Findings of ACL 2023). T is constant; where no pair
    passes, the value and its gradient are 0.
    """
    kept = (low <= T) & (high >= T)
    return ((T - C) ** 2).where(kept, 0).sum() / (kept.sum().to(C.dtype) + 1e-8)
