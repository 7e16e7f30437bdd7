"""Formulas of the objectives against slow twins, and the digits that they keep in float32."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.train.objectives.consistency import consistency
from stages.train.objectives.infonce import info_nce
from stages.train.objectives.listmle import list_mle
from stages.train.objectives.listnet import list_net
from stages.train.objectives.rank_regression import rank_regression
from stages.train.objectives.scores import cosines, mix_teachers, row_cosines, unit
from stages.train.objectives.similarity_regression import similarity_order
from stages.train.objectives.soft_negative import soft_negative_margin


def slow_list_net(C, T, t2, t3):
    rows = []
    for i in range(len(C)):
        others = [j for j in range(len(C)) if j != i]
        q = np.exp([T[i, j] / t3 for j in others])
        p = np.exp([C[i, j] / t2 for j in others])
        rows.append(-sum(q / q.sum() * np.log(p / p.sum())))
    return np.mean(rows)


def slow_list_mle(C, T, t2):
    rows = []
    for c, t in zip(C / t2, T, strict=True):
        order = sorted(range(len(t)), key=lambda j: -t[j])
        s = c[order]
        rows.append(-sum(s[k] - np.log(np.exp(s[k:]).sum()) for k in range(len(s))))
    return np.mean(rows)


def slow_jensen_shannon(C, t):
    def softmax(x):
        return np.exp(x) / np.exp(x).sum()

    rows = []
    for i in range(len(C)):
        p, q = softmax(C[i] / t), softmax(C[:, i] / t)
        m = (p + q) / 2
        rows.append(0.5 * (p @ np.log(p / m) + q @ np.log(q / m)))
    return np.mean(rows)


def slow_order(C, T, t):
    rows = []
    for i in range(len(C)):
        others = [j for j in range(len(C)) if j != i]
        pairs = [(j, k) for j in others for k in others if T[i, j] > T[i, k]]
        rows.append(math.log(1 + sum(math.exp((C[i, k] - C[i, j]) / t) for j, k in pairs)))
    return np.mean(rows)


@settings(max_examples=30, deadline=None)
@given(st.integers(3, 9), st.integers(0, 10**6), st.sampled_from([0, 1, 2]))
def test_the_order_of_similarities_equals_its_slow_twin(size, seed, decimals):
    """With ties, down to rows in which all are equal."""
    random = np.random.default_rng(seed)
    C, T = random.uniform(-1, 1, (2, size, size))
    T = T.round(decimals)
    c = torch.tensor(C, requires_grad=True)
    found = similarity_order(c, torch.tensor(T), 0.1).detach()
    assert float(found) == pytest.approx(slow_order(C, T, 0.1))
    assert torch.autograd.gradcheck(lambda c: similarity_order(c, torch.tensor(T), 0.1), c)


@settings(max_examples=30, deadline=None)
@given(st.integers(3, 9), st.integers(0, 10**6))
def test_losses_equal_their_slow_twins(size, seed):
    random = np.random.default_rng(seed)
    C, T = random.uniform(-1, 1, (2, size, size))
    c, t = torch.tensor(C), torch.tensor(T)
    assert float(list_net(c, t, 0.2, 0.1)) == pytest.approx(slow_list_net(C, T, 0.2, 0.1))
    assert float(list_mle(c, t, 0.2, True)) == pytest.approx(slow_list_mle(C, T, 0.2))
    assert float(consistency(c, 0.2)) == pytest.approx(slow_jensen_shannon(C, 0.2))


def slow_info_nce(C, t, hard=None):
    rows = []
    for i in range(len(C)):
        candidates = np.exp(C[i] / t).sum() + (0 if hard is None else np.exp(hard[i] / t).sum())
        rows.append(-np.log(np.exp(C[i, i] / t) / candidates))
    return np.mean(rows)


def slow_rank_regression(C, T, low, high):
    size = len(C)
    kept = [(i, j) for i in range(size) for j in range(size) if low <= T[i, j] <= high]
    return sum((T[i, j] - C[i, j]) ** 2 for i, j in kept) / (len(kept) + 1e-8)


def slow_soft_negative(C, soft, low, high):
    differences = [soft[i] - C[i, i] for i in range(len(C))]
    return np.mean([max(d + low, 0) + max(-d - high, 0) for d in differences])


@pytest.mark.parametrize("seed", range(5))
def test_formulas_equal_their_slow_twins_on_other_seeds(seed):
    """Inputs of other seeds than the golden file's, vectors first, all in float64."""
    random = np.random.default_rng(seed)
    u, v, hard, t1, t2 = (random.standard_normal((7, width)) for width in (6, 6, 6, 5, 9))

    def cosine(a, b):
        return np.array([[x @ y / np.sqrt((x @ x) * (y @ y)) for y in b] for x in a])

    C, H = cosine(u, v), cosine(u, hard)
    T = cosine(t1, t1) / 3 + 2 * cosine(t2, t2) / 3
    one, two, three, four, five = (torch.tensor(x) for x in (u, v, hard, t1, t2))
    c, h, t = cosines(one, two), cosines(one, three), mix_teachers([unit(four), unit(five)], [1, 2])
    np.testing.assert_allclose(c, C, atol=1e-14)
    np.testing.assert_allclose(t, T, atol=1e-14)
    soft = row_cosines(one, three)
    for found, expected in (
        (info_nce(c, 0.05), slow_info_nce(C, 0.05)),
        (info_nce(c, 0.05, h), slow_info_nce(C, 0.05, H)),
        (consistency(c, 0.05), slow_jensen_shannon(C, 0.05)),
        (list_net(c, t, 0.025, 0.0125), slow_list_net(C, T, 0.025, 0.0125)),
        (list_mle(c, t, 0.025, True), slow_list_mle(C, T, 0.025)),
        (rank_regression(c, t, -0.2, 0.3), slow_rank_regression(C, T, -0.2, 0.3)),
        (soft_negative_margin(c, soft, 0.1, 0.3), slow_soft_negative(C, H.diagonal(), 0.1, 0.3)),
    ):
        assert float(found) == pytest.approx(expected, rel=1e-11)


def nearly_solved(seed, size=16, hard=False):
    """Cosines of a batch whose InfoNCE is tiny, float32, and of hard negatives if wanted."""
    random = np.random.default_rng(seed)
    C = random.uniform(-0.1, 0.25, (size, size))
    np.fill_diagonal(C, random.uniform(0.9, 0.99, size))
    negatives = random.uniform(-0.1, 0.2, (size, size)) if hard else None
    return [x if x is None else torch.tensor(x, dtype=torch.float32) for x in (C, negatives)]


def value_and_gradients(loss, *inputs):
    live = [x.clone().requires_grad_() for x in inputs]
    value = loss(*live)
    value.backward()
    return [value.detach().double(), *(x.grad.double() for x in live)]


def assert_float32_is_as_good(loss, inputs, rtol, scale=1.0):
    """float32 against float64 of the same numbers; gradients relative to their largest entry."""
    single = value_and_gradients(loss, *inputs)
    double = value_and_gradients(loss, *(x.double() for x in inputs))
    assert single[0] > 0
    for a, b in zip(single, double, strict=True):
        assert float((a - b).abs().max() / b.abs().max()) < rtol
    assert float(double[0]) < scale


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_info_nce_keeps_its_digits_when_it_is_small(seed, hard):
    """As a difference of two large logits it kept three to four of them."""
    inputs = [x for x in nearly_solved(seed, hard=hard) if x is not None]
    assert_float32_is_as_good(lambda *x: info_nce(x[0], 0.05, *x[1:]), inputs, 5e-6, scale=1e-4)
    easy = [inputs[0] - 0.3 * (1 - torch.eye(16)), *(x - 0.3 for x in inputs[1:])]
    assert_float32_is_as_good(lambda *x: info_nce(x[0], 0.05, *x[1:]), easy, 5e-6, scale=1e-6)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("solved", [True, False])
@pytest.mark.parametrize("difference", [1e-1, 1e-3, 1e-5])
def test_consistency_keeps_its_digits_when_the_views_agree(seed, solved, difference):
    random = np.random.default_rng(seed)
    C = nearly_solved(seed)[0] if solved else torch.tensor(random.uniform(-1, 1, (16, 16)))
    C = (C + C.T) / 2 + difference * torch.tensor(random.uniform(-1, 1, (16, 16)))
    assert_float32_is_as_good(lambda x: consistency(x, 0.05), [C.float()], 1e-6)


def test_info_nce_of_one_candidate_that_is_much_nearer_than_the_positive():
    """The other end: the loss is the difference of logits, and its gradient one over tau."""
    C = torch.tensor([[-1.0, 1.0], [0.0, 0.5]])
    value, gradient = value_and_gradients(lambda x: info_nce(x, 0.01), C)
    assert float(value) == pytest.approx((200 + math.log1p(math.exp(-50))) / 2)
    assert gradient[0].tolist() == pytest.approx([-50, 50])
