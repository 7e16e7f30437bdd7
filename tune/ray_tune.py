"""Ray Tune: runs the trials of a queue and stops the hopeless ones.

Tune schedules and keeps the actors; what it suggests comes from the queue, and what happened goes
there. Its own record of the experiment is scratch.
"""

import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray import tune
from ray.tune import Callback, CheckpointConfig, FailureConfig, RunConfig, TuneConfig
from ray.tune.schedulers import (
    AsyncHyperBandScheduler,
    FIFOScheduler,
    MedianStoppingRule,
    TrialScheduler,
)
from ray.tune.search import Searcher

from pipeline.run.hosts import placement
from pipeline.run.workspace import Workspace
from stages.errors import UserError
from tune.actor import Assignment, TrialActor
from tune.definition import Search
from tune.trial_queue import TrialQueue
from tune.trials import Curve, Trial, measured

QUIET_TUNE = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # failed trials measure nothing
    "TUNE_GLOBAL_CHECKPOINT_S": "100000",  # never resumed from
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C ends the search
    "RAY_AIR_NEW_OUTPUT": "0",  # our own table says how far it is
    "TUNE_MAX_PENDING_TRIALS_PG": "1",
}


def trial_resources(search: Search, work: Workspace) -> tuple[dict[str, float], int]:
    """What Tune reserves for a trial, and how many trials fit at once.

    A trial with several workers reserves nothing itself: its workers' cores are taken all at once,
    or not at all, by Ray Train, so trials cannot wait for each other for ever.

    Raises:
        UserError: not one trial fits into this cluster.
    """
    settings, workers = search.settings, work.node.stage.resources().workers
    assert workers is not None
    have = ray.cluster_resources()
    if workers.grouped:
        cores, gpus = placement(workers, work.name)
        fits = int(have["CPU"] // (cores * workers.count))
        if gpus:
            fits = min(fits, int(have["GPU"] // (gpus * workers.count)))
        # one byte of memory, since Tune takes no trial that needs nothing
        return {"CPU": 0, "memory": 1}, max(1, fits)
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cores = settings.cpus_per_trial or workers.cpus or 1
    share = settings.gpus_per_trial
    if share is None:
        share = float(workers.gpus or 0) or (1.0 if have.get("GPU") else 0.0)
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


def run_trials(
    queue: TrialQueue, resources: dict[str, float], at_once: int, stops_early: bool
) -> None:
    """Runs a queue's trials to its end, within a Ray session."""
    search = queue.search
    scheduler = make_scheduler(search) if stops_early else FIFOScheduler()
    if stops_early:
        replay(scheduler, search, queue)
    fit(search, resources, scheduler, _Suggestions(queue, at_once), _Reports(queue))


def mode_of(search: Search) -> str:
    return "max" if search.settings.maximise else "min"


def make_scheduler(search: Search) -> TrialScheduler:
    """Who decides which trials are stopped, by the share of their training."""
    settings = search.settings
    common: dict[str, Any] = {"time_attr": "judged", "metric": "value", "mode": mode_of(search)}
    grace: Any = 100 * settings.grace  # a share in percent, whatever the annotation says
    if settings.scheduler == "asha":
        return AsyncHyperBandScheduler(
            grace_period=grace, max_t=100, reduction_factor=settings.reduction, **common
        )
    if settings.scheduler == "median":
        never: Any = math.inf  # it would pause trials for which there are too few others
        return MedianStoppingRule(grace_period=grace, min_time_slice=never, **common)
    return FIFOScheduler()


class _Past:
    """A trial of an earlier run, as far as schedulers look at it."""

    def __init__(self, trial: Trial) -> None:
        self.trial_id = trial.fingerprint
        self.config: dict[str, Any] = {}
        self.status = "TERMINATED"


def replay(scheduler: TrialScheduler, search: Search, queue: TrialQueue) -> None:
    """Shows a scheduler the curves of earlier runs, so that a continued search stops alike."""
    for trial in queue.log:
        same = (
            trial.phase == queue.phase and queue.may_be_stopped(trial.seed) and search.owns(trial)
        )
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


def fit(
    search: Search,
    resources: dict[str, float],
    scheduler: TrialScheduler,
    searcher: Searcher | None,
    reports: Callback,
    beginning: dict[str, Any] | None = None,
) -> None:
    """Runs Tune to its end; `beginning` holds the members of a population, whom no searcher
    proposes."""
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
        with _environment(QUIET_TUNE):
            tuner.fit()
    finally:
        root.delete(scratch)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Variables that Tune reads, as long as it runs; those that are set already stay."""
    ours = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]


def _name(trial: Any) -> str:
    return str(trial.trial_id)


class NotSaved:
    """Tune pickles the parts of an experiment; ours are never restored from that."""

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def save(self, checkpoint_path: str) -> None:
        return

    def restore(self, checkpoint_path: str) -> None:
        return


class _Suggestions(NotSaved, Searcher):
    """Tune's view of a queue."""

    def __init__(self, queue: TrialQueue, at_once: int) -> None:
        super().__init__(metric="value", mode=mode_of(queue.search))
        self._queue, self._at_once = queue, at_once

    def suggest(self, trial_id: str) -> Any:
        if self._queue.num_running >= self._at_once:
            return None
        started = self._queue.next()
        if started is None:
            return Searcher.FINISHED if self._queue.is_over() else None
        return {"assignment": Assignment(
            started.work, started.result, started.values, self._queue.search.settings.metric,
            self._queue.search.name, self._queue.may_be_stopped(started.seed),
        )}  # fmt: skip

    def on_trial_complete(self, *arguments: Any, **more: Any) -> None:
        return


class _Reports(NotSaved, Callback):
    """Writes what happens to trials into the queue."""

    def __init__(self, queue: TrialQueue) -> None:
        self._queue = queue
        self._last: dict[str, dict[str, Any]] = {}
        self._curves: dict[str, Curve] = {}

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any
    ) -> None:
        key = _fingerprint(trial)
        self._last[key] = result
        add_point(self._curves.setdefault(key, []), result)
        self._queue.tell_news(key, result)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        key = _fingerprint(trial)
        last, curve = self._last.pop(key, {}), self._curves.pop(key, [])
        started = self._queue.running[key]
        facts = cost_of(last)
        if "reason" in last:
            if not last["retryable"]:
                self._queue.search.store.root.delete(started.work.scratch)
            self._queue.end(
                key, status="failed", reason=last["reason"], retryable=last["retryable"], **facts
            )
        elif "published" in last:
            result = self._queue.search.store.manifest(started.result.folder)
            assert result is not None, "a finished trial has published its result"
            found = measured(result, self._queue.search.settings.metric)
            self._queue.end(key, **facts, **found)
        else:
            score = curve[-1][2] if curve else None
            self._queue.search.store.root.delete(started.work.scratch)
            self._queue.end(key, status="stopped", score=score, curve=curve, **facts)
        _lighten(trial)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        """The process of a trial died, more often than it is replaced."""
        key = _fingerprint(trial)
        last = self._last.pop(key, {})
        self._curves.pop(key, None)
        error = trial.get_pickled_error()
        lines = [line for line in str(error).splitlines() if line.strip()] if error else []
        reason = f"its process died: {lines[0]}" if lines else "its process died"
        self._queue.end(key, status="failed", reason=reason, retryable=True, **cost_of(last))
        _lighten(trial)


def cost_of(last: dict[str, Any]) -> dict[str, Any]:
    """What a trial took, by its last result."""
    return {
        "steps": last.get("step", 0),
        "seconds": last.get("seconds", 0.0),
        "overhead_seconds": last.get("overhead_seconds", 0.0),
    }


def add_point(curve: Curve, result: dict[str, Any]) -> bool:
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
    return assignment.work.node.fingerprint
