"""ListMLE: the likelihood of the teacher's order (RankCSE Eq. 5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from stages.train.objectives.base import Objective, Scores
from stages.train.objectives.scores import off_diagonal

if TYPE_CHECKING:
    from torch import Tensor


class ListMle(Objective):
    """RankCSE: the student ranks the batch in the teacher's order."""

    needs_teacher: ClassVar[bool] = True

    weight: float = Field(1.0, ge=0, description="gamma: weight of this loss.")
    student_temperature: float = Field(
        0.05, gt=0, description="tau2: temperature of the student's cosines."
    )
    keep_positive: bool = Field(True, description="Keep the sentence itself in its list.")

    def value(self, scores: Scores) -> Tensor:
        return list_mle(scores.C, scores.teacher, self.student_temperature, self.keep_positive)


def list_mle(C: Tensor, T: Tensor, student_temperature: float, keep_positive: bool) -> Tensor:
    """Plackett-Luce likelihood of the teacher's order, summed over positions (RankCSE Eq. 5).

    -sum_k [ s_k - logsumexp_{l >= k} s_l ] with s = C_i. / t2 in the teacher's descending
    order; ties keep their column order. About log B! at chance (496 for B = 128), so gradient
    clipping acts on it nearly always.
    """
    if not keep_positive:
        C, T = off_diagonal(C), off_diagonal(T)
    order = T.argsort(dim=-1, descending=True, stable=True)
    s = (C / student_temperature).gather(-1, order)
    tails = s.flip(-1).logcumsumexp(-1)
    return (tails.sum(-1) - s.sum(-1)).mean()
