"""Each text is embedded once, with each of its prompts."""

import numpy as np
import pytest

from stages.evaluate import remembered
from stages.evaluate.remembered import Remembered
from stages.kinds import kind_of_each


class Counted:
    """A vector says the text and the kind; what is asked for is kept."""

    def __init__(self):
        self.asked = []

    def __call__(self, texts, kinds=None):
        each = kind_of_each(kinds, len(texts))
        self.asked += zip(texts, each, strict=True)
        rows = [[len(t), {None: 0, "query": 1, "document": 2}[k]]
                for t, k in zip(texts, each, strict=True)]  # fmt: skip
        return np.array(rows, dtype=np.float32).reshape(len(texts), 2)


def test_a_text_is_embedded_once_for_each_kind():
    encode = Counted()
    known = Remembered(encode)
    np.testing.assert_array_equal(known(["a", "bb", "a"]), [[1, 0], [2, 0], [1, 0]])
    np.testing.assert_array_equal(known(["bb", "ccc"]), [[2, 0], [3, 0]])
    np.testing.assert_array_equal(known(["a", "bb"], "query"), [[1, 1], [2, 1]])
    np.testing.assert_array_equal(known(["a", "a"], ["document", "query"]), [[1, 2], [1, 1]])
    assert known([]).shape == (0, 2)
    assert len(encode.asked) == len(set(encode.asked)) == 6


@pytest.mark.parametrize("most", [0, 2, 3])
def test_memory_is_bounded_and_vectors_stay_right(most, monkeypatch):
    monkeypatch.setattr(remembered, "MOST_BYTES", 8 * most)  # two numbers each
    known = Remembered(Counted())
    for texts in (["a", "bb"], ["a", "ccc"], ["bb", "ccc", "dddd"], ["a"]):
        np.testing.assert_array_equal(known(texts)[:, 0], [len(text) for text in texts])
        assert len(known._known) <= most


def test_a_corpus_is_not_kept_even_if_it_comes_first(monkeypatch):
    monkeypatch.setattr(remembered, "MOST_BYTES", 8 * 10)
    monkeypatch.setattr(remembered, "FEW", 5)
    encode = Counted()
    known = Remembered(encode)
    texts = [f"text {number}" for number in range(11)]
    assert known(texts, "document").shape == (11, 2)
    assert encode.asked[1:] == [(text, "document") for text in texts]  # as one call, in its order
    assert not known._known
    known(texts[:6])
    assert len(known._known) == 6
