"""InfoNCE: SimCSE's contrastive loss (Gao et al., EMNLP 2021)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from stages.train.objectives.base import Objective, Scores
from stages.train.objectives.scores import off_diagonal

if TYPE_CHECKING:
    from torch import Tensor


class InfoNce(Objective):
    """SimCSE: each sentence finds its other view among the batch."""

    contrastive: ClassVar[bool] = True

    weight: float = Field(1.0, ge=0, description="Weight of this loss.")
    temperature: float = Field(0.05, gt=0, description="tau1: temperature of the cosines.")
    hard_negatives: bool = Field(
        False, description="Add the rewrites' hard negatives as candidates, each for all sentences."
    )

    @property
    def needs_negatives(self) -> bool:
        return self.hard_negatives

    def value(self, scores: Scores) -> Tensor:
        hard_BB = scores.across["negative"] if self.hard_negatives else None
        return info_nce(scores.C, self.temperature, hard_BB)


def info_nce(C: Tensor, temperature: float, hard_BB: Tensor | None = None) -> Tensor:
    """-log softmax_j(C_ij / t)_i, positive in the denominator, u to v only (SimCSE Eq. 1).

    Computed as log(1 + sum_{j != i} exp((C_ij - C_ii) / t)): as a difference of two logits of 20 a
    nearly solved batch keeps three digits in float32 (2.9e-7 came out as 3.5e-7).

    Args:
        hard_BB: cosines of view 1 with every sentence's hard negative, as further candidates.
    """
    import torch

    others = off_diagonal(C)
    if hard_BB is not None:
        others = torch.cat([others, hard_BB], dim=1)
    excess_B = torch.logsumexp((others - C.diagonal()[:, None]) / temperature, dim=1)
    return torch.logaddexp(excess_B, torch.zeros_like(excess_B)).mean()
