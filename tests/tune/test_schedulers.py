"""What Tune is told of a trial, and what its schedulers decide; without a cluster."""

import random
import threading
from itertools import count
from types import SimpleNamespace

import pytest
from ray.tune.search import ConcurrencyLimiter, Searcher

from stages.errors import StorageError, UserError
from stages.files import Root
from stages.patience import Patience
from tests.support.trials import RATE, trial
from tune.actor import TrialActor
from tune.assignment import Assignment
from tune.population import MemberReports, Population
from tune.ray_tune import Reports, make_scheduler, patiently, replay, run_trials
from tune.resources import Reservation
from tune.searchers import Listed
from tune.trial_queue import TrialQueue
from tune.trials import TrialLog


def actor_of(monkeypatch, search, rows, **settings):
    """A trial's actor, without Ray, whose training gives these rows."""
    work = search.work_of({RATE: 0.1}, 1)
    assignment = Assignment(work, work, {RATE: 0.1}, 1, search.settings.metric, "x", **settings)
    progress = SimpleNamespace(history=[], step=0)

    def train():
        for row in rows:
            progress.history.append(row)
            yield row

    training = SimpleNamespace(
        progress=progress, rows=train, is_over=False, put_away_if=lambda asked: None
    )
    monkeypatch.setattr("tune.actor.use_assigned_cores", lambda: None)
    monkeypatch.setattr("tune.actor.stop_of", lambda board: lambda: False)
    monkeypatch.setattr("tune.actor.begun", lambda works: works)  # what they read is not made
    monkeypatch.setattr("stages.train.run.start_training", lambda *_, **__: training)
    actor = TrialActor.__new__(TrialActor)
    actor.setup({"assignment": assignment}, board=None)
    return actor


def test_an_object_store_is_given_time_until_trials_begin(tmp_path, monkeypatch):
    """Afterwards Tune cannot be started again; what went wrong is told as the storage's."""
    monkeypatch.setattr("stages.patience.LEAST_PAUSE", 0.001)
    root, reports = Root(str(tmp_path)), Nothing()
    root.is_local, root._patience = False, Patience("here")
    times = []

    def run():
        times.append(len(times))
        if len(times) == 3:
            reports.setup()
        raise OSError("AWS Error NETWORK_CONNECTION")

    with pytest.raises(StorageError, match="NETWORK_CONNECTION"):
        patiently(root, run, reports)
    assert len(times) == 3


class Nothing(Reports):
    completed = died = None


def test_an_actor_tells_tune_what_may_be_judged(make_search, monkeypatch):
    def row(step, **more):
        return {"step": step, "num_steps": 4, "loss": 1.0, **more}

    search = make_search({RATE: {"grid": [0.1]}})
    rows = [row(1), row(2, dev_spearman=float("nan")), row(3, dev_spearman=5.0)]
    judged = actor_of(monkeypatch, search, iter(rows)).step()
    assert (judged["value"], judged["progress"], judged["judged"]) == (5.0, 75.0, 75.0)
    other_seed = actor_of(monkeypatch, search, iter(rows), may_be_stopped=False).step()
    assert other_seed["progress"] == 75.0 and "judged" not in other_seed


def test_a_loss_is_of_as_many_steps_as_are_logged_together(make_search, monkeypatch, tiny_recipe):
    """The last row may be one batch. What Tune judges and what is written down is the same."""
    recipe = tiny_recipe("train.log_every_steps=30")
    search = make_search({RATE: {"grid": [0.1]}}, recipe, metric="loss")
    losses = {30: 3.0, 40: 2.0, 60: 1.0, 61: 9.0}
    history = [{"step": step, "num_steps": 61, "loss": loss} for step, loss in losses.items()]
    actor = actor_of(monkeypatch, search, history)
    told = [actor.step()["value"] for _ in history]
    assert told == pytest.approx([3.0, (10 * 2 + 30 * 3) / 40, (20 + 10 * 2) / 30, 49 / 31])
    work = search.work_of({RATE: 0.1}, 42)
    search.result_work(work).publish({"history": history, "best_step": 61})
    log = TrialLog(search.store.root, search.folder)
    assert TrialQueue(search, log, Listed([{RATE: 0.1}]), [42], "search").next() is None
    (known,) = log
    assert [value for _, _, value in known.curve] == told and known.score == told[-1]


@pytest.mark.parametrize(
    ("error", "retryable"),
    [(UserError("the loss became nan"), False), (StorageError("disk full"), True),
     (RuntimeError("out of memory"), True)],
)  # fmt: skip
def test_what_the_storage_did_is_tried_again(make_search, error, retryable, monkeypatch):
    def rows():
        yield {"step": 1, "num_steps": 4, "loss": 1.0, "dev_spearman": 5.0}
        raise error

    monkeypatch.setattr("tune.actor.time", SimpleNamespace(time=count().__next__))
    actor = actor_of(monkeypatch, make_search({RATE: {"grid": [0.1]}}), rows())
    actor.step()
    failed = actor.step()
    assert failed["seconds"] > 0 and failed["overhead_seconds"] > 0
    assert failed["done"] and failed["retryable"] is retryable and str(error) in failed["reason"]
    traced = not isinstance(error, UserError)  # what nobody foresaw
    assert ("raise error" in failed["trace"]) == traced


def test_a_population_makes_no_change_that_the_recipe_refuses(make_search):
    low, high = "train.objectives.soft_negative.low", "train.objectives.soft_negative.high"
    recipe = make_search({RATE: {"grid": [1]}}).recipe.model_dump(mode="json")
    recipe["train"]["objectives"]["soft_negative"] = {"low": 0.1, "high": 0.3}
    bounds = {low: {"uniform": [0.0, 0.9]}, high: {"uniform": [0.1, 1.0]}}
    search = make_search(bounds, recipe=recipe, scheduler="population", trials=2)

    def changed(mutations):
        scheduler = Population(
            search, time_attr="judged", metric="value", mode="max", hyperparam_mutations=mutations,
            resample_probability=1.0,
        )  # fmt: skip
        donor = SimpleNamespace(trial_id="a", config={low: 0.3, high: 0.6})
        return scheduler._get_new_config(None, donor)[0]  # what Ray asks for

    assert changed({low: lambda: 0.8, high: lambda: 0.2}) == {low: 0.3, high: 0.6}
    assert changed({low: lambda: 0.1}) == {low: 0.1, high: 0.6}


class TuneTrial:
    """A trial as far as Tune's schedulers look at it."""

    def __init__(self, number):
        self.trial_id, self.config, self.status = str(number), {}, "TERMINATED"


def test_a_member_that_ends_without_a_number_never_wins(make_search):
    search = make_search({RATE: {"uniform": [0.1, 0.3]}}, scheduler="population", trials=2)
    log = TrialLog(search.store.root, "tune/x")
    reports = MemberReports(search, log, lambda text: None)
    for name, rate, last in (("a", 0.1, {}), ("b", 0.2, {"value": 40.0})):
        config = {"assignment": SimpleNamespace(member=SimpleNamespace(name=name)), RATE: rate}
        member = SimpleNamespace(trial_id=name, config=config)
        reports.on_trial_start(0, [], member)
        reports.on_trial_result(0, [], member, {"step": 1, "progress": 50.0, "value": 70.0})
        reports.on_trial_result(0, [], member, {"step": 2, "progress": 100.0, "done": True} | last)
        reports.on_trial_complete(0, [], member)
    ended = {trial.values[RATE]: trial for trial in log}
    assert (ended[0.1].status, ended[0.1].score) == ("failed", None)
    assert "no dev_spearman that is a number" in ended[0.1].reason
    assert (ended[0.2].status, ended[0.2].score) == ("finished", 40.0)


@pytest.mark.parametrize("scheduler", ["asha", "median"])
def test_a_continued_scheduler_decides_as_if_it_had_never_stopped(make_search, scheduler):
    search = make_search({RATE: {"grid": [0.1]}}, scheduler=scheduler)
    source = random.Random(0)
    curves = [
        [[step, 100 * step / 12, source.random()] for step in (3, 6, 9, 12)] for _ in range(40)
    ]

    def feed(scheduler, curves):
        seen = []
        for number, curve in curves:
            past = TuneTrial(number)
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
    whole = dict(feed(make_scheduler(search), numbered))
    assert len(set(whole.values())) > 1  # some are stopped
    log = TrialLog(search.store.root, search.folder)
    perfect = [[step, share, 2.0] for step, share, _ in curves[0]]
    log.add(trial("another state of the recipe", curve=perfect))
    for number, curve in numbered[:20]:
        for seed, told in ((1, curve[: whole[number]]), (2, perfect)):
            values = {RATE: 0.001 * (1 + number)}
            name = search.work_of(values, seed).node.fingerprint
            log.add(trial(name, values=values, seed=seed, curve=told))
    continued = make_scheduler(search)
    replay(continued, search, TrialQueue(search, log, Listed([]), [1], "search"))
    assert dict(feed(continued, numbered[20:])) == dict(list(whole.items())[20:])


def test_the_median_rule_passes_over_trials_that_are_not_judged(make_search):
    """Second seeds, which may not be stopped, and what failed: Ray's rule would ask them."""
    scheduler = make_scheduler(make_search({RATE: {"grid": [0.1]}}, scheduler="median"))
    for number in range(4):  # as many samples as the rule wants
        judged = TuneTrial(number)
        scheduler.on_trial_add(None, judged)
        result = {"judged": 50.0, "value": 1.0}
        assert scheduler.on_trial_result(None, judged, result) == "CONTINUE"
        scheduler.on_trial_complete(None, judged, result)
    for number, last in enumerate(({"value": 70.0}, {"judged": 100.0}, {"done": True})):
        other = TuneTrial(f"other {number}")
        scheduler.on_trial_add(None, other)
        scheduler.on_trial_complete(None, other, last)
    worse = TuneTrial("worse")
    scheduler.on_trial_add(None, worse)
    assert scheduler.on_trial_result(None, worse, {"judged": 50.0, "value": 0.5}) == "STOP"


def test_no_more_trials_run_at_once_than_were_asked_for(make_search, monkeypatch):
    search = make_search({RATE: {"grid": [0.1, 0.2, 0.3]}}, seeds=[1])
    log = TrialLog(search.store.root, search.folder)
    queue = TrialQueue(search, log, Listed(list(search.space.grid())), [1], "search")

    class Tuner:
        """Asks for trials as Ray's does, and ends the first one."""

        def __init__(self, *_, tune_config, **__):
            most = tune_config.max_concurrent_trials
            self.limited = ConcurrencyLimiter(tune_config.search_alg, max_concurrent=most)

        def fit(self):
            first = self.limited.suggest("0")["assignment"]
            assert self.limited.suggest("1")["assignment"].values == {RATE: 0.2}
            assert self.limited.suggest("2") is None and len(queue.running) == 2
            queue.end(first.work.node.fingerprint, status="failed", reason="x")
            self.limited.on_trial_complete("0")
            assert self.limited.suggest("3")["assignment"].values == {RATE: 0.3}
            for fingerprint in list(queue.running):
                queue.end(fingerprint, status="failed", reason="x")
            self.limited.on_trial_complete("1")
            assert self.limited.suggest("4") == Searcher.FINISHED

    monkeypatch.setattr("ray.tune.Tuner", Tuner)
    monkeypatch.setattr("tune.ray_tune.start_board", lambda: None)
    run_trials(queue, Reservation({"CPU": 1}, {}, 2), stops_early=True, asked=threading.Event())
    assert len(log) == 3
