"""Sentences to look at: nearest neighbours, and pairs on which student and teachers disagree.

Shapes: N held-out sentences; similarities (N, N), symmetric, whose diagonal does not count.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

# So many sentences are shown with so many neighbours each, and so many pairs of either kind.
SENTENCES, NEAREST, PAIRS = 5, 3, 4
# Characters of a text that are kept
LONGEST = 200


def neighbours(
    texts: Sequence[str], student_NN: np.ndarray, teacher_NN: np.ndarray
) -> list[dict[str, Any]]:
    """The first SENTENCES, each with the NEAREST others under the teachers and the student."""
    found = []
    for row in range(min(SENTENCES, len(texts))):
        sides = {}
        for name, matrix in (("teachers", teacher_NN), ("student", student_NN)):
            nearest = np.argsort(-matrix[row], kind="stable")
            sides[name] = [_short(texts[one]) for one in nearest[nearest != row][:NEAREST]]
        found.append({"text": _short(texts[row]), **sides})
    return found


def disagreements(
    texts: Sequence[str], student_NN: np.ndarray, teacher_NN: np.ndarray, near: float
) -> list[dict[str, Any]]:
    """Pairs that one side has among its nearest and the other puts farthest away: PAIRS that the
    teachers have near, then PAIRS that the student has. A sentence is in one pair of a kind.

    Args:
        near: the share of all pairs that is near.

    Returns:
        two `texts`, and how many % of all pairs either side has nearer.
    """
    from scipy.stats import rankdata

    pairs = np.triu_indices(len(texts), 1)
    sides = {"teachers": teacher_NN[pairs], "student": student_NN[pairs]}
    nearer = {
        name: (rankdata(-values, method="min") - 1) / len(values) for name, values in sides.items()
    }
    found = []
    for one, other in (("teachers", "student"), ("student", "teachers")):
        candidates = np.flatnonzero(nearer[one] < near)
        farthest = candidates[np.argsort(-nearer[other][candidates], kind="stable")]
        used: set[int] = set()
        num_found = 0
        for pair in farthest:
            both = {int(rows[pair]) for rows in pairs}
            if num_found == PAIRS or nearer[other][pair] < near:
                break
            if used & both:
                continue
            used |= both
            num_found += 1
            shares = {name: round(100 * float(nearer[name][pair]), 2) for name in sides}
            found.append({"texts": [_short(texts[row]) for row in sorted(both)], **shares})
    return found


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
