"""Which trial comes next, and what became of those before. Knows neither Ray nor torch.

Every setting begins with its first seed; only one that finishes gets its other seeds, so that a
setting that was stopped or failed costs one trial. What is known already is never asked for again.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any, Literal

from pipeline.run.workspace import Workspace
from stages.errors import UserError
from stages.variables import hide_values
from tune.definition import Search
from tune.searchers import Source
from tune.space import Values, key_of
from tune.trials import Trial, TrialLog, measured, publish_result


@dataclass
class _Setting:
    """A setting that is being tried: seeds still to begin, and trials so far."""

    values: Values
    seeds: list[int]
    trials: list[Trial]
    running: int = 0


@dataclass(frozen=True)
class Started:
    """A trial that runs."""

    work: Workspace
    result: Workspace
    values: Values
    seed: int


class TrialQueue:
    """Hands out trials of one phase and keeps their results.

    Args:
        seeds: of every setting.
        may_start: False once the budget is spent.
        watch: called with every trial that ended, and with None when one has news.
    """

    def __init__(
        self,
        search: Search,
        log: TrialLog,
        source: Source,
        seeds: list[int],
        phase: Literal["search", "confirm", "population"],
        may_start: Callable[[], bool] = lambda: True,
        watch: Callable[["TrialQueue", Trial | None], None] = lambda queue, trial: None,
    ) -> None:
        self.search, self.log, self.phase = search, log, phase
        self._source, self._seeds = source, seeds
        self._may_start, self._watch = may_start, watch
        self._ready: deque[tuple[_Setting, int]] = deque()
        self._owner: dict[str, _Setting] = {}  # by fingerprint of the running trial
        self._seen: set[str] = set()
        self._next: Started | None = None
        self.running: dict[str, Started] = {}
        self.news: dict[str, dict[str, Any]] = {}

    def has_work(self) -> bool:
        """Whether any trial has to run; what is known already is written down."""
        self._next = self._next or self._find()
        return self._next is not None

    def next(self) -> Started | None:
        """The next trial to run; None when there is none now (see `is_over`)."""
        found, self._next = self._next or self._find(), None
        if found is not None:
            self.log.add(self._trial(found.work, found.values, found.seed, status="running"))
        return found

    def _find(self) -> Started | None:
        while self._may_start():
            while self._ready:
                setting, seed = self._ready.popleft()
                started = self._begin(setting, seed)
                if started is not None:
                    return started
            values = self._source.next()
            if values is None:
                break
            if self.search.setting_of(values) in self._seen:
                self._source.tell(values, None)
                continue
            self._seen.add(self.search.setting_of(values))
            setting = _Setting(values, list(self._seeds), [])
            self._ready.append((setting, setting.seeds.pop(0)))
        return None

    def num_left(self) -> int:
        """At most so many trials are ahead, running ones included."""
        waiting = [setting for setting, _ in self._ready] + list(self._owner.values())
        seeds = sum(1 + len(setting.seeds) for setting in waiting)
        return self._source.num_left() * len(self._seeds) + seeds

    @property
    def num_running(self) -> int:
        """Trials that were handed out."""
        return len(self.running) - (self._next is not None)

    def is_over(self) -> bool:
        """Whether no trial runs and `next` found none."""
        return not self.running

    def tell_news(self, fingerprint: str, result: dict[str, Any]) -> None:
        """How far a running trial is."""
        self.news[fingerprint] = result
        self._watch(self, None)

    def end(self, fingerprint: str, **facts: Any) -> Trial:
        """Writes down a trial that ran.

        Args:
            facts: fields of `Trial` that are known of it now.
        """
        started = self.running.pop(fingerprint)
        self.news.pop(fingerprint, None)
        setting = self._owner.pop(fingerprint)
        setting.running -= 1
        trial = self._trial(started.work, started.values, started.seed, **facts)
        self._close(setting, trial)
        return trial

    def _begin(self, setting: _Setting, seed: int) -> Started | None:
        """Starts a trial, unless its end is known."""
        try:
            work = self.search.work_of(setting.values, seed)
        except UserError as error:
            name = f"{key_of(setting.values)}, seed {seed}"  # it never got a fingerprint
            reason = hide_values(str(error))
            refused = Trial(
                fingerprint=name, folder="", phase=self.phase, values=setting.values, seed=seed,
                status="failed", metric=self.search.settings.metric, reason=reason,
                ended=_now(),
            )  # fmt: skip
            known = self.log.get(name)
            self._close(setting, known if known and known.reason == reason else refused)
            return None
        known = known_trial(self.search, self.log, work, setting.values, seed, self.phase)
        if known is not None:
            self._close(setting, known)
            return None
        result = self.search.result_work(work)
        fingerprint = work.node.fingerprint
        started = Started(replace(work, started=time.time()), result, setting.values, seed)
        self.running[fingerprint] = started
        self._owner[fingerprint] = setting
        setting.running += 1
        return started

    def _close(self, setting: _Setting, trial: Trial) -> None:
        if self.log.get(trial.fingerprint) != trial:
            self.log.add(trial)
        setting.trials.append(trial)
        if trial.status == "finished":
            self._ready.extend((setting, seed) for seed in setting.seeds)
        setting.seeds = []
        waiting = any(one is setting for one, _ in self._ready)
        if not setting.running and not waiting:
            self._source.tell(setting.values, setting_score(setting.trials))
        self._watch(self, trial)

    def _trial(self, work: Workspace, values: Values, seed: int, **facts: Any) -> Trial:
        return Trial(
            fingerprint=work.node.fingerprint, folder=work.folder, phase=self.phase, values=values,
            seed=seed, metric=self.search.settings.metric, rule=self.search.settings.rule,
            ended=_now(), **facts,
        )  # fmt: skip

    def may_be_stopped(self, seed: int) -> bool:
        """Whether a scheduler judges trials of this seed: a setting that finished once is not
        stopped at its other seeds, since its mean would be of the lucky ones."""
        return seed == self._seeds[0]


def known_trial(
    search: Search,
    log: TrialLog,
    work: Workspace,
    values: Values,
    seed: int,
    phase: Literal["search", "confirm", "population"],
) -> Trial | None:
    """What this search, another one or a run of the recipe has found out about a training."""
    metric = search.settings.metric
    trial = log.get(work.node.fingerprint)
    if trial is not None and trial.metric == metric and not trial.retryable:
        # a confirmation is trained to the end, whatever the search did with that seed
        still = trial.status == "failed" or trial.rule == search.settings.rule
        if trial.status == "finished" or (trial.phase == phase and still):
            return replace(trial, values=values)
    result = search.store.manifest(search.result_work(work).folder)
    if result is None and search.store.manifest(work.folder) is not None:
        publish_result(work, search.result_work(work))
        result = search.store.manifest(search.result_work(work).folder)
    if result is None:
        return None
    return Trial(
        fingerprint=work.node.fingerprint, folder=work.folder, phase=phase, values=values,
        seed=seed, metric=metric, ended=_now(), reused=True, **measured(result, metric),
    )  # fmt: skip


def setting_score(trials: Iterable[Trial]) -> float | None:
    """The mean over a setting's trials that measured anything; None: all failed."""
    scores = [trial.score for trial in trials if trial.score is not None]
    return mean(scores) if scores else None


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
