"""Population-based training on Ray Tune: bad members take over state and values of good ones."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from ray import tune
from ray.tune.schedulers import PopulationBasedTraining

from stages.errors import UserError
from tune.assignment import Assignment
from tune.definition import Search
from tune.progress import shown_score, values_text
from tune.ray_tune import Reports, cost_of, fit, mode_of
from tune.resources import Reservation
from tune.space import Space, draw
from tune.trials import Trial, TrialLog


def run_population(
    search: Search,
    log: TrialLog,
    assignments: list[Assignment],
    reservation: Reservation,
    out: Callable[[str], None],
    asked: threading.Event,
) -> None:
    """Trains all members, some at a time; bad ones take over state and values of good ones.

    A member's trial has the configuration with which it ended. Members that have not ended when it
    is asked to stop are not kept.
    """
    scheduler = Population(
        search, time_attr="judged", metric="value", mode=mode_of(search),
        perturbation_interval=100 * search.settings.interval,
        hyperparam_mutations=mutations_of(search.space),
        require_attrs=False, log_config=False,
    )  # fmt: skip
    # Tune lets no searcher propose a population
    param_space: dict[str, Any] = {"assignment": tune.grid_search(assignments)}
    for name in search.space.dimensions:
        param_space[name] = tune.sample_from(partial(_first_value, name))
    reports = MemberReports(search, log, out)
    fit(search, reservation, scheduler, reports, asked, param_space=param_space)


def mutations_of(space: Space) -> dict[str, Any]:
    """What values become: one of a list, or a fresh draw. Tied ones follow by themselves."""
    generator = np.random.default_rng()
    return {
        name: dimension.values or partial(draw, dimension, generator)
        for name, dimension in space.dimensions.items()
        if dimension.tied is None
    }


def _first_value(name: str, spec: Any) -> Any:
    return spec.config.assignment.values[name]


class Population(PopulationBasedTraining):
    """Ray's, which leaves out changes that the recipe refuses (alpha above its upper bound)."""

    def __init__(self, search: Search, **options: Any) -> None:
        super().__init__(**options)
        self._search = search

    def _get_new_config(self, trial: Any, trial_to_clone: Any) -> tuple[dict[str, Any], Any]:
        config, operations = super()._get_new_config(trial, trial_to_clone)
        try:
            self._search.work_of(self._search.space.within(config), self._search.seeds[0])
        except UserError:
            return dict(trial_to_clone.config), {}
        return config, operations


class MemberReports(Reports):
    """Writes a population's members down as they end."""

    def __init__(self, search: Search, log: TrialLog, out: Callable[[str], None]) -> None:
        super().__init__()
        self._search, self._log, self._out = search, log, out
        self._members: dict[str, str] = {}

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        # the first time: whoever takes over from another gets its whole configuration
        self._members.setdefault(trial.trial_id, trial.config["assignment"].member.name)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any
    ) -> None:
        super().on_trial_result(iteration, trials, trial, result)
        if "value" in result:
            values = values_text(self._search.space.within(trial.config))
            share, score = f"{result['progress']:.0f}%", shown_score(result["value"])
            self._out(f"member {self._members[trial.trial_id]}: {share}  {score}  {values}")

    def completed(self, trial: Any) -> None:
        self._end(trial)

    def died(self, trial: Any) -> None:
        self._end(trial, {"reason": "its process died", "retryable": True})

    def _end(self, trial: Any, error: dict[str, Any] | None = None) -> None:
        values, seed = self._search.space.within(trial.config), self._search.seeds[0]
        metric = self._search.settings.metric
        work = self._search.work_of(values, seed)
        last, curve = self.pop(trial)
        if "put_away" in last:
            return
        last = last | (error or {})
        reason = last.get("reason", "")
        if not (reason or "value" in last):  # an earlier figure is not what it ended with
            reason = f"training ended with no {metric} that is a number"
        self._log.add(Trial(
            fingerprint=f"{work.node.fingerprint}-{self._members[trial.trial_id]}",
            folder=work.folder, phase="population", values=values, seed=seed,
            status="failed" if reason else "finished", metric=metric,
            score=None if reason else curve[-1][2], reason=reason,
            retryable=last.get("retryable", False), trace=last.get("trace", ""), curve=curve,
            **cost_of(last),
        ))  # fmt: skip
