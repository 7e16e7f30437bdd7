"""Clustering: do sentences of one label lie together? V-measure of k-means; where they lie."""

import json
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from stages.contract import Figure, Work
from stages.errors import UserError
from stages.evaluate.base import Encode, Result, Tested
from stages.evaluate.resampling import Items, pseudo_values
from stages.evaluate.tables import Labelled, LabelledTest
from stages.evaluate.transfer import features

BATCH_ROWS = 500
PLANE, MOST_POINTS, MOST_LABELS = "plane.json", 1000, 10


class ClusteringTest(LabelledTest):
    """V-measure of mini-batch k-means with as many clusters as there are labels."""

    what: ClassVar[str] = "clustering set"
    packages = ("scikit-learn", "scipy")
    reads_returned = True

    num_seeds: int = Field(5, ge=1, description="Runs of k-means, whose mean and range is shown.")

    @property
    def title(self) -> str:
        return f"clustering-{self.name}"

    def load(self) -> Labelled:
        """Raises UserError: as `read`; or no label is there twice."""
        found = self.read(num_texts=1)["test"]
        if len(np.unique(found.labels)) == len(found.labels):
            raise UserError(
                f"{self.where}: no two texts share a label, so none belong together; is 'label' "
                "a column of row numbers?"
            )
        return found

    def score(self, tested: Tested, work: Work) -> Result:
        examples = self.load()
        work.say(f"{self.name}: {len(examples.texts):,} examples")
        return score_clustering(self.name, examples, tested.as_returned, self.num_seeds)


def score_clustering(name: str, examples: Labelled, encode: Encode, num_seeds: int) -> Result:
    """V-measure x 100, mean over seeds 0, 1, ...; the interval is their range."""
    from sklearn.cluster import MiniBatchKMeans

    vectors = features({"test": examples}, encode)["test"]
    names, labels = np.unique(examples.labels, return_inverse=True)
    clusterings = []
    for seed in range(num_seeds):
        model = MiniBatchKMeans(len(names), batch_size=BATCH_ROWS, n_init="auto", random_state=seed)
        clusterings.append(model.fit_predict(vectors))
    by_text_NS = np.stack([v_measure_by_text(labels, one) for one in clusterings], axis=1)
    found = (100 * by_text_NS.mean(0)).tolist()
    figure = Figure(
        f"V {name}", float(np.mean(found)), interval=(min(found), max(found)), percent=True,
        averaged="clustering",
    )  # fmt: skip
    note = f"Clustering: V-measure x 100 of k-means; mean and range of {num_seeds} seeds."
    items = Items("mean of repetitions", by_text_NS)
    facts = {"num_tested": len(examples.texts)}
    files = {PLANE: json.dumps(in_plane(vectors, examples)).encode()}
    return Result([figure], (note,), facts, {figure.name: items}, files)


def in_plane(vectors_ND: np.ndarray, examples: Labelled) -> dict[str, Any]:
    """Up to 1,000 texts of the ten most frequent labels on their two principal components.

    Memory: 8 bytes a number of these texts' vectors, and some tens of MB.

    Returns:
        `names` of these labels; `points` as [x, y, place of its label], the largest x or y 1;
        `share` of the variance, in percent, that the plane has; `num_labels` of all.
    """
    numbers, counts = np.unique(examples.labels, return_counts=True)
    shown = np.sort(numbers[np.argsort(-counts, kind="stable")[:MOST_LABELS]])
    rows = np.flatnonzero(np.isin(examples.labels, shown))
    rows = np.sort(np.random.default_rng(0).permutation(rows)[:MOST_POINTS])
    vectors_nD = vectors_ND[rows].astype(np.float64)
    vectors_nD -= vectors_nD.mean(0)
    # of products of texts: rank vectors are wider than there are texts
    variances, places = np.linalg.eigh(vectors_nD @ vectors_nD.T)
    places_n2 = places[:, :-3:-1] * np.sqrt(np.maximum(variances[:-3:-1], 0))
    # either sign is right: the same vectors give the same picture
    places_n2 *= np.sign(places_n2[np.abs(places_n2).argmax(0), [0, 1]])
    places_n2 /= np.abs(places_n2).max() or 1.0
    labels = np.searchsorted(shown, examples.labels[rows])
    return {
        "names": [examples.names[number] for number in shown],
        "points": [[*xy, label] for xy, label in
                   zip(places_n2.round(4).tolist(), labels.tolist(), strict=True)],
        "share": 100 * float(variances[-2:].sum() / max(variances.sum(), 1e-12)),
        "num_labels": len(numbers),
    }  # fmt: skip


def v_measure_by_text(labels_N: np.ndarray, clusters_N: np.ndarray) -> np.ndarray:
    """`pseudo_values` (N,) of the V-measure; texts stay in their clusters when one is left out."""
    both_N2 = np.stack([labels_N, clusters_N], 1)
    entropies = [_entropies(values) for values in (labels_N, clusters_N, both_N2)]
    with np.errstate(invalid="ignore"):
        # 2 I(labels; clusters) / (H(labels) + H(clusters)); 1 where nothing is to be told apart
        whole, without_N = (
            np.where(a + b > 0, 2 - 2 * both / (a + b), 1.0)
            for a, b, both in zip(*entropies, strict=True)
        )
    return pseudo_values(float(whole), whole - without_N)


def _entropies(values: np.ndarray) -> tuple[float, np.ndarray]:
    """Of values (N,) or rows (N, n), in nats: of all, and (N,) of all without each."""
    from scipy.special import xlogy

    _, group_N, counts = np.unique(values, axis=0, return_inverse=True, return_counts=True)
    size, own_N, terms = len(values), counts[group_N.reshape(-1)], xlogy(counts, counts)
    without_N = terms.sum() - xlogy(own_N, own_N) + xlogy(own_N - 1, own_N - 1)
    return np.log(size) - terms.sum() / size, np.log(size - 1) - without_N / (size - 1)
