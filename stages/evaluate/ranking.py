"""KCC and NDCG (RankCSE, App. G): how well an encoder ranks the partners of one sentence.

A group is a sentence, on either side of its pairs, with its partners and their gold scores; a
partner that is there twice has the mean of its scores. Groups of fewer than four partners, or whose
scores are all alike, are left out. The paper does not say which variant it has: here all subsets
together, equal text, Kendall's tau-b, NDCG over the whole list with the gold scores as gains.
"""

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from stages.contract import Work
from stages.errors import UserError
from stages.evaluate.base import Evaluation, Result, Tested
from stages.evaluate.relevance import mean_figures, mean_items
from stages.evaluate.sets import StsSet, StsSettings, load_sts
from stages.evaluate.tables import finite_vectors

# Partners of a sentence with their gold scores: (sentence, partners, scores (k,)).
Group = tuple[str, list[str], np.ndarray]


class RankingTest(StsSettings, Evaluation):
    """Kendall's tau and NDCG of each sentence's partners, on an STS set."""

    what: ClassVar[str] = "ranking task"
    two_sided = True
    packages = ("scikit-learn", "scipy")

    min_partners: int = Field(4, ge=2, description="Partners that a sentence has at least.")
    gain: Literal["linear", "exponential"] = Field(
        "linear", description="Gain of a partner in NDCG: its gold score, or 2 ** score - 1."
    )

    @property
    def title(self) -> str:
        return f"ranking-{self.name}"

    def load(self) -> list[Group]:
        """Raises UserError: no sentence has as many partners with different scores."""
        found = partner_groups(load_sts(self), self.min_partners)
        lowest = min((float(gold.min()) for _, _, gold in found), default=0.0)
        if lowest < 0:
            raise UserError(
                f"{self.where}: there is a gold score of {lowest:g}; scores are gains in NDCG, "
                "which cannot be negative, so shift them"
            )
        if not found:
            raise UserError(
                f"{self.where}: no sentence has {self.min_partners} partners with different gold "
                "scores, so there is nothing to rank; lower min_partners or leave the set out"
            )
        return found

    def score(self, tested: Tested, work: Work) -> Result:
        groups = self.load()
        work.say(f"{self.name}: {len(groups):,} sentences with partners")
        return score_ranking(self.name, groups, tested, self.gain)


def partner_groups(pairs: StsSet, min_partners: int) -> list[Group]:
    """Groups in the order in which their sentences first occur."""
    scores: dict[str, dict[str, list[float]]] = {}
    for left, right, gold in zip(pairs.sentence1, pairs.sentence2, pairs.gold, strict=True):
        for one, other in [(left, right), (right, left)][: 1 + (left != right)]:
            scores.setdefault(one, {}).setdefault(other, []).append(gold)
    groups = []
    for one, partners in scores.items():
        means = np.array([float(np.mean(several)) for several in partners.values()])
        if len(means) >= min_partners and np.ptp(means) > 0:
            groups.append((one, list(partners), means))
    return groups


def score_ranking(name: str, groups: list[Group], tested: Tested, gain: str) -> Result:
    """KCC and NDCG x 100, means over groups, with 95% intervals of a mean over groups."""
    from scipy.stats import kendalltau
    from sklearn.metrics import ndcg_score

    centres = finite_vectors([one for one, _, _ in groups], tested.encode)
    partners = [other for _, others, _ in groups for other in others]
    vectors = finite_vectors(partners, tested.encode_documents or tested.encode)
    taus, gains, start = [], [], 0
    for centre, (_, others, gold) in zip(centres, groups, strict=True):
        cosines = vectors[start : start + len(others)] @ centre
        start += len(others)
        # all cosines alike say nothing about the order
        taus.append(float(np.nan_to_num(kendalltau(cosines, gold).statistic)))
        gains.append(ndcg_score([gold if gain == "linear" else 2**gold - 1], [cosines]))
    values = {"KCC": taus, "NDCG": gains}
    figures = mean_figures(name, values, averaged=True)
    note = (
        "KCC, NDCG: Kendall's tau-b and NDCG x 100 of the partners of one sentence, mean over "
        f"sentences ({gain} gain)."
    )
    return Result(figures, (note,), {"num_groups": len(groups)}, mean_items(name, values))
