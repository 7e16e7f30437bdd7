"""Few-shot classification, as MTEB does it: logistic regression on eight examples of each label."""

from typing import ClassVar

import numpy as np
from pydantic import Field

from stages.contract import Figure, Work
from stages.errors import UserError
from stages.evaluate.base import Encode, Result, Tested
from stages.evaluate.resampling import Items
from stages.evaluate.tables import Labelled, LabelledTest
from stages.evaluate.transfer import features

SEED = 42  # MTEB's


class ClassificationTest(LabelledTest):
    """Mean accuracy of logistic regressions on a few training examples."""

    what: ClassVar[str] = "classification set"
    packages = ("scikit-learn",)
    reads_returned = True

    samples_per_label: int = Field(8, ge=1, description="Training examples of each label.")
    num_experiments: int = Field(10, ge=1, description="Draws of training examples.")

    @property
    def title(self) -> str:
        return f"classification-{self.name}"

    def load(self) -> dict[str, Labelled]:
        """Raises UserError: there is no split train, or a tested label is not in it."""
        found = self.read(("train",), num_texts=1)
        if "train" not in found:
            raise UserError(
                f"{self.where}: there are no rows with split 'train' to learn from; add them, "
                "with a column 'split'"
            )
        train, test = found["train"], found["test"]
        missing = np.setdiff1d(test.labels, train.labels)
        if len(missing):
            raise UserError(
                f"{self.where}: the label '{train.names[int(missing[0])]}' is tested and is not in "
                f"the split train ({len(missing)} labels in all); add examples or leave it out"
            )
        if len(np.unique(train.labels)) < 2:
            raise UserError(f"{self.where}: the split train has a single label")
        return found

    def score(self, tested: Tested, work: Work) -> Result:
        splits = self.load()
        work.say(f"{self.name}: {len(splits['test'].texts):,} examples")
        return score_classification(
            self.name, splits, tested.as_returned, self.samples_per_label, self.num_experiments
        )


def score_classification(
    name: str, splits: dict[str, Labelled], encode: Encode, samples: int, num_experiments: int
) -> Result:
    """Accuracy x 100, mean over the experiments; the interval is their range. Items are the tested
    texts in each experiment."""
    from sklearn.linear_model import LogisticRegression

    train, test = splits["train"], splits["test"]
    draws = sampled(train.labels, samples, num_experiments)
    used = np.unique(np.concatenate(draws))
    vectors = features({"train": train.of(used), "test": test}, encode)
    right_EN = np.empty((len(draws), len(test.labels)))
    for number, draw in enumerate(draws):
        rows = np.searchsorted(used, draw)
        model = LogisticRegression(max_iter=100).fit(vectors["train"][rows], train.labels[draw])
        right_EN[number] = model.predict(vectors["test"]) == test.labels
    accuracies = 100 * right_EN.mean(1)
    figure = Figure(
        name, float(accuracies.mean()), interval=(float(accuracies.min()), float(accuracies.max())),
        percent=True, averaged="classification",
    )  # fmt: skip
    items = {name: Items("mean of repetitions", right_EN.T)}
    note = (
        f"Classification: accuracy x 100 of logistic regressions on {samples} examples a label; "
        f"mean and range of {num_experiments} draws."
    )
    return Result([figure], (note,), {"num_tested": len(test.labels)}, items)


def sampled(labels_N: np.ndarray, samples: int, num_experiments: int) -> list[np.ndarray]:
    """Rows of each experiment, as MTEB draws them: it shuffles what the one before has shuffled,
    with the same seed, and takes the first of each label."""
    order = list(range(len(labels_N)))
    draws = []
    for _ in range(num_experiments):
        np.random.RandomState(SEED).shuffle(order)
        taken = np.zeros(labels_N.max() + 1, np.int64)
        rows = []
        for row in order:
            if taken[labels_N[row]] < samples:
                taken[labels_N[row]] += 1
                rows.append(row)
        draws.append(np.array(rows))
    return draws
