"""Objectives against golden values, gradients, and the papers' invariants; how they combine."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.ranks.corpus import positions_of
from stages.ranks.positions import rank_factor
from stages.rows import unit_rows
from stages.train.loss import total_loss
from stages.train.objectives.base import Scores
from stages.train.objectives.consistency import consistency
from stages.train.objectives.infonce import info_nce
from stages.train.objectives.listmle import list_mle
from stages.train.objectives.listnet import list_net
from stages.train.objectives.rank_regression import RankRegression, rank_regression
from stages.train.objectives.scores import cosines, mix_teachers, off_diagonal, row_cosines, unit
from stages.train.objectives.similarity_regression import SimilarityRegression, similarity_order
from stages.train.objectives.soft_negative import soft_negative_margin
from stages.train.settings import Objectives


def scores(golden, dtype):
    inputs = golden["inputs"]
    C = cosines(*(torch.tensor(inputs[name], dtype=dtype) for name in ("u", "v")))
    factors = [unit(torch.tensor(inputs[name], dtype=dtype)) for name in ("teacher1", "teacher2")]
    return C, mix_teachers(factors, [inputs["alpha"], 1 - inputs["alpha"]])


LOSSES = {
    "infonce_tau1": lambda C, T: info_nce(C, 0.05),
    "consistency_js_tau1": lambda C, T: consistency(C, 0.05),
    "consistency_js_tau_0.5": lambda C, T: consistency(C, 0.5),
    "listnet_tau2_tau3": lambda C, T: list_net(C, T, 0.025, 0.0125),
    "listnet_0.05_0.05": lambda C, T: list_net(C, T, 0.05, 0.05),
    "similarity_regression_off_diagonal": lambda C, T: SimilarityRegression().value(Scores(C, T)),
    "listmle_tau2": lambda C, T: list_mle(C, T, 0.025, keep_positive=True),
    "listmle_tau2_without_positive": lambda C, T: list_mle(C, T, 0.025, keep_positive=False),
}

TOTALS = {
    "rankcse_total_listmle_beta1_gamma1": dict(listmle=dict(student_temperature=0.025)),
    "rankcse_total_listnet_beta0.5_gamma2": dict(
        consistency=dict(weight=0.5), listnet=dict(weight=2.0)
    ),
}


def rank_scores(golden, dtype):
    """Student cosines, and rank similarities of teacher 1 over the corpus."""
    inputs = golden["inputs"]
    corpus, sentences = (np.array(inputs[name]) for name in ("corpus", "teacher1"))
    factor = torch.tensor(rank_factor(positions_of(sentences, unit_rows(corpus))), dtype=dtype)
    return scores(golden, dtype)[0], factor @ factor.T


RANK_LOSSES = {
    "rank_mse_all_pairs": dict(low=-1.0, high=1.0),
    "rank_mse_between_-0.2_and_0.2": dict(low=-0.2, high=0.2),
}


@pytest.mark.parametrize("name", RANK_LOSSES)
def test_rank_regression_equals_golden_values(golden, name):
    C, R = rank_scores(golden, torch.float64)
    np.testing.assert_allclose(R, golden["expected"]["rank_similarity_teacher1"], atol=1e-6)
    R = torch.tensor(golden["expected"]["rank_similarity_teacher1"], dtype=torch.float64)
    low, high = RANK_LOSSES[name]["low"], RANK_LOSSES[name]["high"] + 1e-12
    found = float(rank_regression(C, R, low, high))
    assert found == pytest.approx(golden["expected"][name], abs=1e-9)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("rankencoder_hinge_lambda0.05", dict(weight=0.05)),
        ("rankencoder_hinge_lambda1e6", dict(weight=1e6)),
        ("rankencoder_sum_lambda0.05", dict(weight=0.05, combine="sum")),
    ],
)
def test_rank_regression_joins_the_contrastive_loss(golden, name, settings):
    C, _ = scores(golden, torch.float64)
    R = torch.tensor(golden["expected"]["rank_similarity_teacher1"], dtype=torch.float64)
    regression = dict(low=-1.0, high=1.0) | settings
    objectives = Objectives.model_validate({"infonce": {}, "rank_regression": regression})
    total, _ = total_loss(Scores(C, R.clamp(-1, 1)), objectives, {})
    assert float(total) == pytest.approx(golden["expected"][name], rel=1e-9)


def test_the_maximum_lets_gradient_through_the_larger_term_only():
    C = torch.eye(4, dtype=torch.float64) * 0.9
    T = torch.full((4, 4), 0.6, dtype=torch.float64)
    for weight, larger in ((1e6, "rank_regression"), (1e-9, "infonce")):
        regression = {"rank_regression": {"weight": weight}}
        chosen = Objectives.model_validate({"infonce": {}} | regression)
        live = C.clone().requires_grad_()
        total_loss(Scores(live, T), chosen, {})[0].backward()
        alone = C.clone().requires_grad_()
        if larger == "infonce":
            info_nce(alone, 0.05).backward()
        else:
            (weight * rank_regression(alone, T, 0.5, 0.8)).backward()
        torch.testing.assert_close(live.grad, alone.grad)


def test_rank_regression_without_any_pair_is_zero_and_leaves_the_rest():
    C = torch.rand(5, 5, dtype=torch.float64, requires_grad=True)
    value = rank_regression(C, torch.zeros(5, 5, dtype=torch.float64), 0.5, 0.8)
    value.backward()
    assert value.item() == 0
    assert float(C.grad.abs().sum()) == 0


def test_soft_negative_margin_equals_its_golden_value_and_vanishes_inside_the_margins(golden):
    inputs = golden["inputs"]
    u, v, n = (torch.tensor(inputs[k], dtype=torch.float64) for k in ("u", "v", "hard_negative"))
    value = float(soft_negative_margin(cosines(u, v), row_cosines(u, n), 0.1, 0.3))
    assert value == pytest.approx(golden["expected"]["soft_negative_margin_alpha0.1_beta0.3"])
    C = torch.eye(3, dtype=torch.float64) * 0.9
    for difference, expected in ((-0.1, 0), (-0.3, 0), (-0.2, 0), (0.0, 0.1), (-0.5, 0.2)):
        soft = torch.full((3,), 0.9 + difference, dtype=torch.float64)
        assert float(soft_negative_margin(C, soft, 0.1, 0.3)) == pytest.approx(expected)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_equal_golden_values(golden, name):
    expected = golden["expected"][name]
    double = float(LOSSES[name](*scores(golden, torch.float64)))
    single = float(LOSSES[name](*scores(golden, torch.float32)))
    assert double == pytest.approx(expected, abs=1e-9)
    assert single == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", TOTALS)
def test_weighted_totals_equal_golden_values(golden, name):
    objectives = Objectives.model_validate({"infonce": {}, "consistency": {}} | TOTALS[name])
    C, T = scores(golden, torch.float64)
    total, parts = total_loss(Scores(C, T), objectives, {})
    assert float(total) == pytest.approx(golden["expected"][name], abs=1e-9)
    assert set(parts) == {"infonce", "consistency", *TOTALS[name]}


def test_score_matrices_equal_golden_values(golden):
    C, T = scores(golden, torch.float64)
    expected = golden["expected"]
    np.testing.assert_allclose(C, expected["student_cosines"], atol=1e-12)
    np.testing.assert_allclose(T, expected["teacher_scores"], atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_the_value(name):
    generator = torch.Generator().manual_seed(0)
    u, v, t = (torch.randn(5, 4, dtype=torch.float64, generator=generator) for _ in range(3))
    T = unit(t) @ unit(t).T
    u, v = u.requires_grad_(), v.requires_grad_()
    # tau scaled up: at 0.0125 a finite difference of 1e-6 already leaves the linear range
    assert torch.autograd.gradcheck(
        lambda a, b: LOSSES[name](cosines(a, b) * 0.1, T * 0.1), (u, v), atol=1e-5
    )


@settings(max_examples=30, deadline=None)
@given(st.integers(3, 12), st.integers(0, 10**6), st.floats(0.01, 1))
def test_consistency_is_a_divergence(size, seed, temperature):
    C = torch.tensor(np.random.default_rng(seed).uniform(-1, 1, (size, size)))
    value = float(consistency(C, temperature))
    assert 0 <= value <= math.log(2) + 1e-12
    assert value == pytest.approx(float(consistency(C.T, temperature)), abs=1e-12)
    assert float(consistency(C + C.T, temperature)) == pytest.approx(0, abs=1e-12)


def test_list_net_is_least_at_the_teacher_and_blind_to_the_positive():
    C = torch.tensor(np.random.default_rng(0).uniform(-1, 1, (6, 6)))
    q = torch.softmax(off_diagonal(C) / 0.1, -1)
    entropy = float(-(q * q.log()).sum(-1).mean())
    assert float(list_net(C, C, 0.1, 0.1)) == pytest.approx(entropy)
    assert float(list_net(C.roll(1, 1), C, 0.1, 0.1)) > entropy
    changed = C + torch.eye(6) * 7
    assert float(list_net(changed, changed, 0.1, 0.1)) == pytest.approx(entropy)


def test_list_mle_of_constant_scores_is_log_factorial():
    C = torch.zeros(128, 128, dtype=torch.float64)
    T = torch.rand(128, 128, dtype=torch.float64)
    assert float(list_mle(C, T, 0.05, True)) == pytest.approx(math.lgamma(129))
    assert float(list_mle(C, T, 0.05, False)) == pytest.approx(math.lgamma(128))


def test_list_mle_prefers_the_teachers_order():
    T = torch.rand(6, 6, dtype=torch.float64)
    assert list_mle(T, T, 0.1, True) < list_mle(T, -T, 0.1, True)


def test_info_nce_of_identical_views_and_orthogonal_negatives():
    value = float(info_nce(torch.eye(10, dtype=torch.float64), 0.05))
    assert value == pytest.approx(math.log1p(9 * math.exp(-20)))


def test_teachers_get_no_gradient_and_weights_are_scaled():
    a, b = unit(torch.randn(4, 3)), unit(torch.randn(4, 5))
    mixed = mix_teachers([a, b], [1.0, 2.0])
    torch.testing.assert_close(mixed, (a @ a.T + 2 * b @ b.T) / 3)


def test_a_sentence_is_as_similar_to_itself_as_can_be():
    """Compressed rank factors are shorter than 1; ListMLE would else rank others first."""
    short = unit(torch.randn(4, 3)) * 0.9
    mixed = mix_teachers([short], [1.0])
    assert torch.equal(mixed.diagonal(), torch.ones(4))
    torch.testing.assert_close(mixed[0, 1], short[0] @ short[1])


def test_auxiliary_terms_are_added_after_the_maximum(golden):
    """Released RankEncoder: max(contrastive, lambda * regression) + weight * masked language."""
    C, _ = scores(golden, torch.float64)
    R = torch.tensor(golden["expected"]["rank_similarity_teacher1"], dtype=torch.float64)
    masked = torch.tensor(golden["inputs"]["masked_language_loss"], dtype=torch.float64)
    chosen = Objectives.model_validate(
        {"infonce": {}, "masked_language": {"weight": 0.1},
         "rank_regression": {"weight": 0.05, "low": -1.0, "high": 1.0}}
    )  # fmt: skip
    total, _ = total_loss(Scores(C, R.clamp(-1, 1)), chosen, {"masked_language": masked})
    name = "rankencoder_hinge_lambda0.05_plus_0.1_masked_language"
    assert float(total) == pytest.approx(golden["expected"][name], rel=1e-9)


AUXILIARY = ("masked_language", "replaced_token", "denoising")


@pytest.mark.parametrize("name", [*AUXILIARY, "consistency", "listnet", "listmle"])
def test_no_other_objective_enters_the_maximum(name):
    """However large it is, the regression goes on to train, and so does the other."""
    random = np.random.default_rng(3)
    C = torch.tensor(0.1 * random.uniform(0, 1, (5, 5)) + 0.9 * np.eye(5))
    T = torch.full((5, 5), 0.6, dtype=torch.float64).fill_diagonal_(1)

    def gradients(*names):
        live = C.clone().requires_grad_()
        large = torch.tensor(50.0, dtype=torch.float64, requires_grad=True)
        chosen = {one: {"weight": 10.0} if one == "rank_regression" else {} for one in names}
        given = {one: large for one in names if one in AUXILIARY}
        objectives = Objectives.model_validate(chosen)
        (total_loss(Scores(live, T), objectives, given)[0] + 0 * live.sum()).backward()
        return live.grad, large.grad

    together, own = gradients("infonce", "rank_regression", name)
    alone, own_alone = gradients(name)
    torch.testing.assert_close(together, gradients("infonce", "rank_regression")[0] + alone)
    assert own == own_alone


def test_two_maxima_are_refused():
    class Two(Objectives):
        another: RankRegression | None = None

    chosen = {"infonce": {}, "rank_regression": {}, "another": {}}
    with pytest.raises(ValueError, match="rank_regression and another: only one can take the max"):
        Two.model_validate(chosen)
    Two.model_validate(chosen | {"another": {"combine": "sum"}})


@pytest.mark.parametrize("others", [{}, {"listnet": {}}, {"masked_language": {}}])
def test_a_maximum_without_a_contrastive_term_is_refused(others):
    with pytest.raises(ValueError, match="has no other to take the maximum with"):
        Objectives.model_validate({"rank_regression": {}} | others)
    Objectives.model_validate({"rank_regression": {"combine": "sum"}} | others)


C6, T6 = torch.rand(2, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
NEGATED = C6.diagonal() - torch.linspace(0, 1, 6)
CHOSEN = {
    "infonce": (dict(temperature=0.5), info_nce(C6, 0.5)),
    "consistency": (dict(temperature=0.5), consistency(C6, 0.5)),
    "listnet": (
        dict(student_temperature=0.5, teacher_temperature=0.3), list_net(C6, T6, 0.5, 0.3)
    ),
    "listmle": (
        dict(student_temperature=0.5, keep_positive=False),
        list_mle(C6, T6, 0.5, keep_positive=False),
    ),
    "rank_regression": (
        dict(low=0.2, high=0.6, combine="sum"), rank_regression(C6, T6, 0.2, 0.6)),
    "soft_negative": (
        dict(low=0.2, high=0.4), soft_negative_margin(C6, NEGATED, 0.2, 0.4)
    ),
    "similarity_regression": (
        dict(distance="order", temperature=0.3),
        similarity_order(C6, T6, 0.3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOSEN)
def test_settings_reach_the_formula(name):
    chosen, expected = CHOSEN[name]
    objective = Objectives.model_validate({name: chosen}).chosen[name]
    found = objective.value(Scores(C6, T6, own={"negated": NEGATED}))
    assert float(found) == pytest.approx(float(expected), rel=1e-9)
    alone = {"combine": "sum"} if name == "rank_regression" else {}
    default = Objectives.model_validate({name: alone}).chosen[name]
    assert float(default.value(Scores(C6, T6, own={"negated": NEGATED}))) != float(found)


def test_the_share_that_is_masked_is_the_one_asked_for():
    for name in ("masked_language", "replaced_token"):
        assert (
            Objectives.model_validate({name: {"mask_ratio": 0.4}}).chosen[name].masked_share == 0.4
        )
