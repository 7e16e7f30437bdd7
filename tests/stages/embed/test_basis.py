"""Reduced factors: the basis and its error, from encoders, files of vectors and endpoints."""

import json
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipeline.plan.plan import make_plan, plan_text
from pipeline.recipe.read import load_recipe
from pipeline.report.show import show
from stages.embed import basis as basis_module
from stages.embed import given
from stages.embed.basis import fitted_basis, in_words, reduced, sample_rows
from stages.embed.embedder import Embedder
from stages.encoder.settings import EncoderSettings
from stages.errors import UserError
from stages.rows import FactorRows, unit_rows
from tests.support.embedding_server import WIDTH, Reply, made_up
from tests.support.here import make_here
from tests.support.pipelines import dense, make_pipeline, normalize, pooling
from tests.support.recipes import setting, write_recipe

COSINES = setting("train.objectives", {"similarity_regression": {}})
NO_HEAD = "student.head=none"


def vectors(count, dimension=20, seed=0):
    """Unit vectors in a cone, some near each other, as sentences are."""
    random = np.random.default_rng(seed)
    topics = np.random.default_rng(9).normal(size=(12, dimension)) * np.linspace(2, 0.3, dimension)
    chosen = topics[random.integers(0, 12, count)]
    return unit_rows(chosen + 0.5 * random.normal(size=(count, dimension)) + 0.3)


def svd_basis(units, width):
    """Slowly: the leading right singular vectors, without centring (D, k)."""
    return np.linalg.svd(units.astype(np.float64), full_matrices=False)[2][:width].T


def products(factors):
    factors = np.asarray(factors, np.float64)
    return factors @ factors.T


@pytest.mark.parametrize("width", [1, 5, 19])
def test_reduced_products_are_those_of_a_slow_svd(width):
    fit, held_out = vectors(300), vectors(60, seed=1)
    basis, _ = fitted_basis(fit, held_out, width)
    assert basis.shape == (20, width) and basis.dtype == np.float32
    np.testing.assert_allclose(basis.T @ basis, np.eye(width), atol=1e-5)
    factors = reduced(held_out, basis)
    assert factors.shape == (60, width) and factors.dtype == np.float16
    expected = held_out @ svd_basis(fit, width)
    np.testing.assert_allclose(products(factors), products(expected), atol=2e-3)


def test_the_figures_are_those_of_the_factors_that_are_stored():
    fit, held_out = vectors(300), vectors(60, seed=1)
    basis, figures = fitted_basis(fit, held_out, 6)
    stored = reduced(held_out, basis).astype(np.float64)
    pairs = [(i, j) for i in range(60) for j in range(i)]
    truth = np.array([held_out[i] @ held_out[j] for i, j in pairs])
    off = np.array([stored[i] @ stored[j] for i, j in pairs]) - truth
    near = truth >= 0.5
    assert 10 < near.sum() < len(pairs) - 10
    assert figures["error"]["rmse"] == pytest.approx(np.sqrt((off**2).mean()), rel=1e-3)
    assert figures["error"]["max"] == pytest.approx(np.abs(off).max(), rel=1e-3)
    assert figures["near_pairs"] == near.sum()
    assert figures["near_rmse"] == pytest.approx(np.sqrt((off[near] ** 2).mean()), rel=1e-3)
    kept = np.mean([row @ row for row in stored])
    assert figures["variance_kept"] == pytest.approx(kept, rel=1e-4)
    assert (figures["dimensions"], figures["fit_rows"], figures["held_out_rows"]) == (20, 300, 60)
    said = in_words(figures)
    assert said.startswith(f"6 of 20 dimensions keep {kept:.2%} of the variance; cosines of 1,770")
    assert f"rmse {figures['near_rmse']:.4f} on the {near.sum():,} with a cosine of 0.5" in said


def test_wider_errs_less_and_full_width_not_at_all():
    """But for the rounding to fp16."""
    fit, held_out = vectors(400), vectors(80, seed=1)
    figures = [fitted_basis(fit, held_out, width)[1] for width in (2, 5, 10, 15, 20)]
    for name in ("rmse", "max"):
        errors = [one["error"][name] for one in figures]
        assert errors == sorted(errors, reverse=True)
        assert errors[-1] < 1e-3 < errors[-2]
    kept = [one["variance_kept"] for one in figures]
    assert kept == sorted(kept) and kept[-1] == pytest.approx(1, abs=1e-3)


def test_no_near_pair_is_said():
    apart = np.eye(20, dtype=np.float32)
    assert "no pair has a cosine of 0.5 or more" in in_words(fitted_basis(apart, apart, 5)[1])


def test_the_sample_is_bounded_and_a_function_of_the_number_of_sentences():
    fit, held_out = sample_rows(100_000, 256, "teachers[0]")
    assert (len(fit), len(held_out)) == (8192, 4096)
    assert not {*fit.tolist()} & {*held_out.tolist()}
    np.testing.assert_array_equal(fit, sample_rows(100_000, 64, "teachers[1]")[0])
    assert [len(rows) for rows in sample_rows(300, 9, "teachers[0]")] == [270, 30]


@pytest.mark.parametrize(
    ("num_rows", "width", "message"),
    [(19, 4, r"teachers\[1\].factor_width: with 19 sentences no two are left to measure"),
     (300, 270, r"teachers\[1\].factor_width is 270, but only 270 sentences can be sampled")],
)  # fmt: skip
def test_too_few_sentences(num_rows, width, message):
    with pytest.raises(UserError, match=message):
        sample_rows(num_rows, width, "teachers[1]")


@pytest.fixture
def recipe_of(tiny_recipe, tmp_path):
    """The tiny recipe with one teacher, read."""

    def build(teacher, *overrides):
        raw = tiny_recipe(setting("teachers", [teacher]), COSINES, NO_HEAD, *overrides)
        return load_recipe(write_recipe(tmp_path / "recipe.yaml", raw))

    return build


def opened(recipe, node):
    plan = make_plan(recipe)
    return plan.store.open(plan.folders[node])


def stored_factors(artifact):
    return np.concatenate([np.load(path) for path in artifact.shard_paths("factors.npy")])


def sentences_of(recipe):
    paths = opened(recipe, "sentences").shard_paths("rows.parquet")
    return [text for path in paths for text in pq.read_table(path)["text"].to_pylist()]


def check_factors(recipe, node, units, width):
    """Basis, figures and factors of a run against a slow twin that has all unit vectors."""
    name = node.partition(":")[2]
    fit, held_out = sample_rows(len(units), width, "")
    basis = opened(recipe, f"basis:{name}")
    expected = units @ svd_basis(units[fit], width)
    found = stored_factors(opened(recipe, node))
    assert found.shape == (len(units), width) and found.dtype == np.float16
    np.testing.assert_allclose(products(found), products(expected), atol=3e-3)
    off = (products(expected) - products(units))[np.ix_(held_out, held_out)]
    off = off[np.triu_indices(len(held_out), 1)]
    assert basis.stats["error"]["rmse"] == pytest.approx(np.sqrt((off**2).mean()), abs=1e-3)
    assert basis.stats["dimensions"] == units.shape[1]
    return basis


def test_a_student_learns_from_reduced_vectors(recipe_of, teacher_folder, tmp_path):
    """A whole run in this process; full width is nowhere but in the basis."""
    teacher = {"name": "t", "model": str(teacher_folder), "pooling": "mean", "max_length": 32}
    recipe = recipe_of(
        teacher | {"factor_width": 6}, "evaluate.speed=false",
        setting("train.objectives", {"similarity_regression": {}, "vector_regression": {}}),
    )  # fmt: skip
    assert "+ basis:t" in plan_text(make_plan(recipe))
    made = make_here(recipe)
    assert made.index("basis:t") < made.index("embed:t") < made.index("train")
    settings = EncoderSettings(model=str(teacher_folder), pooling="mean", max_length=32)
    units = Embedder(settings).units(sentences_of(recipe))
    basis = check_factors(recipe, "embed:t", units, 6)
    shapes = {path: np.load(path).shape for path in (tmp_path / "runs").rglob("*.npy")}
    (wide,) = [path for path, shape in shapes.items() if 48 in shape]
    assert wide.name.startswith("basis.") and shapes[wide] == (48, 6)
    line = in_words(basis.stats)
    assert f"  {line}" in show(basis.folder, recipe.storage, 3).splitlines()
    stage = make_plan(recipe).graph["basis:t"].stage
    assert stage.report(basis) == {"Factors of t": f"Its vectors were reduced: {line}."}
    factors = FactorRows(opened(recipe, "embed:t").shard_paths("factors.npy"), 150)
    taken = factors.take(np.arange(9))
    lengths = np.linalg.norm(taken, axis=1)
    assert (lengths < 0.999).all()  # as they were stored, not scaled back
    assert "train" in made


def test_whole_vectors_have_the_fingerprint_that_they_had(recipe_of, teacher_folder):
    teacher = {"name": "t", "model": str(teacher_folder), "pooling": "mean"}
    whole, narrow, narrower = (
        make_plan(recipe_of(teacher | more)).graph
        for more in ({"factor_width": None}, {"factor_width": 8}, {"factor_width": 7})
    )
    assert "basis:t" not in whole
    assert not [key for key in whole["embed:t"].identity if "factor" in key]
    prints = {graph["embed:t"].fingerprint for graph in (whole, narrow, narrower)}
    assert len(prints) == 3
    assert narrow["basis:t"].identity["factor_width"] == 8


def test_vectors_from_a_file_are_reduced(recipe_of, tmp_path, monkeypatch):
    """In any order, with others among them; they wait in a file of reduced width."""
    monkeypatch.setattr(given, "BATCH_ROWS", 64)
    monkeypatch.setattr(basis_module, "FIT_ROWS", 150)
    shapes = []
    empty = given._empty_matrix
    monkeypatch.setattr(
        given, "_empty_matrix", lambda file, shape: shapes.append(shape) or empty(file, shape)
    )
    files = {"path": str(tmp_path / "v.npy"), "sentences": str(tmp_path / "v.txt")}
    np.save(files["path"], vectors(1))
    (tmp_path / "v.txt").write_text("x\n")
    teacher = {"name": "g", "vectors": files, "factor_width": 5}
    make_here(recipe_of(teacher), "sentences")
    texts = sentences_of(recipe_of(teacher))
    units = vectors(len(texts))
    order = np.random.default_rng(1).permutation(len(texts))
    lines = [*(texts[row] for row in order), "Of no corpus.", texts[3]]
    np.save(files["path"], np.concatenate([7 * units[order], units[:1], -units[3:4]]))
    (tmp_path / "v.txt").write_text("\n".join(lines) + "\n")
    recipe = recipe_of(teacher)
    assert make_here(recipe, "vectors:g") == ["basis:g", "vectors:g"]
    check_factors(recipe, "vectors:g", units, 5)
    assert shapes == [(len(texts), 5)]
    figures = opened(recipe, "vectors:g").stats
    assert figures["rows_left_out"] == figures["rows_twice"] == 1
    # one that is not in the sample: said before anything is reduced
    fit, held_out = sample_rows(len(texts), 5, "")
    lost = min({*range(len(texts))} - {*fit.tolist(), *held_out.tolist()})
    np.save(files["path"], np.delete(units, lost, axis=0))
    (tmp_path / "v.txt").write_text("\n".join(texts[:lost] + texts[lost + 1 :]) + "\n")
    with pytest.raises(UserError, match=f"has no vector for 1 of 300 sentences.*{lost}"):
        make_here(recipe_of(teacher), "basis:g")


def far(server, **more):
    endpoint = {"model": "m", "base_url": server.url, "key_variable": None, "batch_size": 32}
    budget = more.pop("endpoint", {})
    return {"name": "far", "endpoint": endpoint | budget, "factor_width": 4} | more


def small_sample(monkeypatch):
    """100 sentences to learn from and 20 held out, of 300: four requests of 32, and six more."""
    monkeypatch.setattr(basis_module, "FIT_ROWS", 100)
    monkeypatch.setattr(basis_module, "HELD_OUT_ROWS", 20)


def test_an_endpoint_is_asked_once_for_each_sentence(recipe_of, serve, monkeypatch):
    small_sample(monkeypatch)
    server = serve()
    recipe = recipe_of(far(server))
    make_here(recipe, "basis:far")
    assert len(server.bodies) == 4 and len(server.answered) == 120
    texts = sentences_of(recipe)
    places = sorted([texts.index(text) for text in body["input"]] for body in server.bodies)
    asked = [place for batch in places for place in batch]
    assert asked == sorted(asked)  # as the journal is read again
    make_here(recipe, "endpoint:far")
    assert set(server.answered) == set(texts) and set(server.answered.values()) == {1}
    assert len(server.bodies) == 10
    check_factors(recipe, "endpoint:far", unit_rows(made_up(texts)), 4)
    # the factors' bill has the sample's in it
    assert opened(recipe, "basis:far").stats["requests"] == 4
    figures = opened(recipe, "endpoint:far").stats
    assert (figures["requests"], figures["prompt_tokens"]) == (10, 1500)
    # another width is paid for already
    make_here(recipe_of(far(server, factor_width=3)), "endpoint:far")
    assert len(server.bodies) == 10


def test_a_budget_counts_the_sample_too(recipe_of, serve, monkeypatch):
    small_sample(monkeypatch)
    server = serve()
    recipe = recipe_of(far(server, endpoint={"budget": {"max_requests": 7}}))
    with pytest.raises(UserError, match="budget.max_requests is reached"):
        make_here(recipe, "endpoint:far")
    assert len(server.bodies) == 7


def narrower(answer):
    return answer | {"data": [row | {"embedding": [0.5] * 6} for row in answer["data"]]}


def test_another_width_behind_the_name_is_noticed(recipe_of, serve, tmp_path, monkeypatch):
    small_sample(monkeypatch)
    server = serve(lambda texts, nth, total: Reply(change=narrower if total > 4 else None))
    recipe = recipe_of(far(server))
    make_here(recipe, "basis:far")
    shutil.rmtree(tmp_path / "runs" / "embeddings")  # the basis itself says how wide they were
    with pytest.raises(UserError, match="gives vectors of 6 dimensions, after some of 8"):
        make_here(recipe, "endpoint:far")


def test_another_width_after_some_shards_are_finished_is_noticed(recipe_of, serve):
    """Also where no answer of a shard that is missing is in the journal."""
    server = serve(lambda texts, nth, total: Reply(change=narrower if total > 4 else None))
    one_at_a_time = {"concurrency": 1, "batch_size": 25}
    for budget, message in ({"max_requests": 4}, "max_requests is reached"), ({}, "of 6 .* of 8"):
        teacher = far(server, endpoint=one_at_a_time | {"budget": budget}, factor_width=None)
        with pytest.raises(UserError, match=message):
            make_here(recipe_of(teacher, "sentences.rows_per_shard=50"), "endpoint:far")


NOTHING_SAVED = r"teachers\[0\].factor_width is {}, but the vectors of teacher '{}' have {} dim"


def test_a_width_that_saves_nothing_is_refused_before_anything_is_made(
    recipe_of, serve, teacher_folder, tmp_path
):
    np.save(tmp_path / "v.npy", vectors(2))
    (tmp_path / "v.txt").write_text("a\nb\n")
    files = {"path": str(tmp_path / "v.npy"), "sentences": str(tmp_path / "v.txt")}
    model = {"name": "t", "model": str(teacher_folder), "pooling": "mean", "max_length": 9}
    server = serve()
    for teacher, width in (
        (model | {"factor_width": 48}, 48),
        ({"name": "g", "vectors": files, "factor_width": 21}, 20),
        (far(server, endpoint={"dimensions": WIDTH}, factor_width=8), 8),
    ):
        asked, name = teacher["factor_width"], teacher["name"]
        with pytest.raises(UserError, match=NOTHING_SAVED.format(asked, name, width)):
            make_here(recipe_of(teacher))
    assert not server.bodies and not (tmp_path / "runs").exists()


def test_a_width_that_only_vectors_tell_is_refused_with_the_first(
    recipe_of, serve, tmp_path, monkeypatch
):
    server = serve()
    with pytest.raises(UserError, match=NOTHING_SAVED.format(9, "far", 8)):
        make_here(recipe_of(far(server, endpoint={"concurrency": 1}, factor_width=9)), "basis:far")
    assert 1 <= len(server.bodies) <= 3
    folder = make_pipeline(tmp_path / "model", pooling("mean"), dense(16), normalize)
    monkeypatch.setattr(Embedder, "units", None)  # before a sentence is embedded
    teacher = {"name": "t", "model": str(folder), "factor_width": 20, "max_length": 9}
    with pytest.raises(UserError, match=NOTHING_SAVED.format(20, "t", 16)):
        make_here(recipe_of(teacher), "basis:t")


@pytest.mark.parametrize(
    ("teacher", "overrides", "message"),
    [
        ({"similarity": "ranks"}, ["ranks={corpus_size: 20}"],
         "factor_width reduces vectors .*similarity: ranks; ranks.dimensions does; leave it out"),
        ({}, ["student.aligned=true", "train.objectives={vector_regression: {}}"],
         r"student.aligned: .* teachers\[0\].factor_width keeps 8 dimensions of it; leave one of"),
        ({"factor_width": 0}, [], "greater than or equal to 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_reduced(recipe_of, teacher_folder, teacher, overrides, message):
    with pytest.raises(UserError, match=message):
        recipe_of({"name": "t", "model": str(teacher_folder), "factor_width": 8} | teacher,
                  *overrides)  # fmt: skip


def test_a_width_without_effect_is_said(recipe_of, teacher_folder):
    teacher = {"name": "t", "model": str(teacher_folder), "factor_width": 8}
    recipe = recipe_of(teacher, setting("train.objectives", {"infonce": {}}))
    assert "basis:t" not in make_plan(recipe).graph
    assert "factor_width has no effect: no objective reads a teacher's vectors" in json.dumps(
        recipe.warnings()
    )
