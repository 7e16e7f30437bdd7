"""Clustering: do sentences of one label lie together? V-measure of k-means."""

from typing import ClassVar

import numpy as np
from pydantic import Field

from stages.contract import Figure, Work
from stages.evaluate.base import Encode, Result, Tested
from stages.evaluate.tables import Labelled, LabelledTest
from stages.evaluate.transfer import features

BATCH_ROWS = 500


class ClusteringTest(LabelledTest):
    """V-measure of mini-batch k-means with as many clusters as there are labels."""

    what: ClassVar[str] = "clustering set"

    num_seeds: int = Field(5, ge=1, description="Runs of k-means, whose mean and range is shown.")

    @property
    def title(self) -> str:
        return f"clustering-{self.name}"

    def load(self) -> Labelled:
        return self.read(num_texts=1)["test"]

    def score(self, tested: Tested, work: Work) -> Result:
        examples = self.load()
        work.say(f"{self.name}: {len(examples.texts):,} examples")
        return score_clustering(self.name, examples, tested.encode, self.num_seeds)


def score_clustering(name: str, examples: Labelled, encode: Encode, num_seeds: int) -> Result:
    """V-measure x 100, mean over seeds 0, 1, ...; the interval is their range."""
    from sklearn.cluster import MiniBatchKMeans
    from sklearn.metrics import v_measure_score

    vectors = features(["test"], {"test": examples}, encode)["test"]
    found = []
    for seed in range(num_seeds):
        model = MiniBatchKMeans(
            len(np.unique(examples.labels)), batch_size=BATCH_ROWS, n_init="auto", random_state=seed
        )
        found.append(100 * float(v_measure_score(examples.labels, model.fit_predict(vectors))))
    figure = Figure(
        f"V {name}", float(np.mean(found)), interval=(min(found), max(found)), percent=True,
        averaged="clustering",
    )  # fmt: skip
    note = f"Clustering: V-measure x 100 of k-means; mean and range of {num_seeds} seeds."
    return Result([figure], (note,), (("num_tested", len(examples.texts)),))
