"""The objectives: pure functions of score matrices.

Shapes: B sentences of the *global* batch. C (B, B) holds the student's cosines
C_ij = cos(u_i, v_j) of view 1 against view 2; T (B, B) the teacher's, constant.
Every loss is a mean over rows i, in the dtype of C (float32 even under autocast).
RankCSE: Liu et al., ACL 2023 (https://aclanthology.org/2023.acl-long.771).
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.train.settings import CONTRASTIVE, Objectives


def unit(x: Tensor) -> Tensor:
    """Rows scaled to length 1 (norm floored at 1e-8)."""
    return F.normalize(x, dim=-1, eps=1e-8)


def cosines(u: Tensor, v: Tensor) -> Tensor:
    """C_ij = cos(u_i, v_j) as (B, B): normalise and multiply, not an O(B^2 D) broadcast."""
    return unit(u) @ unit(v).T


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


def info_nce(C: Tensor, temperature: float, hard_BB: Tensor | None = None) -> Tensor:
    """-log softmax_j(C_ij / t)_i, positive in the denominator, u to v only (SimCSE Eq. 1).

    Computed as log(1 + sum_{j != i} exp((C_ij - C_ii) / t)): as a difference of two logits of 20 a
    nearly solved batch keeps three digits in float32 (2.9e-7 came out as 3.5e-7).

    Args:
        hard_BB: cosines of view 1 with every sentence's hard negative, as further candidates.
    """
    others = off_diagonal(C)
    if hard_BB is not None:
        others = torch.cat([others, hard_BB], dim=1)
    excess_B = torch.logsumexp((others - C.diagonal()[:, None]) / temperature, dim=1)
    return torch.logaddexp(excess_B, torch.zeros_like(excess_B)).mean()


def consistency(C: Tensor, temperature: float) -> Tensor:
    """Jensen-Shannon divergence of softmax(C_i. / t) and softmax(C_.i / t) (RankCSE Eq. 3).

    The diagonal is included, both sides carry gradient, and the value lies in [0, ln 2].
    The mixture is formed in log space; clamping *probabilities* there is what keeps it a
    divergence. In float64: it is of second order in the difference of two nearly equal lists, of
    which float32 would keep no digit when the views agree.
    """
    logits = C.double() / temperature
    log_p, log_q = F.log_softmax(logits, dim=-1), F.log_softmax(logits.T, dim=-1)
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    divergence = log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)
    return 0.5 * divergence.sum(-1).mean().to(C.dtype)


def off_diagonal(scores: Tensor) -> Tensor:
    """(B, B) without its diagonal, as (B, B-1), order kept."""
    size = len(scores)
    return scores.flatten()[1:].view(size - 1, size + 1)[:, :-1].reshape(size, size - 1)


def list_net(
    C: Tensor, T: Tensor, student_temperature: float, teacher_temperature: float
) -> Tensor:
    """-sum_j softmax(T_i. / t3)_j log softmax(C_i. / t2)_j without j = i (RankCSE Eq. 4).

    The positive is removed from both lists before normalising (the paper's footnote 1): the
    teacher would put nearly all its mass on it.
    """
    target = F.softmax(off_diagonal(T) / teacher_temperature, dim=-1)
    log_p = F.log_softmax(off_diagonal(C) / student_temperature, dim=-1)
    return -(target * log_p).sum(-1).mean()


def list_mle(C: Tensor, T: Tensor, student_temperature: float, keep_positive: bool) -> Tensor:
    """Plackett-Luce likelihood of the teacher's order, summed over positions (RankCSE Eq. 5).

    -sum_k [ s_k - logsumexp_{l >= k} s_l ] with s = C_i. / t2 in the teacher's descending
    order; ties keep their column order. About log B! at chance (496 for B = 128), so gradient
    clipping acts on it nearly always.
    """
    if not keep_positive:
        C, T = off_diagonal(C), off_diagonal(T)
    order = torch.argsort(T, dim=-1, descending=True, stable=True)
    s = (C / student_temperature).gather(-1, order)
    tails = torch.logcumsumexp(s.flip(-1), dim=-1)
    return (tails.sum(-1) - s.sum(-1)).mean()


def rank_regression(C: Tensor, T: Tensor, low: float, high: float) -> Tensor:
    """sum_ij w_ij (T_ij - C_ij)^2 / sum_ij w_ij with w_ij = [low <= T_ij <= high].

    RankEncoder Eq. 3 and 4 (Seonwoo et al., Findings of ACL 2023). T is constant; where no pair
    passes, the value and its gradient are 0.
    """
    kept = (low <= T) & (high >= T)
    return torch.where(kept, (T - C) ** 2, 0).sum() / (kept.sum().to(C.dtype) + 1e-8)


def soft_negative_margin(C: Tensor, soft_B: Tensor, low: float, high: float) -> Tensor:
    """mean_i [relu(d_i + alpha) + relu(-d_i - beta)], d_i = cos(u_i, n_i) - C_ii (SNCSE Eq. 3).

    Zero where the negation is between alpha and beta less similar than the other view.
    """
    difference_B = soft_B - C.diagonal()
    return (F.relu(difference_B + low) + F.relu(-difference_B - high)).mean()


def token_cross_entropy(logits_TV: Tensor, ids_T: Tensor) -> tuple[Tensor, Tensor]:
    """-log softmax(logits)_id summed over tokens, at least in float32, and their number.

    What denoising (DenoSent), the masked-language term and replaced-token detection are made of;
    the caller leaves out padding.
    """
    dtype = torch.promote_types(logits_TV.dtype, torch.float32)
    total = F.cross_entropy(logits_TV.to(dtype), ids_T, reduction="sum")
    return total, torch.tensor(len(ids_T), device=ids_T.device)


def row_cosines(a_BD: Tensor, b_BD: Tensor) -> Tensor:
    """cos(a_i, b_i) as (B,)."""
    return (unit(a_BD) * unit(b_BD)).sum(-1)


@dataclass(frozen=True)
class Scores:
    """What the objectives see of a global batch.

    C: student cosines (B, B). T: teacher scores (B, B), None only when no objective needs them.
    soft_B: cosines of view 1 with each sentence's negation (B,), None without soft negatives.
    hard_BB: cosines of view 1 with all hard negatives (B, B), None without these.
    """

    C: Tensor
    T: Tensor | None
    soft_B: Tensor | None = None
    hard_BB: Tensor | None = None


def total_loss(
    scores: Scores, settings: Objectives, auxiliary: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The recipe's objectives combined, and each unweighted (detached) part.

    All are summed with their weights, except that the rank regression may take the maximum with
    the contrastive part, InfoNCE and soft negatives (RankEncoder Eq. 5); what is auxiliary is
    added after it, as in the released code.

    Args:
        auxiliary: values of the objectives that have modules of their own, by name.
    """
    C, T = scores.C, scores.T
    values = dict(auxiliary)
    if one := settings.infonce:
        values["infonce"] = info_nce(C, one.temperature, scores.hard_BB)
    if two := settings.consistency:
        values["consistency"] = consistency(C, two.temperature)
    if net := settings.listnet:
        assert T is not None
        values["listnet"] = list_net(C, T, net.student_temperature, net.teacher_temperature)
    if mle := settings.listmle:
        assert T is not None
        values["listmle"] = list_mle(C, T, mle.student_temperature, mle.keep_positive)
    if soft := settings.soft_negative:
        assert scores.soft_B is not None
        values["soft_negative"] = soft_negative_margin(C, scores.soft_B, soft.low, soft.high)
    if regression := settings.rank_regression:
        assert T is not None
        values["rank_regression"] = rank_regression(C, T, regression.low, regression.high)
    weighted = {name: getattr(settings, name).weight * value for name, value in values.items()}
    if regression and regression.combine == "maximum":
        contrastive = _sum([weighted.pop(name) for name in CONTRASTIVE if name in weighted])
        other = weighted.pop("rank_regression")
        # gradient flows through the larger one only
        weighted["maximum"] = torch.where(other > contrastive, other, contrastive)
    total = _sum(list(weighted.values()))
    return total, {name: value.detach() for name, value in values.items()}


def _sum(values: list[Tensor]) -> Tensor:
    return torch.stack(values).sum()
