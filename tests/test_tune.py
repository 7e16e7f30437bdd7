"""Search spaces, bookkeeping and schedulers, without a cluster."""

import datetime
import json
import statistics
from dataclasses import replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from stages.errors import StorageError, UserError
from stages.files import Root
from tune.book import Book
from tune.live import shown_score
from tune.load import Search
from tune.search import Outcome, counted, fresh_seeds, own_trials, rank
from tune.settings import Dimension, SearchSettings
from tune.space import Listed, Space, Tpe, key_of, listed_settings
from tune.trials import Trial, TrialLog, score_of

RATE = "train.learning_rate"
TAU2 = "train.objectives.listnet.student_temperature"
TAU3 = "train.objectives.listnet.teacher_temperature"


def space(**dimensions):
    return Space({name: Dimension(**one) for name, one in dimensions.items()})


@pytest.fixture
def search(tmp_path, tiny_recipe):
    """Builds a search over the tiny recipe; keywords are settings of the search."""

    def build(space, recipe=None, **settings):
        file = tmp_path / "search.yaml"
        whole = (recipe or tiny_recipe()) | {"search": {"space": space, **settings}}
        file.write_text(yaml.safe_dump(whole))
        return Search(str(file))

    return build


def test_a_grid_has_every_combination_once_and_ties_follow():
    grid = list(
        space(b={"tied": "a", "factor": 2}, a={"grid": [0.1, 0.3]}, c={"grid": ["x", None]}).grid()
    )
    assert grid == [
        {"a": 0.1, "c": "x", "b": 0.2}, {"a": 0.1, "c": None, "b": 0.2},
        {"a": 0.3, "c": "x", "b": 0.6}, {"a": 0.3, "c": None, "b": 0.6},
    ]  # fmt: skip


def test_a_setting_that_is_not_searched_costs_no_combinations():
    conditional = space(
        method={"grid": ["listnet", "listmle", "none"]},
        tau={"grid": [1, 2], "when": {"method": ["listnet", "listmle"]}},
        twice={"tied": "tau", "factor": 2},
    )
    grid = list(conditional.grid())
    assert len(grid) == 5 and {"method": "none"} in grid
    assert all(one["twice"] == 2 * one["tau"] for one in grid if "tau" in one)
    drawn = [conditional.random(0, number) for number in range(50)]
    assert {"method": "none"} in drawn
    assert conditional.example("twice") == {"method": "listnet", "tau": 1, "twice": 2}


@given(st.integers(0, 50), st.integers(0, 50))
def test_random_settings_lie_in_their_bounds_and_depend_on_seed_and_number(seed, number):
    whole = space(
        a={"uniform": [-1, 2]}, b={"loguniform": [1e-5, 1e-1]}, c={"integer": [3, 5]},
        d={"choice": ["p", "q"]},
    )  # fmt: skip
    one = whole.random(seed, number)
    assert one == whole.random(seed, number)
    assert -1 <= one["a"] <= 2 and 1e-5 <= one["b"] <= 1e-1
    assert one["c"] in (3, 4, 5) and type(one["c"]) is int and one["d"] in ("p", "q")


def test_random_numbers_are_spread_as_asked():
    whole = space(b={"loguniform": [1e-5, 1e-1]}, c={"integer": [3, 5]})
    drawn = [whole.random(0, number) for number in range(400)]
    below = sum(one["b"] < 1e-3 for one in drawn)
    assert 160 < below < 240  # half lie below the geometric mean
    assert {one["c"] for one in drawn} == {3, 4, 5}


def test_more_trials_begin_with_the_trials_of_fewer():
    few = SearchSettings(space={"a": Dimension(uniform=[0, 1])}, trials=5)
    more = few.model_copy(update={"trials": 9})
    both = Space(few.space)
    assert listed_settings(more, both)[:5] == listed_settings(few, both)


def test_circles_are_refused():
    with pytest.raises(UserError, match="a, b depend on each other"):
        space(a={"tied": "b"}, b={"tied": "a"})


def test_members_of_a_population_stay_within_bounds():
    whole = space(a={"uniform": [1, 2]}, n={"integer": [1, 3]}, b={"tied": "a", "factor": 10})
    assert whole.within({"a": 2.4, "n": 4, "b": 0}) == {"a": 2.0, "n": 3, "b": 20.0}


def tpe_settings(trials, **dimensions):
    return SearchSettings(
        space={name: Dimension(**one) for name, one in dimensions.items()},
        searcher="tpe", trials=trials,
    )  # fmt: skip


def test_tpe_comes_nearer_to_what_it_is_told_is_good():
    settings = tpe_settings(
        40, x={"uniform": [0, 1]}, kind={"choice": ["good", "bad"]},
        extra={"integer": [1, 3], "when": {"kind": "bad"}},
    )  # fmt: skip
    source = Tpe(settings, Space(settings.space), [])
    distances, kinds = [], []
    while (values := source.next()) is not None:
        assert ("extra" in values) == (values["kind"] == "bad")
        distances.append(abs(values["x"] - 0.8))
        kinds.append(values["kind"])
        source.tell(values, 1 - distances[-1] - (values["kind"] == "bad"))
    assert len(distances) == 40 and source.num_left() == 0
    assert statistics.mean(distances[-10:]) < 0.6 * statistics.mean(distances[:10])
    assert kinds[-10:].count("good") >= 8


def test_tpe_goes_on_with_earlier_settings_and_learns_from_them():
    settings = tpe_settings(34, x={"uniform": [0, 1]}, kind={"choice": ["a", "b"]})
    tried = [{"x": i / 30, "kind": "a"} for i in range(30)]
    outside = [{"x": 0.5, "kind": "gone"}, {"x": 5.0, "kind": "a"}]
    outside += [{"x": 0.5}, {"x": 0.5, "kind": "a", "y": 1}]  # other settings
    source = Tpe(settings, Space(settings.space), tried[:15] + outside + tried[15:])
    for values in tried:
        assert source.next() == values
        source.tell(values, -abs(values["x"] - 0.2))
    found = [source.next() for _ in range(4)]
    assert source.next() is None  # 30 of 34 were tried
    assert all(abs(values["x"] - 0.2) < 0.25 for values in found)
    few = Tpe(settings.model_copy(update={"trials": 3}), Space(settings.space), tried)
    assert [few.next() for _ in range(4)] == [*tried[:3], None]


def test_tpe_learns_the_score_of_a_setting_that_is_proposed_again_while_it_runs():
    settings = tpe_settings(3, kind={"choice": ["a"]})
    source = Tpe(settings, Space(settings.space), [])
    first, again = source.next(), source.next()
    assert first == again
    source.tell(again, None)  # a book refuses it
    source.tell(first, 7.0)
    assert [one.value for one in source._study.trials] == [7.0, None]


BAD = [
    ({"space": {"train.lerning_rate": {"grid": [1e-3]}}}, "did you mean 'learning_rate'"),
    ({"space": {RATE: {"grid": []}}}, "line .*grid has no values"),
    ({"space": {RATE: {"uniform": [2, 1]}}}, "the least, 2.0, is not below 1.0"),
    ({"space": {RATE: {"integer": [3, 3]}}}, "is not below"),
    ({"space": {RATE: {"loguniform": [0, 1]}}}, "positive bounds, not 0.0"),
    ({"space": {RATE: {"uniform": [1]}}}, "is \\[least, greatest\\]"),
    ({"space": {RATE: {"gird": [1]}}}, "did you mean 'grid'"),
    ({"space": {RATE: {}}}, "exactly one of grid"),
    ({"space": {RATE: {"grid": [1], "choice": [2]}}}, "exactly one of grid"),
    ({"space": {}}, "search.space"),
    ({"space": {RATE: {"grid": [1e-3, -1]}}}, "greater than 0"),
    ({"space": {RATE: {"uniform": [-1, 1]}}, "trials": 3}, "greater than 0"),
    ({"space": {"train.objectives.rank_regression.low": {"grid": [0.1, 0.2]}}},
     "search.space.train.objectives.rank_regression.low: the recipe has no 'rank_regression'"),
    ({"space": {"teachers.3.weight": {"grid": [1]}}}, "not one of the list's numbers 0 to 0"),
    ({"space": {"train.max_failures": {"grid": [1, 2]}}}, "changes nothing in what training"),
    ({"space": {"evaluate.max_length": {"grid": [32, 48]}}}, "changes nothing in what training"),
    ({"space": {TAU2: {"tied": TAU3}}}, "depends on .*teacher_temperature, which is not another"),
    ({"space": {RATE: {"grid": [1e-3], "when": {"x": 1}}}}, "depends on x"),
    ({"space": {"student.pooling": {"grid": ["mean", "cls"]}, TAU2: {"tied": "student.pooling"}}},
     "no number"),
    ({"space": {RATE: {"uniform": [1, 2]}}}, "needs `trials`"),
    ({"space": {RATE: {"uniform": [1, 2]}}, "searcher": "grid"}, "searcher grid needs lists"),
    ({"space": {RATE: {"grid": [1]}}, "metric": "dev/other"}, "it measures dev_spearman, dev/dev"),
    ({"space": {RATE: {"grid": [1]}}, "metric": "made-up"}, "Test sets .* never take part"),
    ({"space": {RATE: {"grid": [1]}}, "seeds": []}, "search.seeds"),
    ({"space": {RATE: {"grid": [1]}}, "shceduler": "asha"}, "did you mean 'scheduler'"),
    ({"space": {"train.batch_size": {"grid": [16, 32]}}, "scheduler": "population"},
     "train.batch_size cannot change while a student trains"),
    ({"space": {RATE: {"grid": [1]}}, "scheduler": "population", "seeds": [1, 2]},
     "one of `seeds`"),
    ({"space": {RATE: {"grid": [1]}}, "scheduler": "population", "budget": {"steps": 9}},
     "it has no budget"),
    ({"space": {RATE: {"grid": [1]}}, "scheduler": "population", "searcher": "tpe", "trials": 2},
     "tpe proposes none"),
    ({"space": {RATE: {"uniform": [0.1, float("inf")]}}, "trials": 3}, "finite number"),
    ({"space": {RATE: {"grid": [float("nan")]}}}, "a value is a date .*, .nan or .inf"),
    ({"space": {RATE: {"grid": [datetime.date(2026, 1, 1)]}}}, "a value is a date"),
    ({"space": {"train.batch_size": {"integer": [1, 10**20]}}, "trials": 3}, "2.53 are too large"),
    ({"space": {RATE: {"grid": [1], "factor": 2}}}, "factor belongs to tied"),
    ({"space": {RATE: {"grid": [1]}, TAU2: {"grid": [1], "when": {RATE: []}}}}, "never met"),
    ({"space": {RATE: {"grid": [1]}, TAU2: {"grid": [1], "when": {RATE: [1, 2]}}}},
     "train.learning_rate never is 2"),
    ({"space": {"storage": {"grid": ["elsewhere"]}}}, "storage cannot be searched: all trials"),
    ({"space": {"train.seed": {"grid": [1]}}}, "name several `search.seeds`"),
    ({"space": {RATE: {"grid": [1]}}, "seeds": [1, 1]}, "one of them is there twice"),
    ({"space": {"teachers.\u00b2.weight": {"grid": [1]}}}, "not one of the list's numbers"),
]  # fmt: skip


@pytest.mark.parametrize(("section", "message"), BAD)
def test_bad_searches_are_refused_with_the_reason(search, section, message):
    with pytest.raises(UserError, match=message) as caught:
        search(**section)
    assert "search" in str(caught.value)


def test_without_labelled_pairs_there_is_no_dev_score(search, tiny_recipe):
    with pytest.raises(UserError, match="no `train.dev` with labelled pairs"):
        search({RATE: {"grid": [1]}}, recipe=tiny_recipe(train__dev=None))
    search({RATE: {"grid": [1]}}, recipe=tiny_recipe(train__dev=None), metric="loss")


def test_a_search_may_be_a_file_of_its_own(tmp_path, tiny_recipe, monkeypatch):
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(tiny_recipe()))
    section = {"name": "mine", "space": {RATE: {"grid": [1e-3, 1e-2]}}}
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump({"recipe": "base.yaml", "search": section}))
    monkeypatch.chdir(tmp_path.parent)
    found = Search(str(file), ["train.batch_size=32", "search.seeds=[7, 8]"])
    assert (found.name, found.recipe.name, found.seeds) == ("mine", "tiny", [7, 8])
    recipe = found.recipe_of({RATE: 0.01}, 8)
    assert (recipe.train.batch_size, recipe.train.learning_rate, recipe.train.seed) == (32, 0.01, 8)
    file.write_text(yaml.safe_dump({"recipe": "base.yaml", "search": section, "train": {}}))
    with pytest.raises(UserError, match="nothing but `search` beside it"):
        Search(str(file))
    with pytest.raises(UserError, match="no `search` section"):
        Search(str(tmp_path / "base.yaml"))


def test_what_trials_read_is_prepared_for_all_of_them(search):
    listed = search({"student.max_length": {"grid": [8, 16]}, RATE: {"grid": [1e-3, 1e-2]}})
    assert sorted(r.student.max_length for r in listed.preparations()) == [8, 16]
    chosen = search(
        {"student.max_length": {"choice": [8, 12, 16]}, RATE: {"loguniform": [1e-4, 1e-2]}},
        searcher="tpe", trials=4,
    )  # fmt: skip
    assert sorted(r.student.max_length for r in chosen.preparations()) == [8, 12, 16]
    ranges = search({"student.max_length": {"integer": [8, 16]}}, searcher="tpe", trials=4)
    with pytest.raises(UserError, match="student.max_length changes what is made before training"):
        ranges.preparations()


def test_what_a_setting_that_needs_preparing_depends_on_is_prepared_too(search):
    lengths = {"student.max_length": {"choice": [8, 16], "when": {"train.batch_size": 16}}}
    found = search(lengths | {"train.batch_size": {"choice": [16, 32]}}, searcher="tpe", trials=4)
    assert sorted(r.student.max_length for r in found.preparations()) == [8, 16]
    tied = {"student.max_length": {"tied": "train.batch_size", "factor": 0.5}}
    found = search(tied | {"train.batch_size": {"choice": [16, 32]}}, searcher="tpe", trials=4)
    assert sorted(r.student.max_length for r in found.preparations()) == [8, 16]
    # an end that the recipe's own value refuses is no reason to refuse the search
    low = "train.objectives.soft_negative.low"
    recipe = search({RATE: {"grid": [1]}}).recipe.model_dump(mode="json")
    recipe["train"]["objectives"]["soft_negative"] = {"low": 0.1, "high": 0.3}
    bounds = {low: {"uniform": [0.05, 0.5]}}
    assert len(search(bounds, recipe=recipe, searcher="tpe", trials=3).preparations()) == 1


def trial(fingerprint, **changes):
    fields = {
        "fingerprint": fingerprint, "folder": f"train/{fingerprint}", "phase": "search",
        "values": {RATE: 0.1}, "seed": 1, "status": "finished", "metric": "dev_spearman",
        "score": 50.0,
    }  # fmt: skip
    return Trial(**(fields | changes))


def test_trials_survive_a_torn_line(tmp_path):
    root = Root(str(tmp_path))
    log = TrialLog(root, "tune/x")
    log.add(trial("a", reason="Grüße"))
    log.add(trial("b"))
    file = tmp_path / "tune/x/trials.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    again = TrialLog(root, "tune/x")
    assert [one.fingerprint for one in again] == ["a"]
    again.add(trial("b", score=51.0))
    again.add(trial("a", score=52.0))
    last = TrialLog(root, "tune/x")
    assert {one.fingerprint: one.score for one in last} == {"a": 52.0, "b": 51.0}
    assert json.loads(file.read_text().splitlines()[-1])["fingerprint"] == "a"


def test_the_score_is_that_of_the_chosen_checkpoint():
    curve = [[5, 25, 70.0], [10, 50, 74.0], [20, 100, 72.0]]
    assert score_of(curve, "dev_spearman", 10) == 74.0
    assert score_of(curve, "loss", 10) == 72.0
    assert score_of([], "loss", 10) is None


def play(book, results):
    """Runs a book with made-up ends of trials; returns what ran, in order."""
    ran = []
    while (started := book.next()) is not None:
        name = (started.values[RATE], started.seed)
        ran.append(name)
        facts = results.get(name, {"status": "finished", "score": 50.0})
        book.end(started.job.node.fingerprint, steps=12, **facts)
    return ran


@pytest.fixture
def three_rates(search):
    found = search({RATE: {"grid": [0.1, 0.2, 0.3]}}, seeds=[1, 2, 3])

    def book(log, **more):
        return Book(found, log, Listed(list(found.space.grid())), found.seeds, "search", **more)

    return found, book


def test_only_settings_that_finish_get_their_other_seeds(three_rates, tmp_path):
    found, new_book = three_rates
    log = TrialLog(found.store.root, found.folder)
    ends = {
        (0.2, 1): {"status": "stopped", "score": 20.0},
        (0.3, 2): {"status": "failed", "reason": "loss is nan"},
    }
    ran = play(new_book(log), ends)
    assert sorted(ran) == [(0.1, 1), (0.1, 2), (0.1, 3), (0.2, 1), (0.3, 1), (0.3, 2), (0.3, 3)]
    ranking = rank(found, own_trials(found, log)[0])
    assert [one.values[RATE] for one in ranking] == [0.1]

    again = TrialLog(found.store.root, found.folder)
    assert play(new_book(again), {}) == []  # all of it is known
    assert not new_book(again).has_work()


def test_what_the_machine_did_is_tried_again_and_what_the_setting_did_is_not(three_rates):
    found, new_book = three_rates
    log = TrialLog(found.store.root, found.folder)
    died = {"status": "failed", "reason": "its process died", "mendable": True}
    nan = {"status": "failed", "reason": "loss is nan"}
    play(new_book(log), {(0.1, 1): died, (0.2, 1): nan})
    assert play(new_book(log), {}) == [(0.1, 1), (0.1, 2), (0.1, 3)]


def test_nothing_begins_once_the_budget_is_spent(three_rates):
    found, new_book = three_rates
    log = TrialLog(found.store.root, found.folder)
    spent = lambda: sum(one.steps for one in log) < 24  # noqa: E731
    assert len(play(new_book(log, may_start=spent), {})) == 2
    assert len(play(new_book(log), {})) == 7


def test_a_bad_combination_is_a_failed_trial_and_the_rest_go_on(search):
    low, high = "train.objectives.soft_negative.low", "train.objectives.soft_negative.high"
    section = {"train.objectives.soft_negative": {"grid": [None, {}]}}
    bounds = {low: {"grid": [0.1, 0.5]}, high: {"grid": [0.2, 0.6]}}
    found = search({**bounds, **section, RATE: {"grid": [1]}})
    assert len(list(found.space.grid())) == 5  # without the section there are no bounds
    log = TrialLog(found.store.root, found.folder)
    book = Book(found, log, Listed(list(found.space.grid())), [1], "search")
    assert len(play(book, {})) == 4
    (failed,) = [one for one in log if one.status == "failed"]
    assert "low 0.5 (alpha) is above high 0.2" in failed.reason and found.owns(failed)


def test_trials_of_another_state_of_the_recipe_are_left_out(three_rates, search, tiny_recipe):
    found, new_book = three_rates
    log = TrialLog(found.store.root, found.folder)
    play(new_book(log), {})
    longer = search(
        {RATE: {"grid": [0.1]}}, recipe=tiny_recipe(train__max_steps=99), seeds=[1, 2, 3]
    )
    assert own_trials(longer, log) == ([], 9)
    wider = search({RATE: {"grid": [0.1, 0.4]}, TAU3: {"grid": [0.0125]}}, seeds=[1])
    assert len(own_trials(wider, log)[0]) == 9  # another space of the same recipe
    other_metric = search({RATE: {"grid": [0.1]}}, metric="loss")
    assert own_trials(other_metric, log) == ([], 9)


def test_settings_are_the_same_however_they_are_written(search):
    narrow = search({RATE: {"grid": [0.1]}}, seeds=[1])
    log = TrialLog(narrow.store.root, narrow.folder)
    play(Book(narrow, log, Listed([{RATE: 0.1}]), [1], "search"), {})
    wide = search({RATE: {"grid": [0.1]}, TAU3: {"grid": [0.0125, 0.05]}}, seeds=[1, 2])
    book = Book(wide, log, Listed(listed_settings(wide.settings, wide.space)), [1, 2], "search")
    assert sorted(play(book, {})) == [(0.1, 1), (0.1, 2), (0.1, 2)]  # one of four was known
    ranking = rank(wide, own_trials(wide, log)[0])
    assert [len(one.scores) for one in ranking] == [2, 2]
    assert all(one.values.keys() == {RATE, TAU3} for one in ranking)
    whole = search({"teachers.0.weight": {"grid": [1, 1.0]}})
    book = Book(whole, log, Listed(list(whole.space.grid())), [1], "search")
    assert book.next() is not None and book.next() is None


def test_fresh_seeds_had_no_part_in_choosing(search):
    few = search({RATE: {"grid": [0.1]}}, seeds=[1], confirm={"seeds": 2})
    trials = [trial("a", seed=3), trial("b", seed=7, phase="confirm")]
    assert fresh_seeds(few, trials) == [4, 5]
    assert fresh_seeds(few, []) == [2, 3]
    assert [one.seed for one in counted(few, [*trials, trial("c", seed=1)])] == [1]


def test_what_was_stopped_by_another_rule_is_tried_again(search):
    asha = search({RATE: {"grid": [0.1]}})
    log = TrialLog(asha.store.root, asha.folder)
    stopped = {(0.1, 42): {"status": "stopped", "score": 20.0}}
    tried = lambda found: play(Book(found, log, Listed([{RATE: 0.1}]), [42], "search"), stopped)  # noqa: E731
    assert tried(asha) == [(0.1, 42)] and tried(asha) == []
    assert tried(search({RATE: {"grid": [0.1]}}, direction="minimum")) == [(0.1, 42)]
    assert tried(search({RATE: {"grid": [0.1]}}, scheduler="none")) == [(0.1, 42)]


def test_a_killed_search_knows_what_had_begun(three_rates):
    found, new_book = three_rates
    log = TrialLog(found.store.root, found.folder)
    book = new_book(log)
    assert book.has_work() and log.begun() == []  # not handed out yet
    first, second = book.next(), book.next()
    assert book.num_left() == 9
    book.end(first.job.node.fingerprint, status="finished", score=1.0)
    again = TrialLog(found.store.root, found.folder)
    assert [one.values for one in again.begun()] == [second.values] and len(list(again)) == 1
    assert book.may_be_stopped(1) and not book.may_be_stopped(2)


def test_only_the_best_settings_keep_weights(search):
    from tune.search import _Keeper

    found = search({RATE: {"grid": [0.1, 0.2]}}, seeds=[1, 2], keep=1)
    log = TrialLog(found.store.root, found.folder)
    scores = {(0.1, 1): 80.0, (0.1, 2): 60.0, (0.2, 1): 75.0, (0.2, 2): 74.0, (0.3, 1): 10.0}
    trials = []
    for (rate, seed), score in scores.items():
        job = found.job_of({RATE: rate}, seed)
        job.publish({"search": found.name}, [])
        name = job.node.fingerprint
        one = trial(name, folder=job.folder, values={RATE: rate}, seed=seed, score=score)
        trials.append(one)
        log.add(one)
    used = {"train": {"folder": trials[4].folder, "settings": {}}}
    found.store.root.write("history/other/1/run.json", json.dumps(used).encode())
    _Keeper(found, log)
    left = [found.store.manifest(one.folder) is not None for one in trials]
    assert left == [False, False, True, True, True]  # the mean of 0.2 is the best; 0.3 is in use


def test_one_search_runs_once(tmp_path):
    with Root(str(tmp_path)).held("tune/x/lock", "search x"):
        with (
            pytest.raises(UserError, match="search x is running already"),
            Root(str(tmp_path)).held("tune/x/lock", "search x"),
        ):
            pass
    with Root(str(tmp_path)).held("tune/x/lock", "search x"):
        pass


def actor_of(found, rows, **settings):
    """A trial's actor, without Ray, whose training gives these rows."""
    from tune.actor import Assignment, TrialActor

    job = found.job_of({RATE: 0.1}, 1)
    assignment = Assignment(job, job, {RATE: 0.1}, "dev_spearman", "x", **settings)
    actor = TrialActor.__new__(TrialActor)
    actor._free_since = 0.0
    actor._take({"assignment": assignment})
    actor._rows = rows
    return actor


def test_an_actor_tells_tune_what_may_be_judged(search):
    def row(step, **more):
        return {"step": step, "num_steps": 4, "last": False, **more}

    found = search({RATE: {"grid": [0.1]}})
    rows = [row(1), row(2, dev_spearman=float("nan")), row(3, dev_spearman=5.0)]
    judged = actor_of(found, iter(rows)).step()
    assert (judged["value"], judged["progress"], judged["judged"]) == (5.0, 75.0, 75.0)
    other_seed = actor_of(found, iter(rows), may_be_stopped=False).step()
    assert other_seed["progress"] == 75.0 and "judged" not in other_seed


@pytest.mark.parametrize(
    ("error", "mendable"),
    [(UserError("the loss became nan"), False), (StorageError("disk full"), True),
     (RuntimeError("out of memory"), True)],
)  # fmt: skip
def test_what_the_storage_did_is_tried_again(search, error, mendable):
    def rows():
        raise error
        yield

    failed = actor_of(search({RATE: {"grid": [0.1]}}), rows()).step()
    assert failed["done"] and failed["mendable"] is mendable and str(error) in failed["reason"]


def test_a_population_makes_no_change_that_the_recipe_refuses(search):
    from tune.controller import _Population

    low, high = "train.objectives.soft_negative.low", "train.objectives.soft_negative.high"
    recipe = search({RATE: {"grid": [1]}}).recipe.model_dump(mode="json")
    recipe["train"]["objectives"]["soft_negative"] = {"low": 0.1, "high": 0.3}
    bounds = {low: {"uniform": [0.0, 0.9]}, high: {"uniform": [0.1, 1.0]}}
    found = search(bounds, recipe=recipe, scheduler="population", trials=2)
    mutations = {low: lambda: 0.8, high: lambda: 0.2}
    scheduler = _Population(
        found, time_attr="judged", metric="value", mode="max", hyperparam_mutations=mutations,
        resample_probability=1.0,
    )  # fmt: skip
    donor = replace_config(trial("a"), {low: 0.3, high: 0.6})
    assert scheduler._get_new_config(None, donor)[0] == {low: 0.3, high: 0.6}
    scheduler._hyperparam_mutations = {low: lambda: 0.1}
    assert scheduler._get_new_config(None, donor)[0] == {low: 0.1, high: 0.6}


def replace_config(one, config):
    from types import SimpleNamespace

    return SimpleNamespace(trial_id=one.fingerprint, config=config)


def outcome_of(found, trials):
    log = TrialLog(found.store.root, found.folder)
    for one in trials:
        log.add(one)
    own = own_trials(found, log)[0]
    ranking = rank(found, own)
    evaluations = {"before": {"sts": {}}, "after": {"sts": {}}}
    return Outcome(found, own, 0, ranking, [], ranking[0], {1: {"evaluations": evaluations}})


def owned(found, rate, score, **more):
    values = {RATE: rate, **more}
    job = found.job_of(values, 1)
    curve = [[12, 100.0, score]]
    return trial(job.node.fingerprint, values=values, score=score, curve=curve)


def test_importance_is_of_settings_of_the_space_that_differ(search):
    from tune.report import importances

    found = search({RATE: {"grid": [0.1, 0.2]}}, seeds=[1])
    outside = [owned(found, 0.5 + number / 10, 10.0 * number) for number in range(4)]
    assert importances(outcome_of(found, [*outside, owned(found, 0.1, 5.0)])) == {}
    wide = search({RATE: {"uniform": [0.001, 1]}}, seeds=[1], searcher="tpe", trials=9)
    assert importances(outcome_of(wide, outside)) == {RATE: 1.0}


def test_a_dollar_in_a_setting_is_drawn_as_it_is(search):
    from tune.report import heat_map

    key = "student.prompt"
    found = search({RATE: {"grid": [0.1]}}, seeds=[1])
    outcome = outcome_of(found, [owned(found, 0.1, 5.0)])
    trials = [replace(outcome.trials[0], values={RATE: 0.1, key: "$x_{$ [X]"})]
    assert "$x_{$" in heat_map(replace(outcome, trials=trials), RATE, key)


def test_numbers_stay_within_their_bounds():
    narrow = Dimension(uniform=[0.99996, 0.99999])
    assert narrow.nearest(0.999973) == 0.99999 and narrow.nearest(2.0) == 0.99999
    assert Dimension(uniform=[0, 1]).nearest(0.123456) == 0.1235
    assert Dimension(integer=[1, 3]).nearest(2.0) == 2


def test_scores_are_shown_with_the_digits_they_need():
    assert [shown_score(value) for value in (76.034, 0.00123, 3.14159)] == ["76.03", "0.00123",
                                                                             "3.142"]  # fmt: skip


def test_the_same_setting_is_proposed_once(search):
    found = search({RATE: {"choice": [0.1]}}, searcher="random", trials=5)
    log = TrialLog(found.store.root, found.folder)
    twice = Listed([{RATE: 0.1}, {RATE: 0.1}])
    assert play(Book(found, log, twice, [1], "search"), {}) == [(0.1, 1)]
    assert len(listed_settings(found.settings, found.space)) == 1


@pytest.mark.parametrize("scheduler", ["asha", "median"])
def test_a_continued_scheduler_decides_as_if_it_had_never_stopped(search, scheduler):
    import random

    from tune.controller import _Past, make_scheduler, replay

    found = search({RATE: {"grid": [0.1]}}, scheduler=scheduler)
    source = random.Random(0)
    curves = [
        [[step, 100 * step / 12, source.random()] for step in (3, 6, 9, 12)] for _ in range(40)
    ]

    def feed(scheduler, curves):
        seen = []
        for number, curve in curves:
            past = _Past(trial(str(number)))
            scheduler.on_trial_add(None, past)
            for point in curve:
                seen.append(point)
                result = {"judged": point[1], "value": point[2]}
                decision = scheduler.on_trial_result(None, past, result)
                if decision == "STOP":
                    break
            else:
                scheduler.on_trial_complete(None, past, result)
            yield number, len(seen)
            seen.clear()

    numbered = list(enumerate(curves))
    whole = dict(feed(make_scheduler(found), numbered))
    assert len(set(whole.values())) > 1  # some are stopped
    log = TrialLog(found.store.root, found.folder)
    perfect = [[step, share, 2.0] for step, share, _ in curves[0]]
    log.add(trial("another state of the recipe", curve=perfect))
    for number, curve in numbered[:20]:
        for seed, told in ((1, curve[: whole[number]]), (2, perfect)):
            values = {RATE: 0.001 * (1 + number)}
            name = found.job_of(values, seed).node.fingerprint
            log.add(trial(name, values=values, seed=seed, curve=told))
    continued = make_scheduler(found)
    replay(continued, found, Book(found, log, Listed([]), [1], "search"))
    assert dict(feed(continued, numbered[20:])) == dict(list(whole.items())[20:])


def test_keys_do_not_depend_on_order():
    assert key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})
    assert replace(trial("a"), score=1.0) != trial("a")


def test_a_checkpoint_whose_metric_is_no_number_has_no_score():
    """An earlier figure of the same training is not that of the checkpoint."""
    assert score_of([[5, 50.0, 70.0]], "dev_spearman", 10) is None
    assert score_of([[5, 50.0, 0.7]], "loss", 10) == 0.7


def test_a_member_that_ends_without_a_number_never_wins(search):
    from types import SimpleNamespace

    from tune.controller import _MemberReports

    found = search({RATE: {"uniform": [0.1, 0.3]}}, scheduler="population", trials=2)
    log = TrialLog(found.store.root, "tune/x")
    reports = _MemberReports(found, log, lambda text: None)
    for name, rate, last in (("a", 0.1, {}), ("b", 0.2, {"value": 40.0})):
        config = {"assignment": SimpleNamespace(member=name), RATE: rate}
        member = SimpleNamespace(trial_id=name, config=config)
        reports.on_trial_start(0, [], member)
        reports.on_trial_result(0, [], member, {"step": 1, "progress": 50.0, "value": 70.0})
        reports.on_trial_result(0, [], member, {"step": 2, "progress": 100.0, "done": True} | last)
        reports.on_trial_complete(0, [], member)
    ended = {trial.values[RATE]: trial for trial in log}
    assert (ended[0.1].status, ended[0.1].score) == ("failed", None)
    assert "no dev_spearman that is a number" in ended[0.1].reason
    assert (ended[0.2].status, ended[0.2].score) == ("finished", 40.0)
