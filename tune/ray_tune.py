"""Ray Tune: runs the trials of a queue and stops the hopeless ones.

Tune schedules and keeps the actors; what it suggests comes from the queue, and what happened goes
there. Its own record of the experiment is scratch.
"""

import logging
import math
import os
import tempfile
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from operator import attrgetter
from typing import Any

import ray
from ray import tune
from ray.tune import Callback, CheckpointConfig, FailureConfig, RunConfig, Stopper, TuneConfig
from ray.tune.schedulers import (
    AsyncHyperBandScheduler,
    FIFOScheduler,
    MedianStoppingRule,
    TrialScheduler,
)
from ray.tune.search import Searcher

from pipeline.run.board import start_board
from stages.errors import StorageError, UserError
from stages.files import Root, storage_error
from stages.patience import is_transient
from tune.actor import TrialActor
from tune.assignment import Assignment
from tune.definition import Search
from tune.ranking import own_trials
from tune.resources import Reservation
from tune.trial_queue import TrialQueue
from tune.trials import Curve, measured

QUIET_TUNE = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # failed trials measure nothing
    "TUNE_GLOBAL_CHECKPOINT_S": "100000",  # never resumed from
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C ends the search
    "RAY_AIR_NEW_OUTPUT": "0",  # our own table says how far it is
    "TUNE_MAX_PENDING_TRIALS_PG": "1",
}


def run_trials(
    queue: TrialQueue, reservation: Reservation, stops_early: bool, asked: threading.Event
) -> None:
    """Runs a queue's trials to its end, within a Ray session, or until it is asked to stop."""
    search = queue.search
    scheduler = make_scheduler(search) if stops_early else FIFOScheduler()
    if stops_early:
        replay(scheduler, search, queue)
    reports, suggestions = QueueReports(queue), _Suggestions(queue)
    fit(search, reservation, scheduler, reports, asked, suggestions, reservation.at_once)


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
        return _Median(grace_period=grace, min_time_slice=never, **common)
    return FIFOScheduler()


class _Median(MedianStoppingRule):
    """Ray's rule asks the last result of each trial for what those have not that may not be stopped
    (second seeds), or that failed."""

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        if result.keys() >= {self._time_attr, self._metric}:
            super().on_trial_complete(tune_controller, trial, result)


class _EarlierTrial:
    """A trial of an earlier run, as far as schedulers look at it."""

    def __init__(self, trial_id: str) -> None:
        self.trial_id, self.config, self.status = trial_id, dict[str, Any](), "TERMINATED"


def replay(scheduler: TrialScheduler, search: Search, queue: TrialQueue) -> None:
    """Shows a scheduler the curves of earlier runs, so that a continued search stops alike."""
    for trial in own_trials(search, queue.log):
        alike = trial.phase == queue.phase and queue.may_be_stopped(trial.seed)
        if not (alike and trial.curve):
            continue
        past: Any = _EarlierTrial(trial.fingerprint)
        nothing: Any = None  # neither ASHA nor the median rule asks the controller here
        scheduler.on_trial_add(nothing, past)
        results = [{"judged": share, "value": value} for _, share, value in trial.curve]
        for result in results:
            if scheduler.on_trial_result(nothing, past, result) == TrialScheduler.STOP:
                break
        else:
            scheduler.on_trial_complete(nothing, past, results[-1])


def _bundle(reservation: Reservation) -> tune.PlacementGroupFactory:
    labels = reservation.labels
    more: dict[str, Any] = {"bundle_label_selector": [labels]} if labels else {}
    return tune.PlacementGroupFactory([reservation.resources], **more)


def fit(
    search: Search,
    reservation: Reservation,
    scheduler: TrialScheduler,
    reports: "Reports",
    asked: threading.Event,
    suggestions: Searcher | None = None,
    max_concurrent: int | None = None,
    param_space: dict[str, Any] | None = None,
) -> None:
    """Runs Tune to its end, with what is suggested or, for a population, its `param_space`.

    Once it is `asked` to stop, trials save a checkpoint and end; so they do where one that ended
    cannot be written down.

    Raises:
        UserError: it cannot.
    """
    logging.getLogger("ray.tune").setLevel(logging.ERROR)
    # that its own record, which nobody reads, cannot be written is no news: ours says so itself
    logging.getLogger("ray.tune.execution.experiment_state").setLevel(logging.CRITICAL)
    board = start_board()
    asking = _Asking(lambda: asked.is_set() or reports.error is not None, board)
    trainable = tune.with_parameters(TrialActor, board=board)

    def tuner(place: dict[str, Any]) -> tune.Tuner:
        return tune.Tuner(
            tune.with_resources(trainable, _bundle(reservation)),
            param_space=param_space,
            tune_config=TuneConfig(
                search_alg=suggestions, scheduler=scheduler, num_samples=-1 if suggestions else 1,
                max_concurrent_trials=max_concurrent, reuse_actors=True,
                trial_name_creator=attrgetter("trial_id"),
                trial_dirname_creator=attrgetter("trial_id"),
            ),
            run_config=RunConfig(
                **place, name="tune", verbose=0, callbacks=[reports, asking], stop=asking,
                # states of a population; without `False` every trial would leave its weights here
                checkpoint_config=CheckpointConfig(num_to_keep=4, checkpoint_at_end=False),
                # a process that died is replaced, and the trial goes on at its checkpoint
                failure_config=FailureConfig(max_failures=search.recipe.train.max_failures),
            ),
        )  # fmt: skip

    with _environment(QUIET_TUNE), _scratch(search, shared=param_space is not None) as place:
        patiently(search.store.root, lambda: tuner(place).fit(), reports)
        if reports.error is not None:
            raise reports.error


def patiently(root: Root, run: Callable[[], object], reports: "Reports") -> None:
    """Runs Tune, which looks twice whether it can write before it begins trials: until then an
    object store is given time.

    Raises:
        StorageError: it cannot be read or written while there are trials.
    """

    def begin() -> None:
        try:
            run()
        except OSError as error:
            if reports.begun and is_transient(error):
                raise storage_error(root.uri, error) from error
            raise

    root.asked(begin)


@contextmanager
def _scratch(search: Search, shared: bool) -> Iterator[dict[str, Any]]:
    """Where Tune keeps its own record of the experiment, as settings of its run: on this machine,
    but for a population, whose members' states every machine must be able to read."""
    if not shared:
        with tempfile.TemporaryDirectory(prefix="sentray-tune-") as folder:
            yield {"storage_path": folder}
        return
    root, scratch = search.store.root, f"work/ray/tune-{search.name}"
    root.delete(scratch)  # of a search that was killed
    try:
        yield {"storage_path": root.path(scratch), "storage_filesystem": root.fs}
    except BaseException:
        with suppress(StorageError):  # what went wrong first is what is said
            root.delete(scratch)
        raise
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


class NotSaved:
    """Tune pickles the parts of an experiment; ours are never restored from that."""

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def save(self, checkpoint_path: str) -> None:
        return


class _Suggestions(NotSaved, Searcher):
    """Tune's view of a queue."""

    def __init__(self, queue: TrialQueue) -> None:
        super().__init__(metric="value", mode=mode_of(queue.search))
        self._queue = queue

    def suggest(self, trial_id: str) -> Any:
        assignment = self._queue.next()
        if assignment is None:
            return None if self._queue.running else Searcher.FINISHED
        return {"assignment": assignment}

    def on_trial_complete(self, *arguments: Any, **more: Any) -> None:
        return


class _Asking(NotSaved, Callback, Stopper):
    """Hands the wish to stop on to the trials; ends Tune once none runs, whatever still waits."""

    def __init__(self, asked: Callable[[], bool], board: Any) -> None:
        self._asked, self._board = asked, board
        self._told = self._idle = False

    def on_step_begin(self, iteration: int, trials: list[Any], **_: Any) -> None:
        if not self._asked():
            return
        if not self._told:
            ray.get(self._board.stop.remote())
            self._told = True
        self._idle = not any(trial.status == trial.RUNNING for trial in trials)

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self._idle


class Reports(NotSaved, Callback, ABC):
    """Keeps the newest result of every running trial, and its curve; writes down how trials end.

    error: the first that could not be. Tune prints what a callback raises, and goes on.
    begun: whether there are trials.
    """

    def __init__(self) -> None:
        self.error: UserError | None = None
        self.begun = False
        self._last: dict[str, dict[str, Any]] = {}
        self._curves: dict[str, Curve] = {}

    def setup(self, *arguments: Any, **more: Any) -> None:
        self.begun = True

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any
    ) -> None:
        self._last[trial.trial_id] = result
        curve = self._curves.setdefault(trial.trial_id, [])
        if "value" in result:  # a point at that step or later is of a process that died
            curve[:] = [point for point in curve if point[0] < result["step"]]
            curve.append([result["step"], result["progress"], result["value"]])

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        self._keep_error(self.completed, trial)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        self._keep_error(self.died, trial)

    def _keep_error(self, write: Callable[[Any], None], trial: Any) -> None:
        try:
            write(trial)
        except UserError as error:
            self.error = self.error or error

    @abstractmethod
    def completed(self, trial: Any) -> None:
        """A trial came to its end, whatever that is."""

    @abstractmethod
    def died(self, trial: Any) -> None:
        """The process of a trial died, and Tune gave it up."""

    def pop(self, trial: Any) -> tuple[dict[str, Any], Curve]:
        """The last result and the curve of a trial that ended."""
        return self._last.pop(trial.trial_id, {}), self._curves.pop(trial.trial_id, [])


class QueueReports(Reports):
    """Writes what happens to trials into the queue."""

    def __init__(self, queue: TrialQueue) -> None:
        super().__init__()
        self._queue = queue
        self._losses: Counter[str] = Counter()

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any
    ) -> None:
        super().on_trial_result(iteration, trials, trial, result)
        self._queue.tell_result(_fingerprint(trial), result)

    def completed(self, trial: Any) -> None:
        last, curve = self.pop(trial)
        if "put_away" in last:
            self._queue.put_away(_fingerprint(trial))
            return
        assignment: Assignment = trial.config["assignment"]
        search = self._queue.search
        store = search.store
        facts: dict[str, Any]
        if "published" in last:
            result = store.manifest(assignment.result.folder)
            assert result is not None, "a finished trial has published its result"
            facts = measured(result, assignment.metric, search.recipe.train.log_every_steps)
        elif "reason" in last:
            facts = {name: last[name] for name in ("reason", "retryable", "trace")}
            facts["status"] = "failed"
        else:
            score = curve[-1][2] if curve else None
            facts = {"status": "stopped", "score": score, "curve": curve}
        nobody_goes_on = not ("published" in last or last.get("retryable"))
        if nobody_goes_on and self._queue.holds(_fingerprint(trial)):
            store.root.delete(assignment.work.scratch)
        self._end(trial, last, facts)

    def died(self, trial: Any) -> None:
        fingerprint = _fingerprint(trial)
        # it does at once where a process dies while it gets its next trial (Ray 2.60)
        self._losses[fingerprint] += trial.run_metadata.num_failures
        if self._losses[fingerprint] <= self._queue.search.recipe.train.max_failures:
            self.pop(trial)
            self._queue.give_back(fingerprint)
            return
        error = trial.get_pickled_error()
        lines = [line for line in str(error).splitlines() if line.strip()] if error else []
        reason = f"its process died: {lines[0]}" if lines else "its process died"
        last, _curve = self.pop(trial)
        self._end(trial, last, {"status": "failed", "reason": reason, "retryable": True})

    def _end(self, trial: Any, last: dict[str, Any], facts: dict[str, Any]) -> None:
        self._queue.end(_fingerprint(trial), **facts, **cost_of(last))
        # what Tune would keep of an ended trial until the search ends: about 100 KiB each
        told = trial.run_metadata
        for held in (told.last_result, told.metric_analysis, told.metric_n_steps):
            held.clear()
        trial.config.clear()
        trial.evaluated_params.clear()


def cost_of(last: dict[str, Any]) -> dict[str, Any]:
    """What a trial took, by its last result."""
    return {
        "steps": last.get("step", 0),
        "seconds": last.get("seconds", 0.0),
        "overhead_seconds": last.get("overhead_seconds", 0.0),
    }


def _fingerprint(trial: Any) -> str:
    assignment: Assignment = trial.config["assignment"]
    return assignment.work.node.fingerprint
