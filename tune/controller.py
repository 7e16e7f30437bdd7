"""Ray Tune: runs the trials of a book, stops the hopeless ones, and replaces a population's.

Tune schedules and keeps the actors; what it suggests comes from the book, and what happened goes
there. Its own record of the experiment is scratch.
"""

import logging
import math
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
os.environ.setdefault("TUNE_DISABLE_STRICT_METRIC_CHECKING", "1")  # failed trials measure nothing
os.environ.setdefault("TUNE_GLOBAL_CHECKPOINT_S", "100000")  # never resumed from
os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")  # Ctrl-C ends the search
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # our own table says how far it is
os.environ.setdefault("TUNE_MAX_PENDING_TRIALS_PG", "1")

import ray
from ray import tune
from ray.tune import Callback, CheckpointConfig, FailureConfig, RunConfig, TuneConfig
from ray.tune.schedulers import (
    AsyncHyperBandScheduler,
    FIFOScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)
from ray.tune.search import Searcher

from pipeline.hosts import worker_resources
from pipeline.job import Job
from stages.errors import UserError
from tune.actor import Assignment, TrialActor
from tune.book import Book
from tune.live import shown_score, values_text
from tune.load import Search
from tune.space import Values
from tune.trials import Curve, Trial, TrialLog, measured


def trial_resources(search: Search, job: Job) -> tuple[dict[str, float], int]:
    """What Tune reserves for a trial, and how many trials fit at once.

    A trial with several workers reserves nothing itself: its workers' cores are taken all at once,
    or not at all, by Ray Train, so trials cannot wait for each other for ever.

    Raises:
        UserError: not one trial fits into this cluster.
    """
    settings, train = search.settings, job.recipe.train
    have = ray.cluster_resources()
    if train.resolved_engine == "deepspeed":
        cores, gpus = worker_resources(job)
        fits = int(have["CPU"] // (cores * train.num_workers))
        if gpus:
            fits = min(fits, int(have["GPU"] // (gpus * train.num_workers)))
        # one byte of memory, since Tune takes no trial that needs nothing
        return {"CPU": 0, "memory": 1}, max(1, fits)
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cores = settings.cpus_per_trial or train.cpus_per_worker or 1
    share = settings.gpus_per_trial
    if share is None:
        share = float(train.gpus_per_worker or 0) or (1.0 if have.get("GPU") else 0.0)
    fits = sum(
        int(min(node.get("CPU", 0) / cores, node.get("GPU", 0) / share + 1e-9 if share else 1e9))
        for node in alive
    )
    if fits < 1:
        most = max(node.get("CPU", 0) for node in alive)
        raise UserError(
            f"search: a trial with {cores} core(s) and {share:g} GPU(s) fits on no machine of this "
            f"cluster (the largest has {most:g} cores; {have.get('GPU', 0):g} GPUs in all); lower "
            "search.cpus_per_trial or gpus_per_trial"
        )
    return {"CPU": cores, "GPU": share}, fits


def concurrency(search: Search, fits: int, out: Callable[[str], None]) -> int:
    """Trials at once: what was asked for, if it fits."""
    asked = search.settings.concurrency
    if asked is not None and asked > fits:
        out(f"warning: search.concurrency is {asked}, but only {fits} trials fit; {fits} at once")
    return min(asked or fits, fits)


def run_trials(book: Book, resources: dict[str, float], at_once: int, stops_early: bool) -> None:
    """Runs a book's trials to its end, within a Ray session."""
    search = book.search
    scheduler = make_scheduler(search) if stops_early else FIFOScheduler()
    if stops_early:
        replay(scheduler, search, book)
    _fit(search, resources, scheduler, _Suggestions(book, at_once), _Reports(book))


def run_population(
    search: Search,
    log: TrialLog,
    assignments: list[Assignment],
    resources: dict[str, float],
    out: Callable[[str], None],
) -> None:
    """Trains all members, some at a time; bad ones take over state and settings of good ones.

    A member's trial has the settings with which it ended.
    """
    settings = search.settings
    mutations: dict[str, Any] = {}
    for name, dimension in search.space.dimensions.items():
        if dimension.values is not None:
            mutations[name] = dimension.values
        elif dimension.integer is not None:
            mutations[name] = tune.randint(dimension.integer[0], dimension.integer[1] + 1)
        elif dimension.bounds is not None:
            low, high = dimension.bounds
            sample = tune.loguniform if dimension.loguniform else tune.uniform
            mutations[name] = sample(low, high)
    scheduler = _Population(
        search, time_attr="judged", metric="value", mode=_mode(search),
        perturbation_interval=100 * settings.interval, hyperparam_mutations=mutations,
        require_attrs=False, log_config=False,
    )  # fmt: skip
    reports = _MemberReports(search, log, out)
    # Tune lets no searcher propose a population
    beginning: dict[str, Any] = {"assignment": tune.grid_search(assignments)}
    for name in search.space.dimensions:
        beginning[name] = tune.sample_from(partial(_first_value, name))
    _fit(search, resources, scheduler, None, reports, beginning)


def _first_value(name: str, spec: Any) -> Any:
    return spec.config.assignment.values[name]


def _mode(search: Search) -> str:
    return "max" if search.settings.maximise else "min"


def make_scheduler(search: Search) -> TrialScheduler:
    """Who decides which trials are stopped, by the share of their training."""
    settings = search.settings
    common: dict[str, Any] = {"time_attr": "judged", "metric": "value", "mode": _mode(search)}
    grace: Any = 100 * settings.grace  # a share in percent, whatever the annotation says
    if settings.scheduler == "asha":
        return AsyncHyperBandScheduler(
            grace_period=grace, max_t=100, reduction_factor=settings.reduction, **common
        )
    if settings.scheduler == "median":
        never: Any = math.inf  # it would pause trials for which there are too few others
        return MedianStoppingRule(grace_period=grace, min_time_slice=never, **common)
    return FIFOScheduler()


class _Population(PopulationBasedTraining):
    """Ray's, which leaves out changes that the recipe refuses (alpha above its upper bound)."""

    def __init__(self, search: Search, **settings: Any) -> None:
        super().__init__(**settings)
        self._search = search

    def _get_new_config(self, trial: Any, trial_to_clone: Any) -> tuple[dict[str, Any], Any]:
        found, operations = super()._get_new_config(trial, trial_to_clone)
        try:
            self._search.job_of(self._search.space.within(found), self._search.seeds[0])
        except UserError:
            return dict(trial_to_clone.config), {}
        return found, operations


class _Past:
    """A trial of an earlier run, as far as schedulers look at it."""

    def __init__(self, trial: Trial) -> None:
        self.trial_id = trial.fingerprint
        self.config: dict[str, Any] = {}
        self.status = "TERMINATED"


def replay(scheduler: TrialScheduler, search: Search, book: Book) -> None:
    """Shows a scheduler the curves of earlier runs, so that a continued search stops alike."""
    for trial in book.log:
        same = trial.phase == book.phase and book.may_be_stopped(trial.seed) and search.owns(trial)
        if not (same and trial.curve):
            continue
        past: Any = _Past(trial)
        nothing: Any = None  # neither ASHA nor the median rule asks the controller here
        scheduler.on_trial_add(nothing, past)
        results = [{"judged": share, "value": value} for _, share, value in trial.curve]
        for result in results:
            if scheduler.on_trial_result(nothing, past, result) == TrialScheduler.STOP:
                break
        else:
            scheduler.on_trial_complete(nothing, past, results[-1])


def _fit(
    search: Search,
    resources: dict[str, float],
    scheduler: TrialScheduler,
    searcher: Searcher | None,
    reports: Callback,
    beginning: dict[str, Any] | None = None,
) -> None:
    logging.getLogger("ray.tune").setLevel(logging.ERROR)
    root = search.store.root
    scratch = f"work/ray/tune-{search.name}"
    root.delete(scratch)  # of a search that was killed
    # a member's state must be where every machine can read it; nothing else is kept there
    tuner = tune.Tuner(
        tune.with_resources(TrialActor, tune.PlacementGroupFactory([resources])),
        param_space=beginning,
        tune_config=TuneConfig(
            search_alg=searcher, scheduler=scheduler, num_samples=-1 if searcher else 1,
            reuse_actors=True, trial_name_creator=_name, trial_dirname_creator=_name,
        ),
        run_config=RunConfig(
            name="tune", storage_path=root.path(scratch), storage_filesystem=root.fs, verbose=0,
            callbacks=[reports],
            # states of a population; without `False` every trial would leave its weights here
            checkpoint_config=CheckpointConfig(num_to_keep=4, checkpoint_at_end=False),
            # a process that died is replaced, and the trial goes on at its checkpoint
            failure_config=FailureConfig(max_failures=search.recipe.train.max_failures),
        ),
    )  # fmt: skip
    try:
        tuner.fit()
    finally:
        root.delete(scratch)


def _name(trial: Any) -> str:
    return str(trial.trial_id)


class _NotSaved:
    """Tune pickles the parts of an experiment; ours are never restored from that."""

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def save(self, checkpoint_path: str) -> None:
        return

    def restore(self, checkpoint_path: str) -> None:
        return


class _Suggestions(_NotSaved, Searcher):
    """Tune's view of a book."""

    def __init__(self, book: Book, at_once: int) -> None:
        super().__init__(metric="value", mode=_mode(book.search))
        self._book, self._at_once = book, at_once

    def suggest(self, trial_id: str) -> Any:
        if self._book.num_running >= self._at_once:
            return None
        started = self._book.next()
        if started is None:
            return Searcher.FINISHED if self._book.is_over() else None
        return {"assignment": Assignment(
            started.job, started.result, started.values, self._book.search.settings.metric,
            self._book.search.name, self._book.may_be_stopped(started.seed),
        )}  # fmt: skip

    def on_trial_complete(self, *arguments: Any, **more: Any) -> None:
        return


class _Reports(_NotSaved, Callback):
    """Writes what happens to trials into the book."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._last: dict[str, dict[str, Any]] = {}
        self._curves: dict[str, Curve] = {}

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any
    ) -> None:
        key = _fingerprint(trial)
        self._last[key] = result
        _add_point(self._curves.setdefault(key, []), result)
        self._book.tell_news(key, result)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        key = _fingerprint(trial)
        last, curve = self._last.pop(key, {}), self._curves.pop(key, [])
        started = self._book.running[key]
        facts = _cost(last)
        if "reason" in last:
            if not last["mendable"]:
                self._book.search.store.root.delete(started.job.work_folder)
            self._book.end(
                key, status="failed", reason=last["reason"], mendable=last["mendable"], **facts
            )
        elif "published" in last:
            result = self._book.search.store.manifest(started.result.folder)
            assert result is not None, "a finished trial has published its result"
            found = measured(result, self._book.search.settings.metric)
            self._book.end(key, **facts, **found)
        else:
            score = curve[-1][2] if curve else None
            self._book.search.store.root.delete(started.job.work_folder)
            self._book.end(key, status="stopped", score=score, curve=curve, **facts)
        _lighten(trial)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        """The process of a trial died, more often than it is replaced."""
        key = _fingerprint(trial)
        last = self._last.pop(key, {})
        self._curves.pop(key, None)
        error = trial.get_pickled_error()
        lines = [line for line in str(error).splitlines() if line.strip()] if error else []
        reason = f"its process died: {lines[0]}" if lines else "its process died"
        self._book.end(key, status="failed", reason=reason, mendable=True, **_cost(last))
        _lighten(trial)


class _MemberReports(_NotSaved, Callback):
    """Writes a population's members down as they end."""

    def __init__(self, search: Search, log: TrialLog, out: Callable[[str], None]) -> None:
        self._search, self._log, self._out = search, log, out
        self._curves: dict[str, Curve] = {}
        self._last: dict[str, dict[str, Any]] = {}
        self._members: dict[str, str] = {}

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        # the first time: whoever takes over from another gets its whole configuration
        self._members.setdefault(trial.trial_id, trial.config["assignment"].member)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any
    ) -> None:
        key = trial.trial_id
        self._last[key] = result
        curve = self._curves.setdefault(key, [])
        if _add_point(curve, result):
            share, value = curve[-1][1:]
            values = values_text(self._values(trial))
            self._out(f"member {self._members[key]}: {share:.0f}%  {shown_score(value)}  {values}")

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        last = self._last.get(trial.trial_id, {})
        self._end(trial, last.get("reason", ""), last.get("mendable", False))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        self._end(trial, "its process died", mendable=True)

    def _values(self, trial: Any) -> Values:
        return self._search.space.within(trial.config)

    def _end(self, trial: Any, reason: str, mendable: bool) -> None:
        values, seed = self._values(trial), self._search.seeds[0]
        job = self._search.job_of(values, seed)
        key = trial.trial_id
        last, curve = self._last.pop(key, {}), self._curves.pop(key, [])
        if not (reason or "value" in last):  # an earlier figure is not what it ended with
            reason = f"training ended with no {self._search.settings.metric} that is a number"
        self._log.add(Trial(
            fingerprint=f"{job.node.fingerprint}-{self._members[key]}", folder=job.folder,
            phase="population", values=values, seed=seed,
            status="failed" if reason else "finished", metric=self._search.settings.metric,
            score=None if reason else curve[-1][2], reason=reason, mendable=mendable, curve=curve,
            ended=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **_cost(last),
        ))  # fmt: skip


def _cost(last: dict[str, Any]) -> dict[str, Any]:
    """What a trial took, by its last result."""
    return {
        "steps": last.get("step", 0),
        "seconds": last.get("seconds", 0.0),
        "overhead_seconds": last.get("overhead_seconds", 0.0),
    }


def _add_point(curve: Curve, result: dict[str, Any]) -> bool:
    """Adds a result's value; one at that step or later is of a process that died."""
    if "value" not in result:
        return False
    curve[:] = [point for point in curve if point[0] < result["step"]]
    curve.append([result["step"], result["progress"], result["value"]])
    return True


def _lighten(trial: Any) -> None:
    """Drops what Tune would keep of an ended trial until the search ends: about 100 KiB each."""
    told = trial.run_metadata
    for held in (told.last_result, told.metric_analysis, told.metric_n_steps):
        held.clear()
    trial.config.clear()
    trial.evaluated_params.clear()


def _fingerprint(trial: Any) -> str:
    assignment: Assignment = trial.config["assignment"]
    return assignment.job.node.fingerprint
