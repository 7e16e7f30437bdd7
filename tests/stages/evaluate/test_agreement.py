"""Agreement on held-out sentences: golden values, slow twins, and a recipe without labels."""

import json
from itertools import combinations

import numpy as np
import pytest
from scipy.stats import kendalltau, spearmanr
from sklearn.metrics import ndcg_score

from pipeline.plan.plan import make_plan
from pipeline.report.figures import collect
from pipeline.run.runner import check_nodes
from stages.errors import UserError
from stages.evaluate.agreement import (
    NEAREST,
    band_spearmans,
    by_sentence,
    of_pairs,
    pair_spearman,
    pairs_of_bands,
    row_measures,
    score_agreement,
)
from stages.evaluate.resampling import Items, interval
from stages.recipe import Recipe
from stages.rows import FactorRows, unit_rows
from stages.sentences.settings import num_held_out
from tests.support.here import make_here
from tests.support.recipes import tiny


def similarities(seed, size=40, width=8, like=None, noise=1.0):
    """Vectors (N, D) and their cosines (N, N); of others, with noise, where there are any."""
    random = np.random.default_rng(seed)
    vectors = noise * random.standard_normal((size, width)) + (0 if like is None else like)
    return vectors, unit_rows(vectors) @ unit_rows(vectors).T


def test_golden_agreement(golden):
    own, taught = (
        unit_rows(np.array(golden["inputs"][name])).astype(np.float64) for name in ("u", "teacher1")
    )
    student, teacher = own @ own.T, taught @ taught.T
    expected = {
        name.removeprefix("agreement_"): value
        for name, value in golden["expected"].items()
        if name.startswith("agreement_")
    }
    rows = row_measures(student, teacher, 3)
    found = {
        "spearman_pairs_u_teacher1": pair_spearman(student, teacher),
        "kendall_rows_u_teacher1": np.mean(rows["Kendall"]),
        "neighbour_overlap_at_3_u_teacher1": np.mean(rows["nearest 3"]),
    }
    assert found == pytest.approx(expected, rel=1e-6)


def test_measures_of_rows_equal_scipys_and_scikit_learns():
    base, teacher = similarities(0)
    _, student = similarities(1, like=base)
    rows = row_measures(student, teacher, 5)
    for row in range(len(teacher)):
        others = [i for i in range(len(teacher)) if i != row]
        own, taught = student[row, others], teacher[row, others]
        assert rows["Kendall"][row] == pytest.approx(kendalltau(own, taught).statistic)
        gains = ndcg_score([np.maximum(taught, 0)], [own], k=5)
        assert rows["NDCG@5"][row] == pytest.approx(gains)
        near = [set(sorted(others, key=lambda i: -x[row, i])[:5]) for x in (student, teacher)]
        assert rows["nearest 5"][row] == len(near[0] & near[1]) / 5


def test_bands_are_shares_of_the_pairs_that_the_teacher_finds_nearest():
    base, teacher = similarities(0)
    _, student = similarities(1, like=base)
    pairs = sorted(combinations(range(40), 2), key=lambda pair: -teacher[pair])
    bands = {"nearest 1%": pairs[:8], "next 9%": pairs[8:78], "other 90%": pairs[78:]}
    expected = {
        name: 100 * spearmanr([student[p] for p in some], [teacher[p] for p in some]).statistic
        for name, some in bands.items()
    }
    assert band_spearmans(student, teacher) == pytest.approx(expected)


def standard_error(values):
    return np.std(values, ddof=1) / len(values) ** 0.5


@pytest.mark.parametrize("common", [0.0, 2.0])
def test_errors_are_those_of_samples_and_of_differences_too(common):
    """Of samples of sentences figures vary as much as their errors say, and so does how much more
    another student has, whose intervals cover the truth in 19 of 20.

    common: how much of a direction that all share some sentences have, so that they are near many.
    """
    random = np.random.default_rng(0)
    shared = common * np.outer(random.random(3000), random.standard_normal(8))
    base, teacher = similarities(0, 3000, like=shared)
    students = [similarities(1, 3000, like=base, noise=noise)[1] for noise in (1.0, 0.8)]

    def measured(rows, near):
        """(student, item) of some sentences."""
        some = np.ix_(rows, rows)
        pairs = pairs_of_bands(of_pairs(teacher[some]))[NEAREST] if near else None
        return np.stack([by_sentence(one[some], teacher[some], pairs) for one in students])

    for near in (False, True):
        truth = measured(np.arange(3000), near).mean(1)
        items = [measured(random.choice(3000, 120, replace=False), near) for _ in range(200)]
        found = np.stack([one.mean(1) for one in items])
        apart = [second - first for first, second in items]
        error = np.mean([standard_error(first) for first, _ in items])
        assert error == pytest.approx(found[:, 0].std(), rel=0.15)
        error = np.mean([standard_error(one) for one in apart])
        assert error == pytest.approx((found[:, 1] - found[:, 0]).std(), rel=0.15)
        limits = [interval(Items("mean", one).resampled(400)) for one in apart]
        inside = sum(low <= truth[1] - truth[0] <= high for low, high in limits)
        assert 180 <= inside <= 198


def test_figures_have_the_intervals_of_their_items():
    base, _ = similarities(0, 60)
    own, _ = similarities(1, 60, like=base)
    result = score_agreement(unit_rows(own), {"a": unit_rows(base)}, [1.0])
    for name, figure in zip(("agreement", "near pairs"), result.figures, strict=False):
        values = 100 * result.items[name].values
        error = 1.96 * standard_error(values)
        assert figure.name == name and figure.value == pytest.approx(values.mean())
        assert figure.interval == pytest.approx((figure.value - error, figure.value + error))


def test_the_same_order_has_no_error_and_a_constant_one_no_figure():
    _, teacher = similarities(0)
    np.testing.assert_allclose(by_sentence(teacher, teacher), 1)
    assert np.isnan(by_sentence(np.ones((40, 40)), teacher)).all()
    # of three pairs that six of the sentences are in
    few = by_sentence(similarities(1)[1], teacher, np.array([0, 60, 300]))
    assert len(np.unique(few.round(9))) <= 7


def test_several_teachers_are_mixed_and_named():
    one, first = similarities(0, 30, 4)
    two, second = similarities(1, 30, 6)
    vectors = unit_rows(np.random.default_rng(2).standard_normal((30, 5)))
    factors = {"a": unit_rows(one), "b": unit_rows(two)}
    found = score_agreement(vectors, factors, [3.0, 1.0]).figures[0]
    own = vectors @ vectors.T
    assert found.value == pytest.approx(100 * pair_spearman(own, 0.75 * first + 0.25 * second))
    assert found.parts["a"] == pytest.approx(100 * pair_spearman(own, first))
    assert found.parts["b"] == pytest.approx(100 * pair_spearman(own, second))


def test_vectors_that_are_all_alike_agree_with_nobody():
    vectors = np.tile(unit_rows(np.ones((1, 4))), (30, 1))
    figures = score_agreement(vectors, {"a": similarities(0, 30)[0]}, [1.0]).figures
    by_name = {figure.name: figure.value for figure in figures}
    assert np.isnan(by_name["agreement"]) and by_name["Kendall"] == 0


@pytest.mark.parametrize(
    ("holdout", "rows", "held"), [(None, 999, 0), (None, 1000, 100), (None, 10**6, 1000), (5, 6, 5)]
)
def test_how_many_are_held_out(holdout, rows, held):
    assert num_held_out(holdout, rows) == held


def unlabelled(tmp_path, teacher_folder, student_folder, **sentences):
    """The tiny recipe without any label."""
    raw = tiny(tmp_path, teacher_folder, student_folder)
    raw["sentences"] |= sentences
    raw["evaluate"] = {"speed": False, "max_length": 48}
    raw["train"]["dev"] = {"every_steps": 4}
    return raw


def test_a_recipe_without_labels_is_chosen_and_told_by_agreement(
    tmp_path, teacher_folder, student_folder
):
    raw = unlabelled(tmp_path, teacher_folder, student_folder, holdout=40)
    recipe = Recipe.model_validate(raw)
    make_here(recipe)
    plan = make_plan(recipe)
    trained = plan.store.open(plan.folders["train"])
    lines = trained.file_path("metrics/metrics.jsonl").read_text().splitlines()
    scores = {row["step"]: row["dev/near pairs"] for row in map(json.loads, lines)
              if "dev/near pairs" in row}  # fmt: skip
    assert list(scores) == [4, 8, 12]
    assert trained.stats["best_step"] == max(scores, key=scores.get)
    after = collect(plan).student["agreement"]
    # slow twin: the exported student and the stored factors
    from sentence_transformers import SentenceTransformer

    folder = plan.store.open(plan.folders["export"]).folder_path("model")
    model = SentenceTransformer(str(folder), device="cpu")
    model.max_seq_length = 48
    texts = sentences_of(plan)[:40]
    vectors = model.encode(texts, normalize_embeddings=True)
    shards = plan.store.open(plan.folders["embed:t"]).shard_paths("factors.npy")
    factors = FactorRows(shards, 150).take(np.arange(40))
    own, taught = vectors @ vectors.T, factors @ factors.T
    pairs = list(combinations(range(40), 2))
    expected = spearmanr([own[p] for p in pairs], [taught[p] for p in pairs]).statistic
    assert after.value == pytest.approx(100 * expected, abs=0.05)
    assert "agreement" not in collect(plan).figures(collect(plan).encoders[1])  # of the teacher


def sentences_of(plan):
    import pyarrow.parquet as pq

    paths = plan.store.open(plan.folders["sentences"]).shard_paths("rows.parquet")
    return [text for path in paths for text in pq.read_table(path)["text"].to_pylist()]


def test_held_out_sentences_change_training_and_nothing_before_it(
    tmp_path, teacher_folder, student_folder
):
    plans = [
        make_plan(Recipe.model_validate(
            unlabelled(tmp_path, teacher_folder, student_folder, holdout=count)
        ))
        for count in (40, 50)
    ]  # fmt: skip
    one, other = ({n: x.fingerprint for n, x in plan.graph.items()} for plan in plans)
    changed = {name for name in one if one[name] != other[name]}
    assert {"sentences", "tokens", "embed:t"} & changed == set()
    assert {"train", "evaluate:before:agreement", "evaluate:after:agreement"} <= changed


@pytest.mark.parametrize(
    ("sentences", "change", "message"),
    [
        ({"holdout": 0}, {}, "train.dev has nothing to choose the checkpoint on"),
        ({"holdout": -1}, {}, "holdout"),
        ({"holdout": 24}, {}, "holdout 24: fewer than 25 sentences say nothing"),
        ({"holdout": 4001}, {}, "less than or equal to 4000"),
        ({"holdout": 40}, {"objectives": {"infonce": {}}}, "no objective reads a teacher"),
    ],
)
def test_bad_settings(tmp_path, teacher_folder, student_folder, sentences, change, message):
    raw = unlabelled(tmp_path, teacher_folder, student_folder, **sentences)
    raw["train"] |= change
    with pytest.raises(ValueError, match=message):
        Recipe.model_validate(raw)


@pytest.mark.parametrize(
    ("holdout", "message"),
    [(300, "sentences.holdout is 300, but there are only 300"), (290, "train.batch_size is 16")],
)
def test_a_held_out_part_that_leaves_too_little(
    tmp_path, teacher_folder, student_folder, holdout, message
):
    raw = unlabelled(tmp_path, teacher_folder, student_folder, holdout=holdout)
    recipe = Recipe.model_validate(raw)
    make_here(recipe, "sentences")
    plan = make_plan(recipe)
    train = plan.graph["train"]
    check_nodes([train])
    with pytest.raises(UserError, match=message):
        train.stage.check_rows(300)


def test_patience_needs_something_to_judge_by(tmp_path, teacher_folder, student_folder):
    """Of few sentences none are held out, which only their number says."""
    raw = unlabelled(tmp_path, teacher_folder, student_folder)
    raw["sentences"].pop("holdout", None)
    raw["train"]["dev"] = {"patience": 3}
    stage = make_plan(Recipe.model_validate(raw)).graph["train"].stage
    stage.check_rows(1000)
    with pytest.raises(UserError, match="train.dev.patience: of 300 sentences none are held out"):
        stage.check_rows(300)


def test_labels_choose_where_there_are_any(tmp_path, teacher_folder, student_folder):
    raw = tiny(tmp_path, teacher_folder, student_folder)
    recipe = Recipe.model_validate(raw)
    assert recipe.holdout == 0
    assert not any("agreement" in name for name in make_plan(recipe).graph)
    raw["sentences"]["holdout"] = 30
    asked = Recipe.model_validate(raw)
    assert asked.train.dev.measures == ["dev"]
    assert "evaluate:after:agreement" in make_plan(asked).graph
