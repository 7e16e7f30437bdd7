"""Pairs that mean the same or do not: average precision of their similarity."""

from typing import ClassVar

import numpy as np

from stages.contract import Figure, Work
from stages.errors import UserError
from stages.evaluate.base import Result, Tested
from stages.evaluate.resampling import Items, interval
from stages.evaluate.tables import Labelled, LabelledTest, finite_vectors


class PairsTest(LabelledTest):
    """Average precision. Columns `sentence1`, `sentence2` and `label` (0 or 1)."""

    what: ClassVar[str] = "set of pairs"
    two_sided = True

    @property
    def title(self) -> str:
        return f"pairs-{self.name}"

    def load(self) -> Labelled:
        """Raises UserError: single sentences, or labels other than 0 and 1."""
        found = self.read(num_texts=2)["test"]
        if found.names != ["0", "1"]:
            raise UserError(
                f"{self.where}: the labels are {', '.join(found.names[:5])}; pairs have 0 and 1"
            )
        return found

    def score(self, tested: Tested, work: Work) -> Result:
        pairs = self.load()
        work.say(f"{self.name}: {len(pairs.texts):,} pairs")
        return score_pairs(self.name, pairs, tested)


def score_pairs(name: str, pairs: Labelled, tested: Tested) -> Result:
    """Average precision x 100 (scikit-learn's, no interpolation) with its bootstrap interval."""
    left = finite_vectors([a for a, _ in pairs.texts], tested.encode)
    right = finite_vectors([b for _, b in pairs.texts], tested.encode_documents or tested.encode)
    similarities = np.einsum("ij,ij->i", left, right)
    items = Items("average precision", np.stack([similarities, pairs.labels], 1))
    limits = interval(100 * items.resampled())
    figure = Figure(
        f"AP {name}", 100 * items.figure(), interval=limits, percent=True, averaged="pairs"
    )
    note = "Pairs: average precision x 100 of their similarity."
    return Result([figure], (note,), {"num_pairs": len(similarities)}, {figure.name: items})
