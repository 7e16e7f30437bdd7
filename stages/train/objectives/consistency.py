"""Consistency of the two views' rankings (RankCSE Eq. 3)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import Field

from stages.train.objectives.base import Objective, Scores

if TYPE_CHECKING:
    from torch import Tensor


class Consistency(Objective):
    """RankCSE: the two views rank the batch alike."""

    weight: float = Field(1.0, ge=0, description="beta: weight of this loss.")
    temperature: float = Field(0.05, gt=0, description="tau1, of this loss alone.")

    def value(self, scores: Scores) -> Tensor:
        return consistency(scores.C, self.temperature)


def consistency(C: Tensor, temperature: float) -> Tensor:
    """Jensen-Shannon divergence of softmax(C_i. / t) and softmax(C_.i / t) (RankCSE Eq. 3).

    The diagonal is included, both sides carry gradient, and the value lies in [0, ln 2].
    The mixture is formed in log space; clamping *probabilities* there is what keeps it a
    divergence. In float64: it is of second order in the difference of two nearly equal lists, of
    which float32 would keep no digit when the views agree.
    """
    logits = C.double() / temperature
    log_p, log_q = logits.log_softmax(-1), logits.T.log_softmax(-1)
    log_m = log_p.logaddexp(log_q) - math.log(2)
    divergence = log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)
    return 0.5 * divergence.sum(-1).mean().to(C.dtype)
