"""Figures and pictures of a search."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from pipeline.plan.plan import make_plan
from pipeline.recipe.read import dump_recipe
from pipeline.report.figures import Results
from pipeline.run.placement import Machines
from pipeline.run.pools import ProcessSettings
from pipeline.run.runner import finish, record_start
from pipeline.store.artifacts import ArtifactStore
from stages.contract import Workers
from tests.support.here import make_here
from tests.support.trials import RATE, trial
from tune import report, resources
from tune.page import heat_map, importances, write_report
from tune.phases import Outcome
from tune.progress import shown_score
from tune.ranking import own_trials, rank
from tune.settings import SearchSettings
from tune.trials import TrialLog


def outcome_of(search, trials):
    log = TrialLog(search.store.root, search.folder)
    for one in trials:
        log.add(one)
    own = own_trials(search, log)
    ranking = rank(search, own)
    return Outcome(search, own, 0, ranking, [], ranking[0], {1: Results([], [], {})})


def owned(search, rate, score, seed=1, **more):
    values = {RATE: rate, **more}
    work = search.work_of(values, seed)
    curve = [[12, 100.0, score]]
    return trial(work.node.fingerprint, values=values, seed=seed, score=score, curve=curve)


def test_importance_is_of_settings_of_the_space_that_differ(make_search):
    search = make_search({RATE: {"grid": [0.1, 0.2]}}, seeds=[1])
    outside = [owned(search, 0.5 + number / 10, 10.0 * number) for number in range(4)]
    assert importances(outcome_of(search, [*outside, owned(search, 0.1, 5.0)])) == {}
    wide = make_search({RATE: {"uniform": [0.001, 1]}}, seeds=[1], searcher="tpe", trials=9)
    assert importances(outcome_of(wide, outside)) == {RATE: 1.0}


def test_a_dollar_in_a_setting_is_drawn_as_it_is(make_search):
    key = "student.prompt"
    search = make_search({RATE: {"grid": [0.1]}}, seeds=[1])
    outcome = outcome_of(search, [owned(search, 0.1, 5.0)])
    trials = [replace(outcome.trials[0], values={RATE: 0.1, key: "$x_{$ [X]"})]
    assert "$x_{$" in heat_map(replace(outcome, trials=trials), RATE, key)


def test_what_a_training_warned_of_is_said_of_the_best(make_search, monkeypatch):
    search = make_search({RATE: {"grid": [0.1]}}, seeds=[1])
    outcome = outcome_of(search, [owned(search, 0.1, 5.0)])
    monkeypatch.setattr(report, "_tests", lambda outcome: [])
    assert "WARNING" not in report.outcome_text(outcome)
    kept = {outcome.best.trials[0].folder: SimpleNamespace(stats={"warning": "hardly agree"})}
    monkeypatch.setattr(ArtifactStore, "manifest", lambda store, folder: kept.get(folder))
    assert "\nWARNING: hardly agree\n" in report.outcome_text(outcome)


def test_the_page_of_the_best_ones_run_shows_what_settings_do(make_search, monkeypatch):
    """And of no other training's, nor of another run of it."""
    monkeypatch.setattr(report, "_tests", lambda outcome: [])
    search = make_search({RATE: {"grid": [0.001, 0.002]}}, seeds=[1])
    outcome = outcome_of(search, [owned(search, 0.001, 5.0), owned(search, 0.002, 6.0)])
    root, recipe = search.store.root, search.best_recipe({RATE: 0.002}, 1)
    root.write(f"{search.folder}/best.yaml", dump_recipe(recipe).encode())

    def page_of(recipe):
        make_here(recipe)
        plan = make_plan(recipe)
        record = record_start(plan)
        finish(plan, record)
        return f"{record}/report.html"

    of_the_run, heading = page_of(recipe), f"Each setting: search {search.name}".encode()
    assert heading not in root.read(of_the_run)
    write_report(outcome)
    assert heading in root.read(of_the_run) and b"Each setting" in root.read(
        f"{search.folder}/report.html"
    )
    tests = recipe.evaluate.model_copy(update={"num_bootstrap": 5})
    other_tests = page_of(recipe.model_copy(update={"evaluate": tests}))
    before = root.read(other_tests)
    assert heading in before
    write_report(outcome)
    assert root.read(other_tests) == before
    train = recipe.train.model_copy(update={"seed": 7})
    assert heading not in root.read(page_of(recipe.model_copy(update={"train": train})))


def test_it_is_said_of_how_many_seeds_a_score_is_where_some_are_lacking(make_search, monkeypatch):
    monkeypatch.setattr(report, "_tests", lambda outcome: [])
    search = make_search({RATE: {"grid": [0.1, 0.2]}}, seeds=[1, 2])
    whole = [owned(search, 0.1, 50.0), owned(search, 0.1, 52.0, seed=2)]
    text = report.outcome_text(outcome_of(search, [*whole, owned(search, 0.2, 60.0)]))
    first, second = (line for line in text.splitlines() if line.startswith(("1", "2")))
    assert first.endswith("51.00 ± 1.41") and second.endswith("60.00 (1 of 2 seeds)")
    assert "Best: learning_rate 0.1, 51.00 ± 1.41." in text


@pytest.mark.parametrize(("gpus", "share"), [(None, 1.0), (0, 0.0), (1, 1.0)])
def test_a_trial_takes_a_gpu_where_there_is_one_unless_it_is_to_take_none(monkeypatch, gpus, share):
    machines = Machines("here", [(4, 2)], {}, ProcessSettings())
    monkeypatch.setattr(resources, "machines_for", lambda *_: machines)
    settings = SearchSettings.model_validate({"space": {RATE: {"grid": [0.1]}}})
    work = SimpleNamespace(node=SimpleNamespace(stage=None), name="train", pools={})
    found = resources._one_device(settings, Workers(1, None, gpus, False), work)
    assert found.resources == {"CPU": 1, "GPU": share}


def test_scores_are_shown_with_the_digits_they_need():
    assert [shown_score(value) for value in (76.034, 0.00123, 3.14159)] == ["76.03", "0.00123",
                                                                             "3.142"]  # fmt: skip
