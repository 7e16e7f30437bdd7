"""ListNet: listwise distillation by top-one probabilities (RankCSE Eq. 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from stages.train.objectives.base import Objective, Scores
from stages.train.objectives.scores import off_diagonal

if TYPE_CHECKING:
    from torch import Tensor


class ListNet(Objective):
    """RankCSE: the student's distribution over the batch follows the teacher's."""

    needs_teacher: ClassVar[bool] = True

    weight: float = Field(1.0, ge=0, description="gamma: weight of this loss.")
    student_temperature: float = Field(
        0.025, gt=0, description="tau2: temperature of the student's cosines."
    )
    teacher_temperature: float = Field(
        0.0125, gt=0, description="tau3: temperature of the teacher's similarities."
    )

    def value(self, scores: Scores) -> Tensor:
        return list_net(
            scores.C, scores.teacher, self.student_temperature, self.teacher_temperature
        )


def list_net(
    C: Tensor, T: Tensor, student_temperature: float, teacher_temperature: float
) -> Tensor:
    """-sum_j softmax(T_i. / t3)_j log softmax(C_i. / t2)_j without j = i (RankCSE Eq. 4).

    The positive is removed from both lists before normalising (the paper's footnote 1): the
    teacher would put nearly all its mass on it.
    """
    target = (off_diagonal(T) / teacher_temperature).softmax(-1)
    log_p = (off_diagonal(C) / student_temperature).log_softmax(-1)
    return -(target * log_p).sum(-1).mean()
