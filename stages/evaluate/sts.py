"""Semantic textual similarity: Spearman of similarity and gold score.

Protocol "all" of the SimCSE line: predictions and gold of all subsets are concatenated
and correlated once; per-subset figures are reported beside it. No regressor, no fitted threshold.
"""

import numpy as np

from stages.contract import Figure, Work
from stages.evaluate.base import Evaluation, Result, Tested
from stages.evaluate.resampling import Items, interval
from stages.evaluate.sets import StsSet, StsSettings, load_sts
from stages.evaluate.tables import embed_once


class StsTest(Evaluation):
    """Spearman of similarity and gold score on one set."""

    two_sided = True
    packages = ("scipy",)

    sts: StsSettings
    num_bootstrap: int

    @property
    def title(self) -> str:
        return self.sts.name

    def check(self) -> None:
        self.sts.check()

    def score(self, tested: Tested, work: Work) -> Result:
        pairs = load_sts(self.sts)
        work.say(f"{pairs.name}: {len(pairs.gold):,} pairs")
        return score_sts(pairs, tested, self.num_bootstrap)


def pair_similarities(pairs: StsSet, tested: Tested) -> np.ndarray:
    """Similarity of every pair, float32; each distinct sentence is encoded once."""
    if tested.encode_documents is None:
        both = embed_once(pairs.sentence1 + pairs.sentence2, tested.encode)
        left, right = both[: len(pairs.sentence1)], both[len(pairs.sentence1) :]
    else:
        left = embed_once(pairs.sentence1, tested.encode)
        right = embed_once(pairs.sentence2, tested.encode_documents)
    return np.einsum("ij,ij->i", left, right)


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's rho with average ranks for ties; nan when either side is constant."""
    from scipy.stats import rankdata  # not at import: `plan` reads these settings

    ranks_a, ranks_b = rankdata(a), rankdata(b)
    ranks_a -= ranks_a.mean()
    ranks_b -= ranks_b.mean()
    scale = np.sqrt((ranks_a @ ranks_a) * (ranks_b @ ranks_b))
    return float(ranks_a @ ranks_b / scale) if scale else float("nan")


def score_sts(pairs: StsSet, tested: Tested, num_bootstrap: int) -> Result:
    """Spearman x 100 over all pairs and per subset, and its 95% bootstrap interval."""
    similarities = pair_similarities(pairs, tested)
    subsets = np.asarray(pairs.subset)
    items = Items("spearman", np.stack([similarities, pairs.gold], 1))
    limits = None
    if num_bootstrap:
        limits = interval(100 * items.resampled(num_bootstrap))
    names = sorted(set(pairs.subset))
    parts = {}
    if len(names) > 1:
        parts = {
            name: 100 * spearman(similarities[subsets == name], pairs.gold[subsets == name])
            for name in names
        }
    value = 100 * spearman(similarities, pairs.gold)
    figure = Figure(pairs.name, value, interval=limits, percent=True, averaged="mean", parts=parts)
    return Result(
        [figure],
        ("STS: Spearman x 100.",),
        {"num_pairs": len(similarities)},
        {pairs.name: items},
    )
