"""Score matrices: cosines of the student, similarities of the teachers. Imports no torch.

Shapes: B sentences of the *global* batch. C (B, B) holds the student's cosines
C_ij = cos(u_i, v_j) of view 1 against view 2; T (B, B) the teacher's, constant.
RankCSE: Liu et al., ACL 2023 (https://aclanthology.org/2023.acl-long.771).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def unit(x: Tensor) -> Tensor:
    """Rows scaled to length 1 (norm floored at 1e-8)."""
    return x / x.norm(dim=-1, keepdim=True).clamp_min(1e-8)


def cosines(u: Tensor, v: Tensor) -> Tensor:
    """C_ij = cos(u_i, v_j) as (B, B): normalise and multiply, not an O(B^2 D) broadcast."""
    return unit(u) @ unit(v).T


def row_cosines(a_BD: Tensor, b_BD: Tensor) -> Tensor:
    """cos(a_i, b_i) as (B,)."""
    return (unit(a_BD) * unit(b_BD)).sum(-1)


def off_diagonal(scores: Tensor) -> Tensor:
    """(B, B) without its diagonal, as (B, B-1), order kept."""
    size = len(scores)
    return scores.flatten()[1:].view(size - 1, size + 1)[:, :-1].reshape(size, size - 1)


def mix_teachers(factors: list[Tensor], weights: list[float]) -> Tensor:
    """Teacher scores T = sum_t w_t F_t F_t^T (B, B), weights scaled to sum to 1 (RankCSE Eq. 6).

    Similarities are mixed, not embeddings, so teachers may differ in dimension. A sentence's
    similarity to itself is set to 1: fp16 leaves it 1e-4 away, compressed ranks some percent.
    """
    total = math.fsum(weights)
    mixed = factors[0] @ factors[0].T * (weights[0] / total)
    for factor, weight in zip(factors[1:], weights[1:], strict=True):
        mixed = mixed + factor @ factor.T * (weight / total)
    return mixed.fill_diagonal_(1)
