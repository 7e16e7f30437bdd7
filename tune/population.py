"""Population-based training on Ray Tune: bad members take over state and settings of good ones."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ray import tune
from ray.tune import Callback
from ray.tune.schedulers import PopulationBasedTraining

from stages.errors import UserError
from tune.actor import Assignment
from tune.definition import Search
from tune.progress import shown_score, values_text
from tune.ray_tune import NotSaved, add_point, cost_of, fit, mode_of
from tune.space import Values
from tune.trials import Curve, Trial, TrialLog


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
    scheduler = Population(
        search, time_attr="judged", metric="value", mode=mode_of(search),
        perturbation_interval=100 * settings.interval, hyperparam_mutations=mutations,
        require_attrs=False, log_config=False,
    )  # fmt: skip
    reports = MemberReports(search, log, out)
    # Tune lets no searcher propose a population
    beginning: dict[str, Any] = {"assignment": tune.grid_search(assignments)}
    for name in search.space.dimensions:
        beginning[name] = tune.sample_from(partial(_first_value, name))
    fit(search, resources, scheduler, None, reports, beginning)


def _first_value(name: str, spec: Any) -> Any:
    return spec.config.assignment.values[name]


class Population(PopulationBasedTraining):
    """Ray's, which leaves out changes that the recipe refuses (alpha above its upper bound)."""

    def __init__(self, search: Search, **settings: Any) -> None:
        super().__init__(**settings)
        self._search = search

    def _get_new_config(self, trial: Any, trial_to_clone: Any) -> tuple[dict[str, Any], Any]:
        found, operations = super()._get_new_config(trial, trial_to_clone)
        try:
            self._search.work_of(self._search.space.within(found), self._search.seeds[0])
        except UserError:
            return dict(trial_to_clone.config), {}
        return found, operations


class MemberReports(NotSaved, Callback):
    """Writes a population's members down as they end."""

    def __init__(self, search: Search, log: TrialLog, out: Callable[[str], None]) -> None:
        self._search, self._log, self._out = search, log, out
        self._curves: dict[str, Curve] = {}
        self._last: dict[str, dict[str, Any]] = {}
        self._members: dict[str, str] = {}

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        # the first time: whoever takes over from another gets its whole configuration
        self._members.setdefault(trial.trial_id, trial.config["assignment"].member.name)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any
    ) -> None:
        key = trial.trial_id
        self._last[key] = result
        curve = self._curves.setdefault(key, [])
        if add_point(curve, result):
            share, value = curve[-1][1:]
            values = values_text(self._values(trial))
            self._out(f"member {self._members[key]}: {share:.0f}%  {shown_score(value)}  {values}")

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        last = self._last.get(trial.trial_id, {})
        self._end(trial, last.get("reason", ""), last.get("retryable", False))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        self._end(trial, "its process died", retryable=True)

    def _values(self, trial: Any) -> Values:
        return self._search.space.within(trial.config)

    def _end(self, trial: Any, reason: str, retryable: bool) -> None:
        values, seed = self._values(trial), self._search.seeds[0]
        work = self._search.work_of(values, seed)
        key = trial.trial_id
        last, curve = self._last.pop(key, {}), self._curves.pop(key, [])
        if not (reason or "value" in last):  # an earlier figure is not what it ended with
            reason = f"training ended with no {self._search.settings.metric} that is a number"
        self._log.add(Trial(
            fingerprint=f"{work.node.fingerprint}-{self._members[key]}", folder=work.folder,
            phase="population", values=values, seed=seed,
            status="failed" if reason else "finished", metric=self._search.settings.metric,
            score=None if reason else curve[-1][2], reason=reason, retryable=retryable, curve=curve,
            ended=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **cost_of(last),
        ))  # fmt: skip
