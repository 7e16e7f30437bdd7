"""Several seeds of one recipe: a training each, means and spread in the table."""

import json
import math
import statistics
from types import SimpleNamespace

import numpy as np
import pytest

from pipeline.plan.plan import make_plan
from pipeline.recipe.read import read_recipe
from pipeline.report.differences import differences, means_of, resampled_of
from pipeline.report.figures import Results, averages, collect, collect_from, mean_over_seeds
from pipeline.report.table import results_rows, results_table
from pipeline.run.runner import finish, record_start
from stages.contract import EncoderLabel, Figure, Measurement, measured
from stages.evaluate.resampling import Items
from stages.recipe import Recipe
from tests.support.here import make_here
from tests.support.recipes import tiny
from tune.definition import Search

AFTER, TEACHER = EncoderLabel("after", "after"), EncoderLabel("teacher", "t")


def of_seed(seed, a, b):
    label = EncoderLabel("after", "after", seed=seed)
    figures = [
        Figure(name, value, interval=(value - 1, value + 1), averaged="mean")
        for name, value in (("A", a), ("B", b))
    ]
    return Measurement(label, figures)


def test_means_and_spreads_stand_in_the_table():
    found = mean_over_seeds([of_seed(1, 10.0, 30.0), of_seed(2, 20.0, 32.0)])
    assert found.encoder == AFTER
    lines = results_table(Results([found], [], {})).splitlines()
    assert lines[2].split() == ["student", "after", "15.00", "31.00", "23.00"]
    assert lines[3].split() == ["95%", "interval", "14.0-16.0", "30.0-32.0"]
    spreads = [statistics.stdev(one) for one in ((10, 20), (30, 32), (20, 26))]
    assert lines[4].split() == ["over", "seeds", *(f"±{one:.2f}" for one in spreads)]


def test_a_test_that_not_every_seed_has_is_told(tmp_path):
    """After `--only` of one of its nodes."""
    parts = [of_seed(1, 10.0, 30.0), of_seed(2, 20.0, 32.0)]
    nodes, manifests = {}, {}
    for number, (one, keep) in enumerate(zip(parts, (2, 1), strict=True)):
        for figure in one.figures[:keep]:
            name = f"{figure.name}:{number}"
            nodes[name] = SimpleNamespace(stage=SimpleNamespace(measures=one.encoder))
            stats = measured([Measurement(one.encoder, [figure])])
            manifests[name] = SimpleNamespace(stats=stats)
    store = SimpleNamespace(manifest=manifests.get)
    found = collect_from(store, nodes, {name: name for name in nodes})
    assert found.student["A"].value == 15 and found.student["B"].value == 30
    assert "B: only of seed 1." in found.notes
    assert not any(note.startswith("A: ") for note in found.notes)
    mean = averages(found.student.values())["mean"]
    assert mean.value == 22.5 and not mean.by_seed
    assert "22.50" in results_table(found)


def test_what_is_no_number_is_null_in_files():
    """One pair has no correlation, and JSON has no nan."""
    parts = {"a": math.nan, "b": 3.0}
    figure = Figure("A", math.nan, interval=(math.nan, 1.0), parts=parts)
    other = Figure("B", math.inf)
    text = Results([Measurement(AFTER, [figure, other])], [], {}).json()
    assert "NaN" not in text and "Inf" not in text
    found = Results.read(json.loads(text)).student["A"]
    assert repr(found) == repr(figure)


def test_differences_have_the_unit_of_their_figures():
    """Alignment is no percentage: its items are what it is the mean of."""
    random = np.random.default_rng(0)
    one, other = random.random((2, 50))
    figures = {
        label: [Figure("alignment", float(values.mean()), "lower", decimals=3)]
        for label, values in ((AFTER, one), (TEACHER, other))
    }
    items = {AFTER: {"alignment": [Items("mean", one)]},
             TEACHER: {"alignment": [Items("mean", other)]}}  # fmt: skip
    (row,) = differences(figures, items, AFTER, resampled_of(items[AFTER]))
    (found,) = row.figures
    low, high = found.interval
    assert low < found.value < high < low + 0.5 and found.decimals == 3


def test_differences_are_of_the_means_over_seeds():
    """Slow twin: the same items drawn for all trainings and the teacher."""
    random = np.random.default_rng(0)
    one, two, teacher = random.random((3, 30))
    figures = {
        AFTER: [Figure("A", 50 * (one.mean() + two.mean()), percent=True)],
        TEACHER: [Figure("A", 100 * teacher.mean(), percent=True)],
    }
    items = {
        AFTER: {"A": [Items("mean", one), Items("mean", two)]},
        TEACHER: {"A": [Items("mean", teacher)]},
    }
    (row,) = differences(figures, items, AFTER, resampled_of(items[AFTER]))
    draws, apart = np.random.default_rng(0), []
    for _ in range(1000):
        rows = draws.integers(0, 30, 30)
        apart.append(100 * (teacher[rows].mean() - (one[rows].mean() + two[rows].mean()) / 2))
    assert row.encoder == TEACHER
    assert row.figures[0].interval == pytest.approx(tuple(np.percentile(apart, [2.5, 97.5])))


@pytest.fixture(scope="module")
def raw(tmp_path_factory, teacher_folder, student_folder):
    raw = tiny(tmp_path_factory.mktemp("seeds"), teacher_folder, student_folder)
    raw["evaluate"]["speed"] = False
    return raw


def with_train(raw, **changes):
    return Recipe.model_validate(raw | {"train": raw["train"] | changes})


def test_every_seed_is_the_training_with_that_seed_alone(raw):
    several = make_plan(with_train(raw, seeds=[3, 4]))
    for node, seed in (("train", 3), ("train:seed-4", 4)):
        alone = make_plan(with_train(raw, seed=seed)).graph["train"]
        assert several.graph[node].fingerprint == alone.fingerprint
    assert set(several.graph["export"].inputs.values()) == {"sentences", "train"}


def test_a_recipe_with_seeds_has_their_means(raw):
    recipe = with_train(raw, seeds=[3, 4])
    plan = make_plan(recipe)
    record = record_start(plan)
    make_here(recipe)
    finish(plan, record)
    whole = collect(plan).student["made-up"]
    alone = [collect(make_plan(with_train(raw, seed=seed))).student["made-up"] for seed in (3, 4)]
    assert whole.by_seed == [one.value for one in alone]
    assert whole.value == pytest.approx(statistics.fmean(whole.by_seed))
    assert len(set(whole.by_seed)) == 2
    text = plan.store.root.read(f"{record}/results.json")
    kept = Results.read(json.loads(text))
    assert kept.student["made-up"] == whole
    assert {one.encoder.role for one in kept.differences} == {"before", "teacher"}
    assert "seeds 3, 4" in results_table(kept)
    assert results_table(kept).count("student after ") == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": [3, 3]}, "one of them is there twice"),
        ({"seeds": [3, 4], "seed": 5}, "give seed or seeds, not both"),
        ({"seeds": [-1]}, "greater than or equal to 0"),
    ],
)
def test_bad_seeds(raw, changes, message):
    with pytest.raises(ValueError, match=message):
        with_train(raw, **changes)


def test_a_search_tries_the_first_seed(raw, tmp_path):
    import yaml

    file = tmp_path / "searched.yaml"
    search = {"space": {"train.learning_rate": {"grid": [1e-3, 2e-3]}}}
    train = raw["train"] | {"seeds": [3, 4]}
    file.write_text(yaml.safe_dump(raw | {"train": train, "search": search}))
    found = Search(str(file), [])
    assert found.seeds == [3]
    assert found.recipe_of({"train.learning_rate": 1e-3}, 7).train.of_each_seed[0].seed == 7
    # a population's members change the document that their actors are handed
    changed = found.filled_in().changed({"train.seed": 7}, "")
    assert read_recipe(changed).train.of_each_seed[0].seed == 7


def collected(*labels):
    """What is collected of nodes that all measured a figure A, of these labels, 1, 2, 3, ..."""
    nodes = {f"n{n}": SimpleNamespace(stage=SimpleNamespace(measures=one))
             for n, one in enumerate(labels, start=1)}  # fmt: skip

    def manifest(folder):
        measurement = Measurement(AFTER, [Figure("A", float(folder[1:]))])
        return SimpleNamespace(stats={"measured": [measurement.plain()], "notes": []})

    return collect_from(SimpleNamespace(manifest=manifest), nodes, {name: name for name in nodes})


def test_only_trainings_of_several_seeds_are_put_together():
    seeds = [EncoderLabel("after", "after", seed=seed) for seed in (3, 4)]
    found = collected(*seeds)
    assert [one.figures[0].by_seed for one in found.measurements] == [[1.0, 2.0]]
    assert found.sources == [["n1", "n2"]]
    assert [one.figures[0].value for one in collected(AFTER, AFTER).measurements] == [1.0, 2.0]


def test_a_mean_has_an_interval_where_all_that_it_is_of_is_known():
    """As wide as the standard error of the mean of independent tests says."""
    draws = np.random.default_rng(0)
    values = {name: draws.random((3, 400)) for name in "AB"}  # three seeds
    several = {name: [Items("mean", one) for one in rows] for name, rows in values.items()}
    own = [Figure(name, 100 * float(values[name].mean()), percent=True, averaged="mean")
           for name in "AB"]  # fmt: skip
    assert means_of(own, resampled_of({"A": several["A"]})) == []
    (mean,) = means_of(own, resampled_of(several))
    assert mean.value == pytest.approx(100 * np.mean([values["A"], values["B"]]))
    errors = [100 * values[name].mean(0).std(ddof=1) / 20 for name in "AB"]
    low, high = mean.interval
    assert high - low == pytest.approx(2 * 1.96 * np.hypot(*errors) / 2, rel=0.1)
    assert (low + high) / 2 == pytest.approx(mean.value, abs=0.2)
    results = Results([Measurement(AFTER, own)], [], {}, means=[Measurement(AFTER, [mean])])
    cells = results_rows(Results.read(json.loads(results.json())))[2][1]
    assert cells == ["  95% interval", "", "", f"{low:.1f}-{high:.1f}"]


def test_a_mean_differs_only_where_all_that_it_is_of_is_known():
    random = np.random.default_rng(0)
    one, two = random.random((2, 30))
    figures = {
        label: [Figure(name, 1.0, averaged="mean") for name in names]
        for label, names in ((AFTER, "AB"), (TEACHER, "AB"))
    }
    known = {name: [Items("mean", values)] for name, values in (("A", one), ("B", two))}
    drawn = resampled_of(known)
    rows = differences(figures, {AFTER: known, TEACHER: known}, AFTER, drawn)[0].figures
    assert [row.name for row in rows] == ["A", "B", "mean"]
    figures[TEACHER].append(Figure("C", 1.0, averaged="mean"))
    figures[AFTER].append(Figure("C", 1.0, averaged="mean"))
    rows = differences(figures, {AFTER: known, TEACHER: known}, AFTER, drawn)[0].figures
    assert [row.name for row in rows] == ["A", "B"]
