"""The directions that are kept, the rows they are learned from, and the error of the rest."""

import numpy as np
import pytest

from stages.principal import (
    band_error,
    fit_and_held_out,
    principal_directions,
    random_order,
    similarity_error,
)
from stages.rows import unit_rows


def test_the_directions_are_the_leading_right_singular_vectors():
    vectors = np.random.default_rng(0).normal(size=(200, 30)) * np.linspace(3, 0.5, 30) + 0.4
    expected = np.linalg.svd(vectors, full_matrices=False)[2]
    for count in (1, 7, 30, 99):
        found = principal_directions(vectors.astype(np.float32), count)
        assert found.shape == (30, min(count, 30))
        along = np.abs((found.T * expected[:count]).sum(1))  # either sign
        np.testing.assert_allclose(along, 1, atol=1e-5)


@pytest.mark.parametrize(
    ("num_rows", "fit", "held_out", "expected"),
    [(1000, 300, 80, (300, 80)), (1000, 300, 400, (300, 100)), (100, 300, 80, (90, 10)),
     (9, 300, 80, (9, 0)), (0, 5, 5, (0, 0))],
)  # fmt: skip
def test_rows_are_split_and_never_in_both(num_rows, fit, held_out, expected):
    order = random_order(num_rows, 1, 0)
    one, other = fit_and_held_out(order, fit, held_out)
    assert (len(one), len(other)) == expected
    assert len({*one.tolist(), *other.tolist()}) == sum(expected)


def test_an_order_depends_on_size_seed_and_stream_alone():
    order = random_order(500, 1, 2).tolist()
    assert sorted(order) == [*range(500)]
    assert order == random_order(500, 1, 2).tolist()
    others = [random_order(500, 3, 2), random_order(500, 1, 3), random_order(501, 1, 2)]
    assert all(order != other.tolist() for other in others)


def test_the_error_of_products_is_counted_pair_by_pair():
    """Against loops over pairs; some are exact copies, with a similarity of 1."""
    random = np.random.default_rng(3)
    rows = unit_rows(random.normal(size=(40, 3)))
    rows[7] = rows[5]
    short = rows[:, :2]
    error = similarity_error(rows @ rows.T, short)
    pairs = [(i, j) for i in range(40) for j in range(i + 1, 40)]
    truth = np.array([rows[i] @ rows[j] for i, j in pairs])
    off = np.array([short[i] @ short[j] for i, j in pairs]) - truth
    assert error["rmse"] == pytest.approx(np.sqrt((off**2).mean()), rel=1e-4)
    assert error["max"] == pytest.approx(np.abs(off).max(), rel=1e-4)
    assert error["spread"] == pytest.approx(truth.std(), rel=1e-4)
    for low, high in ((0.5, np.inf), (-0.3, 0.4), (0.9, 1.0)):
        inside = (truth >= low) & (truth < high)
        count, rmse = band_error(error, low, high)
        assert count == inside.sum() > 0
        assert rmse == pytest.approx(np.sqrt((off[inside] ** 2).mean()), rel=1e-4)
    assert band_error(error, 1.1) == (0, 0.0)
