"""Bookkeeping of trials: what is tried, tried again, left out, ranked and kept."""

import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from pipeline.run.work import silent
from pipeline.store.leases import Leases
from stages.files import Root
from tests.support.command import wait_until
from tests.support.trials import RATE, TAU3, play, trial
from tune.ranking import counted, fresh_seeds, own_trials, rank
from tune.ray_tune import QueueReports
from tune.searchers import Listed, listed_configurations
from tune.trial_queue import TrialQueue
from tune.trials import TrialLog, score_of
from tune.weights import Keeper


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


@pytest.fixture
def three_rates(make_search):
    search = make_search({RATE: {"grid": [0.1, 0.2, 0.3]}}, seeds=[1, 2, 3])

    def queue(log, **more):
        return TrialQueue(
            search, log, Listed(list(search.space.grid())), search.seeds, "search", **more
        )

    return search, queue


def test_only_configurations_that_finish_get_their_other_seeds(three_rates, tmp_path):
    search, new_queue = three_rates
    log = TrialLog(search.store.root, search.folder)
    ends = {
        (0.2, 1): {"status": "stopped", "score": 20.0},
        (0.3, 2): {"status": "failed", "reason": "loss is nan"},
    }
    ran = play(new_queue(log), ends)
    assert sorted(ran) == [(0.1, 1), (0.1, 2), (0.1, 3), (0.2, 1), (0.3, 1), (0.3, 2), (0.3, 3)]
    ranking = rank(search, own_trials(search, log))
    assert [one.values[RATE] for one in ranking] == [0.1]

    again = TrialLog(search.store.root, search.folder)
    assert play(new_queue(again), {}) == []  # all of it is known
    assert new_queue(again).peek() is None


def test_a_searcher_is_told_once_when_all_seeds_of_a_configuration_have_ended(make_search):
    search = make_search({RATE: {"grid": [0.1, 0.2]}}, seeds=[1, 2, 3])
    log = TrialLog(search.store.root, search.folder)
    searcher, told = Listed(list(search.space.grid())), []
    searcher.tell = lambda values, score: told.append((values[RATE], score))
    ends = {
        (0.1, 1): {"status": "finished", "score": 40.0},
        (0.1, 3): {"status": "failed", "reason": "loss is nan"},
        (0.2, 1): {"status": "failed", "reason": "loss is nan"},
    }
    play(TrialQueue(search, log, searcher, search.seeds, "search"), ends)
    assert sorted(told) == [(0.1, 45.0), (0.2, None)]


def test_what_the_machine_did_is_tried_again_and_what_the_values_did_is_not(three_rates):
    search, new_queue = three_rates
    log = TrialLog(search.store.root, search.folder)
    died = {"status": "failed", "reason": "its process died", "retryable": True}
    nan = {"status": "failed", "reason": "loss is nan"}
    play(new_queue(log), {(0.1, 1): died, (0.2, 1): nan})
    assert play(new_queue(log), {}) == [(0.1, 1), (0.1, 2), (0.1, 3)]


def test_nothing_begins_once_the_budget_is_spent(three_rates):
    search, new_queue = three_rates
    log = TrialLog(search.store.root, search.folder)
    spent = lambda: sum(one.steps for one in log) < 24  # noqa: E731
    assert len(play(new_queue(log, may_start=spent), {})) == 2
    assert len(play(new_queue(log), {})) == 7


@pytest.mark.parametrize("direction", ["maximum", "minimum"])
def test_one_lucky_seed_is_not_ranked_above_means_over_all(make_search, direction):
    search = make_search({RATE: {"grid": [0.1, 0.2, 0.3]}}, seeds=[1, 2], direction=direction)
    scores = {(0.1, 1): 50.0, (0.1, 2): 48.0, (0.2, 1): 60.0, (0.3, 1): 40.0, (0.3, 2): 47.0}
    trials = [
        trial(search.work_of({RATE: rate}, seed).node.fingerprint, values={RATE: rate}, seed=seed,
              score=score if direction == "maximum" else -score)
        for (rate, seed), score in scores.items()
    ]  # fmt: skip
    assert [one.values[RATE] for one in rank(search, trials)] == [0.1, 0.3, 0.2]


def test_a_bad_combination_is_a_failed_trial_and_the_rest_go_on(make_search):
    low, high = "train.objectives.soft_negative.low", "train.objectives.soft_negative.high"
    section = {"train.objectives.soft_negative": {"grid": [None, {}]}}
    bounds = {low: {"grid": [0.1, 0.5]}, high: {"grid": [0.2, 0.6]}}
    search = make_search({**bounds, **section, RATE: {"grid": [1]}})
    assert len(list(search.space.grid())) == 5  # without the section there are no bounds
    log = TrialLog(search.store.root, search.folder)
    queue = TrialQueue(search, log, Listed(list(search.space.grid())), [1], "search")
    assert len(play(queue, {})) == 4
    (failed,) = [one for one in log if one.status == "failed"]
    assert "low 0.5 (alpha) is above high 0.2" in failed.reason and search.owns(failed)


def test_trials_of_another_state_of_the_recipe_are_left_out(three_rates, make_search, tiny_recipe):
    search, new_queue = three_rates
    log = TrialLog(search.store.root, search.folder)
    play(new_queue(log), {})
    longer = make_search(
        {RATE: {"grid": [0.1]}}, recipe=tiny_recipe("train.max_steps=99"), seeds=[1, 2, 3]
    )
    assert own_trials(longer, log) == [] and len(log) == 9
    wider = make_search({RATE: {"grid": [0.1, 0.4]}, TAU3: {"grid": [0.0125]}}, seeds=[1])
    assert len(own_trials(wider, log)) == 9  # another space of the same recipe
    other_metric = make_search({RATE: {"grid": [0.1]}}, metric="loss")
    assert own_trials(other_metric, log) == []


def test_configurations_are_the_same_however_they_are_written(make_search):
    narrow = make_search({RATE: {"grid": [0.1]}}, seeds=[1])
    log = TrialLog(narrow.store.root, narrow.folder)
    play(TrialQueue(narrow, log, Listed([{RATE: 0.1}]), [1], "search"), {})
    wide = make_search({RATE: {"grid": [0.1]}, TAU3: {"grid": [0.0125, 0.05]}}, seeds=[1, 2])
    queue = TrialQueue(
        wide, log, Listed(listed_configurations(wide.settings, wide.space)), [1, 2], "search"
    )
    assert sorted(play(queue, {})) == [(0.1, 1), (0.1, 2), (0.1, 2)]  # one of four was known
    ranking = rank(wide, own_trials(wide, log))
    assert [len(one.scores) for one in ranking] == [2, 2]
    assert all(one.values.keys() == {RATE, TAU3} for one in ranking)
    whole = make_search({"teachers.0.weight": {"grid": [1, 1.0]}})
    queue = TrialQueue(whole, log, Listed(list(whole.space.grid())), [1], "search")
    assert queue.next() is not None and queue.next() is None


def test_fresh_seeds_had_no_part_in_choosing(make_search):
    few = make_search({RATE: {"grid": [0.1]}}, seeds=[1], confirm={"seeds": 2})
    trials = [trial("a", seed=3), trial("b", seed=7, phase="confirm")]
    assert fresh_seeds(few, trials) == [4, 5]
    assert fresh_seeds(few, []) == [2, 3]
    assert [one.seed for one in counted(few, [*trials, trial("c", seed=1)])] == [1]


def test_what_was_stopped_by_another_rule_is_tried_again(make_search):
    asha = make_search({RATE: {"grid": [0.1]}})
    log = TrialLog(asha.store.root, asha.folder)
    stopped = {(0.1, 42): {"status": "stopped", "score": 20.0}}

    def tried(search):
        return play(TrialQueue(search, log, Listed([{RATE: 0.1}]), [42], "search"), stopped)

    assert tried(asha) == [(0.1, 42)] and tried(asha) == []
    assert tried(make_search({RATE: {"grid": [0.1]}}, direction="minimum")) == [(0.1, 42)]
    assert tried(make_search({RATE: {"grid": [0.1]}}, scheduler="none")) == [(0.1, 42)]


def test_a_seed_that_was_stopped_as_the_first_is_trained_as_another(make_search):
    """Behind a new first seed it is never stopped: the configuration finished with that one."""

    def run(seeds, ends):
        search = make_search({RATE: {"grid": [0.1, 0.2]}}, seeds=seeds)
        log = TrialLog(search.store.root, search.folder)
        queue = TrialQueue(search, log, Listed(list(search.space.grid())), seeds, "search")
        return play(queue, ends), rank(search, counted(search, own_trials(search, log)))

    run([1], {(0.2, 1): {"status": "stopped", "score": 49.0}})
    ran, ranking = run([2, 1], {(0.2, 2): {"status": "finished", "score": 60.0}})
    assert ran == [(0.1, 2), (0.2, 2), (0.2, 1)]
    assert [(one.values[RATE], one.scores) for one in ranking] == [
        (0.2, [60.0, 50.0]), (0.1, [50.0, 50.0])
    ]  # fmt: skip
    assert run([2, 1], {})[0] == []


def test_a_killed_search_knows_what_had_begun(three_rates):
    search, new_queue = three_rates
    log = TrialLog(search.store.root, search.folder)
    queue = new_queue(log)
    assert queue.peek() and log.begun() == []  # not handed out yet
    first, second = queue.next(), queue.next()
    assert queue.num_left() == 9
    queue.end(first.work.node.fingerprint, status="finished", score=1.0)
    again = TrialLog(search.store.root, search.folder)
    assert [one.values for one in again.begun()] == [second.values] and len(list(again)) == 1
    assert queue.may_be_stopped(1) and not queue.may_be_stopped(2)


def test_a_trial_whose_process_is_lost_too_often_has_failed(make_search, tiny_recipe):
    """Tune gives up at the first loss where a process was about to get the trial."""
    search = make_search({RATE: {"grid": [0.1, 0.2]}}, tiny_recipe("train.max_failures=2"))
    log = TrialLog(search.store.root, search.folder)
    queue = TrialQueue(search, log, Listed(list(search.space.grid())), search.seeds, "search")
    reports = QueueReports(queue)
    handed_out = []
    for _ in range(3):
        handed_out.append(queue.next())
        lost = SimpleNamespace(
            trial_id="x", config={"assignment": handed_out[-1]}, get_pickled_error=lambda: None,
            evaluated_params={}, run_metadata=SimpleNamespace(
                num_failures=1, last_result={}, metric_analysis={}, metric_n_steps={}
            ),
        )  # fmt: skip
        reports.on_trial_error(0, [], lost)
    assert [one.values for one in handed_out] == [{RATE: 0.1}] * 3
    (failed,) = TrialLog(search.store.root, search.folder)
    assert failed.values == {RATE: 0.1} and failed.retryable
    assert queue.next().values == {RATE: 0.2}


@pytest.fixture
def beside_a_run(make_search):
    """A search of two configurations, the leases of a run beside it, and the search's queue."""
    search = make_search({RATE: {"grid": [0.1, 0.2]}}, seeds=[1])
    log, grid, said = TrialLog(search.store.root, search.folder), search.space.grid(), []

    def say(text, important=False):
        said.append(text)

    root = search.store.root
    with Leases(root, pytest.fail, 0.1) as others, Leases(root, pytest.fail, 0.1) as own:
        queue = TrialQueue(search, log, Listed([*grid]), [1], "search", leases=own, say=say)
        yield search.work_of({RATE: 0.1}, 1), others, queue, said


def take(leases, work):
    return leases.take(work.lease, lambda: False, silent, str, waits=False)


def test_what_a_run_trains_is_left_to_it_and_read_when_it_is_made(beside_a_run, tmp_path):
    work, others, queue, _ = beside_a_run
    held = take(others, work)
    assert play(queue, {}) == [(0.2, 1)]
    row = {"step": 12, "num_steps": 12, "loss": 1.0, "dev_spearman": 70.0}
    (tmp_path / "made/metrics").mkdir(parents=True)
    (tmp_path / "made/metrics/metrics.jsonl").write_text(json.dumps(row))
    work.publish({"best_step": 12}, tmp_path / "made")
    others.release(held)
    assert queue.peek() is None
    known = queue.log.get(work.node.fingerprint)
    assert known.reused and known.score == 70.0


def test_what_a_run_has_not_finished_is_waited_for_and_trained_under_a_lease(beside_a_run):
    work, others, queue, said = beside_a_run
    held = take(others, work)
    assert play(queue, {}) == [(0.2, 1)]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(queue.peek)
        wait_until(lambda: said)
        assert "waits for" in said[0] and not waiting.done()
        others.release(held)
        assert waiting.result().values == {RATE: 0.1}
    assert take(others, work) is None
    assert play(queue, {}) == [(0.1, 1)]
    assert take(others, work) is not None


def test_what_a_search_left_that_was_killed_elsewhere_is_gone_on_with_side_by_side(
    make_search, monkeypatch
):
    """Nobody can tell at once that it is gone; once its leases are old all its trials are free."""
    search = make_search({RATE: {"grid": [0.1, 0.2, 0.3]}}, seeds=[1])
    root, grid = search.store.root, [*search.space.grid()]
    for values in grid[:2]:
        holder = {"id": "x", "who": "ann@other", "since": "10:00", "process": ["other", 7, "1"]}
        lease = search.work_of(values, 1).lease
        root.write(f"leases/{lease}/000001.json", json.dumps(holder).encode())
    clock = [0.0]
    log = TrialLog(root, search.folder)
    with Leases(root, pytest.fail) as own:
        monkeypatch.setattr(own, "_now", lambda: clock[0])
        queue = TrialQueue(search, log, Listed(grid), [1], "search", leases=own)
        other = queue.next()
        assert other.values == {RATE: 0.3} and queue.next() is None
        clock[0] = 1.1 * own.stale_seconds
        queue.end(other.work.node.fingerprint, status="finished", score=1.0, steps=12)
        assert [queue.next().values for _ in range(2)] == grid[:2]


def test_a_loss_that_an_earlier_version_wrote_down_is_read_anew(make_search, tmp_path):
    """It was that of the last row, perhaps of one batch."""
    search = make_search({RATE: {"grid": [0.1]}}, seeds=[1], metric="loss")
    work, log = search.work_of({RATE: 0.1}, 1), TrialLog(search.store.root, search.folder)
    every = search.recipe.train.log_every_steps
    rows = [{"step": every, "num_steps": every + 1, "loss": 2.0},
            {"step": every + 1, "num_steps": every + 1, "loss": 9.0}]  # fmt: skip
    search.result_work(work).publish({"best_step": every + 1, "history": rows})
    old = trial(
        work.node.fingerprint, values={RATE: 0.1}, seed=1, metric="loss", score=9.0, steps=every + 1
    )
    log.add(old)
    assert play(TrialQueue(search, log, Listed([{RATE: 0.1}]), [1], "search"), {}) == []
    assert log.get(old.fingerprint).score == (2.0 * every + 9.0) / (every + 1)


@pytest.mark.parametrize("taken_over", [False, True])
def test_a_stopped_trial_leaves_the_checkpoints_of_whoever_has_taken_over(beside_a_run, taken_over):
    work, _, queue, _ = beside_a_run
    stopped = SimpleNamespace(
        trial_id="x", config={"assignment": queue.next()}, evaluated_params={},
        run_metadata=SimpleNamespace(last_result={}, metric_analysis={}, metric_n_steps={}),
    )  # fmt: skip
    work.root.write(f"{work.scratch}/step-000010/complete.json", b"{}")
    if taken_over:
        work.root.write(f"leases/{work.lease}/000002.json", b"{}")
    reports = QueueReports(queue)
    reports.on_trial_complete(0, [], stopped)
    assert reports.error is None and queue.log.get(work.node.fingerprint).status == "stopped"
    assert work.root.exists(f"{work.scratch}/step-000010/complete.json") == taken_over


def test_only_the_best_configurations_keep_weights(make_search):
    search = make_search({RATE: {"grid": [0.1, 0.2]}}, seeds=[1, 2], keep=1)
    log = TrialLog(search.store.root, search.folder)
    scores = {
        (0.1, 1): 80.0, (0.1, 2): 60.0, (0.2, 1): 75.0, (0.2, 2): 74.0, (0.3, 1): 10.0,
        (0.3, 2): 10.0, (0.4, 1): 90.0, (0.5, 1): 89.0,
    }  # fmt: skip
    trials = []
    for (rate, seed), score in scores.items():
        work = search.work_of({RATE: rate}, seed)
        work.publish({"search": search.name})
        name = work.node.fingerprint
        one = trial(name, folder=work.folder, values={RATE: rate}, seed=seed, score=score)
        trials.append(one)
        log.add(one)
    used = {"train": {"folder": trials[4].folder, "settings": {}}}
    search.store.root.write(
        "history/other/20260101T000000000000/run.json", json.dumps(used).encode()
    )
    Keeper(search, log)
    left = [search.store.manifest(one.folder) is not None for one in trials]
    # the mean of 0.2 is the best, one of 0.3 is in use, and 0.4 may become better
    assert left == [False, False, True, True, True, False, True, False]


def test_the_same_configuration_is_proposed_once(make_search):
    search = make_search({RATE: {"choice": [0.1]}}, searcher="random", trials=5)
    log = TrialLog(search.store.root, search.folder)
    twice = Listed([{RATE: 0.1}, {RATE: 0.1}])
    assert play(TrialQueue(search, log, twice, [1], "search"), {}) == [(0.1, 1)]
    assert len(listed_configurations(search.settings, search.space)) == 1


def test_a_checkpoint_whose_metric_is_no_number_has_no_score():
    """An earlier figure of the same training is not that of the checkpoint."""
    assert score_of([[5, 50.0, 70.0]], "dev_spearman", 10) is None
    assert score_of([[5, 50.0, 0.7]], "loss", 10) == 0.7
