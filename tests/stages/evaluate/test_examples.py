"""Sentences to look at: against slow twins."""

from itertools import combinations

import numpy as np
import pytest

from stages.evaluate.examples import LONGEST, NEAREST, PAIRS, SENTENCES, disagreements, neighbours
from stages.rows import unit_rows

SIZE = 30
TEXTS = [f"text {number}" for number in range(SIZE)]


@pytest.fixture(scope="module")
def sides():
    random = np.random.default_rng(0)
    base = random.standard_normal((SIZE, 6))
    vectors = [unit_rows(base + noise * random.standard_normal(base.shape)) for noise in (0, 1)]
    teacher, student = (one @ one.T for one in vectors)
    return {"student": student, "teachers": teacher}


def test_neighbours_are_the_most_similar_others(sides):
    found = neighbours(TEXTS, sides["student"], sides["teachers"])
    assert [one["text"] for one in found] == TEXTS[:SENTENCES]
    for row, one in enumerate(found):
        for name, matrix in sides.items():
            others = sorted(set(range(SIZE)) - {row}, key=lambda other: -matrix[row, other])
            assert one[name] == [TEXTS[other] for other in others[:NEAREST]]


def test_disagreements_are_near_for_one_and_farthest_for_the_other(sides):
    pairs = list(combinations(range(SIZE), 2))
    nearer = {
        name: {p: sum(matrix[q] > matrix[p] for q in pairs) / len(pairs) for p in pairs}
        for name, matrix in sides.items()
    }
    expected = []
    for one, other in (("teachers", "student"), ("student", "teachers")):
        used, kept = set(), []
        for pair in sorted(pairs, key=lambda p: -nearer[other][p]):
            apart = nearer[one][pair] < 0.1 <= nearer[other][pair]
            if apart and not used & set(pair) and len(kept) < PAIRS:
                used |= set(pair)
                kept.append(pair)
        expected += kept
    found = disagreements(TEXTS, sides["student"], sides["teachers"], near=0.1)
    assert [one["texts"] for one in found] == [[TEXTS[i] for i in pair] for pair in expected]
    for one, pair in zip(found, expected, strict=True):
        for name in sides:
            assert one[name] == pytest.approx(100 * nearer[name][pair], abs=0.01)


def test_who_agrees_has_no_disagreements_and_long_texts_are_cut(sides):
    texts = ["x" * 300] * SIZE
    assert disagreements(texts, sides["teachers"], sides["teachers"], near=0.1) == []
    found = neighbours(texts[:2], np.eye(2), np.eye(2))
    assert len(found) == 2 and {len(one["text"]) for one in found} == {LONGEST}
    assert [len(one["student"]) for one in found] == [1, 1]
