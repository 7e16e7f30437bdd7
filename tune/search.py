"""A whole search: inputs once, trials, the best again with fresh seeds, then its test sets.

    tune/<name>/trials.jsonl   every trial that has ended
    tune/<name>/search.yaml    settings of the newest run
    tune/<name>/best.yaml      the best setting as a recipe
    tune/<name>/report.html    ranking, pictures, test sets

Every step asks first what is known, so a search that was killed, or has got more trials or another
space, goes on with what is missing. A finished one is shown again without Ray.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import yaml

from pipeline.history import artifacts_in_history
from pipeline.job import Job
from pipeline.plan import make_plan
from pipeline.preflight import check_inputs
from pipeline.recipe import dump_recipe
from pipeline.runner import collect_results, make_nodes, run
from stages.errors import UserError
from tune.book import Book, setting_score
from tune.live import LiveTable
from tune.load import Search
from tune.space import Listed, Source, Tpe, Values, key_of, listed_settings
from tune.trials import Trial, TrialLog


@dataclass(frozen=True)
class Ranked:
    """A setting and its trials in one phase."""

    values: Values
    trials: list[Trial]

    @property
    def scores(self) -> list[float]:
        return [trial.score for trial in self.trials if trial.score is not None]

    @property
    def mean(self) -> float:
        return mean(self.scores)

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds; None with one."""
        return stdev(self.scores) if len(self.scores) > 1 else None


@dataclass(frozen=True)
class Outcome:
    """What a search has found.

    trials: those of the recipe as it is; `num_left_out` older ones are not.
    ranking: settings of which every trial finished, best first.
    confirmed: the first of them with fresh seeds, best first.
    best: first of `confirmed`, or of `ranking` where nothing is confirmed.
    tests: results of the best setting by seed, as `collect_results` gives them.
    """

    search: Search
    trials: list[Trial]
    num_left_out: int
    ranking: list[Ranked]
    confirmed: list[Ranked]
    best: Ranked
    tests: dict[int, dict[str, Any]]


def run_search(search: Search, address: str | None, out: Callable[[str], None]) -> Outcome:
    """Brings a search up to date.

    Raises:
        UserError: bad input; a cluster that is too small; all trials failed.
    """
    log = TrialLog(search.store.root, search.folder)
    with ExitStack() as stack:
        phases = _Phases(search, log, address, out, stack)
        phases.search()
        trials, num_left_out = own_trials(search, log)
        ranking = rank(search, trials, ("search", "population"))
        if not ranking:
            raise _all_failed(search, trials)
        confirmed = phases.confirm(ranking)
        best = (confirmed or ranking)[0]
        tests = phases.test(best)
    trials, num_left_out = own_trials(search, log)
    return Outcome(search, trials, num_left_out, ranking, confirmed, best, tests)


def own_trials(search: Search, log: TrialLog) -> tuple[list[Trial], int]:
    """Trials of the recipe as it is, and the number of others."""
    found = [trial for trial in log if search.owns(trial)]
    return found, sum(1 for _ in log) - len(found)


def rank(search: Search, trials: list[Trial], phases: tuple[str, ...]) -> list[Ranked]:
    """Settings whose trials all finished, by their mean score, best first."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        if trial.phase in phases:
            groups.setdefault(key_of(trial.values), []).append(trial)
    ranked = [
        Ranked(group[0].values, group)
        for group in groups.values()
        if all(trial.status == "finished" and trial.score is not None for trial in group)
    ]
    return sorted(ranked, key=lambda one: one.mean, reverse=search.settings.maximise)


def _all_failed(search: Search, trials: list[Trial]) -> UserError:
    failed = [trial for trial in trials if trial.status == "failed"]
    if not failed:
        return UserError(
            f"search {search.name}: no trial has finished, and the budget allows no more; raise "
            "search.budget"
        )
    reasons = [trial.reason for trial in failed]
    most = max(set(reasons), key=reasons.count)
    return UserError(
        f"search {search.name}: all {len(failed)} trials failed, {reasons.count(most)} of them "
        f"with: {most}"
    )


class _Phases:
    """The steps of a search; Ray starts when the first of them has work to do."""

    def __init__(
        self,
        search: Search,
        log: TrialLog,
        address: str | None,
        out: Callable[[str], None],
        stack: ExitStack,
    ) -> None:
        self._search, self._log, self._address, self._out = search, log, address, out
        self._stack = stack
        self._is_open = False
        self._started = time.monotonic()
        self._keeper = _Keeper(search, log)

    def search(self) -> None:
        """Trains what the searcher proposes."""
        search, settings = self._search, self._search.settings
        if settings.scheduler == "population":
            self._population()
            return
        book = self._book(self._source(), search.seeds, "search", self._within_budget)
        self._run(book, stops_early=True)

    def _population(self) -> None:
        """Trains the members that have not ended; they go on from and with each other."""
        search, settings = self._search, self._search.settings
        trials = own_trials(search, self._log)[0]
        ended = {trial.fingerprint.partition("-")[2] for trial in trials}
        members = {
            str(number): values
            for number, values in enumerate(listed_settings(settings, search.space))
            if str(number) not in ended
        }
        if not members:
            return
        jobs = {name: search.job_of(values, search.seeds[0]) for name, values in members.items()}
        resources = self._prepare(next(iter(jobs.values())))[0]
        from tune.actor import Assignment
        from tune.controller import run_population

        assignments = [
            Assignment(
                job, search.result_job(job), members[name], settings.metric, search.name,
                search.space, name,
            )
            for name, job in jobs.items()
        ]  # fmt: skip
        run_population(search, self._log, assignments, resources, self._out)

    def confirm(self, ranking: list[Ranked]) -> list[Ranked]:
        """The best settings again, with seeds that had no part in choosing them."""
        search, settings = self._search, self._search.settings.confirm
        chosen = [one.values for one in ranking[: settings.settings]]
        seeds = [max(search.seeds) + 1 + number for number in range(settings.seeds)]
        self._run(self._book(Listed(chosen), seeds, "confirm"), stops_early=False)
        trials = [t for t in own_trials(search, self._log)[0] if t.seed in seeds]
        wanted = {key_of(values) for values in chosen}
        return [one for one in rank(search, trials, ("confirm",)) if key_of(one.values) in wanted]

    def test(self, best: Ranked) -> dict[int, dict[str, Any]]:
        """Writes the best setting's recipe and evaluates its students, for each seed."""
        search = self._search
        self._keeper.drop_all_but({trial.folder for trial in best.trials})
        found = {}
        for number, trial in enumerate(best.trials):
            recipe = search.recipe_of(best.values, trial.seed)
            recipe = recipe.model_copy(update={"name": f"{search.name}-best"})
            steps = make_plan(recipe)
            missing = {step.node.name for step in steps if not step.done}
            if number == 0:
                text = dump_recipe(recipe).encode()
                search.store.root.write(f"{search.folder}/best.yaml", text)
                if missing:
                    self._open()
                run(recipe, self._address, out=self._out)
            elif "evaluate:after" in missing:
                self._open()
                make_nodes(recipe, ["evaluate:after"], self._out)
            folders = {step.node.name: step.folder for step in steps}
            found[trial.seed] = collect_results(search.store, folders)
        return found

    def _source(self) -> Source:
        search, settings = self._search, self._search.settings
        if settings.resolved_searcher != "tpe":
            return Listed(listed_settings(settings, search.space))
        tried: dict[str, list[Trial]] = {}
        for trial in own_trials(search, self._log)[0]:
            if trial.phase == "search" and not trial.mendable:
                tried.setdefault(key_of(trial.values), []).append(trial)
        known = [(trials[0].values, setting_score(trials)) for trials in tried.values()]
        return Tpe(settings, search.space, known)

    def _within_budget(self) -> bool:
        budget = self._search.settings.budget
        minutes = (time.monotonic() - self._started) / 60
        steps = sum(t.steps for t in self._log if t.phase != "confirm" and not t.reused)
        enough_time = budget.minutes is None or minutes < budget.minutes
        return enough_time and (budget.steps is None or steps < budget.steps)

    def _book(
        self,
        source: Source,
        seeds: list[int],
        phase: Any,
        may_start: Callable[[], bool] = lambda: True,
    ) -> Book:
        table = LiveTable(self._search, self._out)

        def watch(book: Book, trial: Trial | None) -> None:
            if trial is not None:
                self._keeper.add(trial)
            table.show(book, trial)

        return Book(self._search, self._log, source, seeds, phase, may_start, watch)

    def _run(self, book: Book, stops_early: bool) -> None:
        if not book.has_work():
            return
        resources, fits = self._prepare(next(iter(book.running.values())).job)
        from tune.controller import concurrency, run_trials

        run_trials(book, resources, concurrency(self._search, fits, self._out), stops_early)

    def _prepare(self, job: Job) -> tuple[dict[str, float], int]:
        """Starts Ray and makes what trials read; what a trial takes, and how many fit."""
        self._open()
        from tune.controller import trial_resources

        found = trial_resources(self._search, job)
        for recipe in self._search.preparations():
            inputs = next(s.node for s in make_plan(recipe) if s.node.name == "train").inputs
            make_nodes(recipe, inputs.values(), self._out)
        return found

    def _open(self) -> None:
        if self._is_open:
            return
        search = self._search
        search.store.check_writable()
        check_inputs(search.recipe, [s.node for s in make_plan(search.recipe) if not s.done])
        text = yaml.safe_dump(search.settings.model_dump(), sort_keys=False, allow_unicode=True)
        search.store.root.write(f"{search.folder}/search.yaml", text.encode())
        self._out(f"{search.name}: starting Ray")
        from pipeline.hosts import ray_session

        self._stack.enter_context(ray_session(self._address))
        self._is_open = True


class _Keeper:
    """Sees to it that only the best trials keep their weights.

    Weights that another run made, or that a run of a recipe refers to, are not its to drop.
    """

    def __init__(self, search: Search, log: TrialLog) -> None:
        self._search = search
        self._in_use = artifacts_in_history(search.store.root)
        self._held: dict[str, Trial] = {}
        for trial in own_trials(search, log)[0]:
            self.add(trial)

    def add(self, trial: Trial) -> None:
        """Counts a trial's weights in, and drops the worst if these are too many."""
        if trial.status != "finished" or trial.folder in self._in_use:
            return
        manifest = self._search.store.manifest(trial.folder)
        if manifest is None or manifest.stats.get("search") != self._search.name:
            return
        self._held[trial.folder] = trial
        searched = [one for one in self._held.values() if one.phase == "search"]
        searched.sort(key=lambda one: one.score or 0.0, reverse=self._search.settings.maximise)
        for one in searched[self._search.settings.keep :]:
            self._drop(one)

    def drop_all_but(self, folders: set[str]) -> None:
        """Drops confirmations, except these."""
        for trial in list(self._held.values()):
            if trial.phase == "confirm" and trial.folder not in folders:
                self._drop(trial)

    def _drop(self, trial: Trial) -> None:
        del self._held[trial.folder]
        self._search.store.forget(trial.folder)
