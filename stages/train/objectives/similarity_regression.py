"""Regression on teachers' similarities: their values, or their order alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from stages.train.objectives.base import Objective, Scores
from stages.train.objectives.scores import off_diagonal

if TYPE_CHECKING:
    from torch import Tensor


class SimilarityRegression(Objective):
    """The student's cosines approach the teachers' similarities, or take their order.

    Needs no vectors of the teachers: for ranks, and for teachers of several widths.
    """

    needs_teacher: ClassVar[bool] = True

    weight: float = Field(1.0, ge=0, description="Weight of this loss.")
    distance: Literal["squared", "order"] = Field(
        "squared",
        description="squared: mean of (C_ij - T_ij)^2 over pairs of two sentences. order: CoSENT, "
        "what is nearer to a sentence under the teacher shall be nearer under the student.",
    )
    temperature: float = Field(0.05, gt=0, description="Of the student's cosines, for `order`.")

    def value(self, scores: Scores) -> Tensor:
        if self.distance == "order":
            return similarity_order(scores.C, scores.teacher, self.temperature)
        return (off_diagonal(scores.C - scores.teacher) ** 2).mean()


def similarity_order(C: Tensor, T: Tensor, temperature: float) -> Tensor:
    """mean_i log(1 + sum_{j, l: T_ij > T_il} exp((C_il - C_ij) / t)), j and l not i (CoSENT).

    Sorted by the teacher, a row's sum over pairs is one over l of exp(C_il / t) times a running
    sum of exp(-C_ij / t): B^2 log B for the batch, where pairs would take B^3. Equal similarities
    have no order.
    """
    s, T = off_diagonal(C) / temperature, off_diagonal(T)
    descending, order = T.sort(dim=-1, descending=True)
    s, place = s.gather(-1, order), order.new_ones(order.shape).cumsum(-1) - 1
    farther = descending.diff(prepend=descending[:, :1]) < 0
    nearer = (place * farther).cummax(-1).values  # how many are strictly nearer under the teacher
    running = (-s).logcumsumexp(-1).gather(-1, (nearer - 1).clamp_min(0))
    terms = (s + running).masked_fill(nearer == 0, -math.inf)
    terms[:, 0] = 0  # the nearest has none above it: the 1 of the logarithm takes its place
    return terms.logsumexp(-1).mean()
