"""The bootstrap against its slow twin: draw, and compute the figure with scipy or scikit-learn."""

import numpy as np
import pytest
from scipy.stats import spearmanr
from sklearn.metrics import average_precision_score

from stages.evaluate import resampling
from stages.evaluate.resampling import Items, interval

FIGURES = {
    "mean": np.mean,
    "spearman": lambda x: spearmanr(*x.T).statistic,
    "average precision": lambda x: average_precision_score(x[:, 1], x[:, 0]),
}


def items(statistic, size=40, seed=0):
    """With ties on both sides."""
    random = np.random.default_rng(seed)
    if statistic == "mean":
        return Items(statistic, random.random(size))
    other = random.integers(0, 2 if statistic == "average precision" else 6, size)
    return Items(statistic, np.stack([np.round(random.random(size) + 0.1 * other, 1), other], 1))


@pytest.mark.parametrize("statistic", FIGURES)
@pytest.mark.parametrize("weights", [1 << 22, 100])
def test_resampled_figures_are_those_of_the_drawn_items(statistic, weights, monkeypatch):
    monkeypatch.setattr(resampling, "WEIGHTS", weights)
    one = items(statistic)
    random = np.random.default_rng(3)
    expected = [FIGURES[statistic](one.values[random.integers(0, 40, 40)]) for _ in range(25)]
    np.testing.assert_allclose(one.resampled(25, seed=3), expected, rtol=1e-9)
    assert one.figure() == pytest.approx(FIGURES[statistic](one.values))


def test_resamples_without_a_figure_are_nan():
    few = Items("average precision", np.array([[0.1, 0], [0.2, 0], [0.3, 1]]))
    found = few.resampled(200)
    assert 0 < np.isnan(found).sum() < 200  # (2 / 3) ** 3 of them draw no positive
    alike = Items("spearman", np.array([[0.1, 1], [0.1, 2], [0.1, 3]]))
    assert np.isnan(alike.resampled(5)).all()
    broken = Items("spearman", np.array([[np.nan, 1], [0.2, 2], [0.1, 3]]))
    assert np.isnan(interval(broken.resampled(5))).all()


def test_equal_seeds_draw_equal_items():
    """What makes differences paired: a figure that is another's plus 1 differs by 1 always."""
    one = items("mean")
    other = Items("mean", one.values + 1)
    np.testing.assert_allclose(other.resampled(50) - one.resampled(50), 1)


def test_repetitions_are_drawn_too():
    """Of figures that are the same for all items and differ by repetition only, the spread is that
    of drawn repetitions; of those that are all alike, that of a mean."""
    values = np.tile([0.0, 1.0, 2.0, 3.0, 4.0], (40, 1))
    assert Items("mean of repetitions", values).resampled(4000).std() == pytest.approx(
        np.sqrt(2 / 5), rel=0.05
    )
    one = items("mean")
    alike = Items("mean of repetitions", np.stack([one.values] * 3, axis=1))
    np.testing.assert_allclose(alike.resampled(50), one.resampled(50))
