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

from pipeline.plan.graph import Node
from pipeline.plan.plan import make_plan
from pipeline.recipe.read import dump_recipe
from pipeline.report.figures import Results, collect
from pipeline.run.runner import check_nodes, make_needed, run
from pipeline.run.workspace import Workspace
from pipeline.store.history import artifacts_in_history
from stages.errors import UserError
from stages.packages import need
from tune.definition import Search
from tune.progress import LiveTable, values_text
from tune.searchers import Listed, Source, listed_settings
from tune.space import Values
from tune.trial_queue import TrialQueue
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
    tests: results of the best setting by seed, the best first.
    """

    search: Search
    trials: list[Trial]
    num_left_out: int
    ranking: list[Ranked]
    confirmed: list[Ranked]
    best: Ranked
    tests: dict[int, Results]


def run_search(search: Search, address: str | None, out: Callable[[str], None]) -> Outcome:
    """Brings a search up to date.

    Raises:
        UserError: bad input; a cluster that is too small; all trials failed.
    """
    need("tune", "a search")
    with ExitStack() as stack:
        root, who = search.store.root, f"search {search.name}"
        search.store.check_writable()
        stack.enter_context(root.held(f"{search.folder}/lock", who))
        text = yaml.safe_dump(search.plain_settings(), sort_keys=False, allow_unicode=True)
        root.write(f"{search.folder}/search.yaml", text.encode())
        log = TrialLog(root, search.folder)
        phases = _Phases(search, log, address, out, stack)
        phases.search()
        trials = counted(search, own_trials(search, log)[0])
        ranking = rank(search, trials)
        if not ranking:
            raise _nothing_found(search, trials)
        confirmed = phases.confirm(ranking)
        best = (confirmed or ranking)[0]
        tests = phases.test(best)
    trials, num_left_out = own_trials(search, log)
    return Outcome(search, trials, num_left_out, ranking, confirmed, best, tests)


def own_trials(search: Search, log: TrialLog) -> tuple[list[Trial], int]:
    """Trials of the recipe as it is, and the number of others."""
    found = [trial for trial in log if search.owns(trial)]
    return found, sum(1 for _ in log) - len(found)


def rank(search: Search, trials: list[Trial]) -> list[Ranked]:
    """Settings whose trials all finished, by their mean score, best first."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(search.setting_of(trial.values), []).append(trial)
    ranked = [
        Ranked(group[0].values, group)
        for group in groups.values()
        if all(trial.status == "finished" and trial.score is not None for trial in group)
    ]
    return sorted(ranked, key=lambda one: one.mean, reverse=search.settings.maximise)


def counted(search: Search, trials: list[Trial]) -> list[Trial]:
    """Trials that the ranking is made of: of the search's seeds, or the members of a population."""
    if search.settings.scheduler == "population":
        return [trial for trial in trials if trial.phase == "population"]
    return [t for t in trials if t.phase != "population" and t.seed in search.seeds]


def fresh_seeds(search: Search, trials: list[Trial]) -> list[int]:
    """Seeds of confirmations: above all that ever had a part in choosing."""
    used = [*search.seeds, *(trial.seed for trial in trials if trial.phase != "confirm")]
    return [max(used) + 1 + number for number in range(search.settings.confirm.seeds)]


def _nothing_found(search: Search, trials: list[Trial]) -> UserError:
    failed = [trial for trial in trials if trial.status == "failed"]
    if not failed:
        return UserError(
            f"search {search.name}: no trial has finished ({len(trials)} were stopped early); "
            "raise search.budget or search.trials"
        )
    reasons = [trial.reason for trial in failed]
    most = max(set(reasons), key=reasons.count)
    return UserError(
        f"search {search.name}: nothing to rank: {len(failed)} of {len(trials)} trials failed, "
        f"{reasons.count(most)} of them with: {most}"
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
        self._keeper = Keeper(search, log)

    def search(self) -> None:
        """Trains what the searcher proposes."""
        search, settings = self._search, self._search.settings
        if settings.scheduler == "population":
            self._population()
            return
        queue = self._queue(self._source(), search.seeds, "search", self._within_budget)
        self._run(queue, stops_early=True)

    def _population(self) -> None:
        """Trains the members that have not ended; they go on from and with each other."""
        search, settings = self._search, self._search.settings
        trials = own_trials(search, self._log)[0]
        ended = {trial.fingerprint.partition("-")[2] for trial in trials if not trial.retryable}
        members: dict[str, tuple[Values, Workspace]] = {}
        refused: UserError | None = None
        for values in listed_settings(settings, search.space):
            try:
                work = search.work_of(values, search.seeds[0])
            except UserError as error:
                refused = error
                self._out(f"left out of the population: {values_text(values)}: {error}")
                continue
            if (name := work.node.fingerprint[:8]) not in ended:
                members[name] = values, work
        if not members:
            if refused is not None and not ended:
                raise refused
            return
        resources = self._prepare(next(work for _, work in members.values()))[0]
        from tune.actor import Assignment, Member
        from tune.population import run_population

        document, seed = search.filled_in(), search.seeds[0]
        assignments = [
            Assignment(
                work, search.result_work(work), values, settings.metric, search.name, True,
                Member(name, search.space, document, seed),
            )
            for name, (values, work) in members.items()
        ]  # fmt: skip
        run_population(search, self._log, assignments, resources, self._out)

    def confirm(self, ranking: list[Ranked]) -> list[Ranked]:
        """The best settings again, with seeds that had no part in choosing them."""
        search, settings = self._search, self._search.settings.confirm
        chosen = [one.values for one in ranking[: settings.settings]]
        seeds = fresh_seeds(search, own_trials(search, self._log)[0])
        self._run(self._queue(Listed(chosen), seeds, "confirm"), stops_early=False)
        wanted = {search.setting_of(values) for values in chosen}
        fresh = [
            trial
            for trial in own_trials(search, self._log)[0]
            if trial.seed in seeds and search.setting_of(trial.values) in wanted
        ]
        return rank(search, fresh)

    def test(self, best: Ranked) -> dict[int, Results]:
        """Writes the best setting's recipe and evaluates its students, for each seed."""
        search = self._search
        self._keeper.drop_all_but({trial.folder for trial in best.trials})
        found = {}
        for number, trial in enumerate(best.trials):
            recipe = search.recipe_of(best.values, trial.seed)
            recipe = recipe.model_copy(update={"name": f"{search.name}-best"})
            plan = make_plan(recipe)
            missing = {name for name, planned in plan.nodes.items() if not planned.done}
            tests = [name for name in missing if _tests_student(plan.nodes[name].node)]
            if number == 0:
                text = dump_recipe(recipe).encode()
                search.store.root.write(f"{search.folder}/best.yaml", text)
                if missing:
                    self._open()
                run(recipe, self._address, out=self._out)
            elif tests:
                self._open()
                make_needed(recipe, tests, self._out)
            found[trial.seed] = collect(plan)
        return found

    def _source(self) -> Source:
        search = self._search
        begun = [trial for trial in self._log.begun() if search.owns(trial)]
        trials = own_trials(search, self._log)[0] + begun
        tried = {search.setting_of(t.values): t.values for t in trials if t.phase == "search"}
        return search.source(list(tried.values()))

    def _within_budget(self) -> bool:
        budget = self._search.settings.budget
        minutes = (time.monotonic() - self._started) / 60
        if budget.minutes is not None and minutes >= budget.minutes:
            return False
        if budget.steps is None:
            return True
        trials = own_trials(self._search, self._log)[0]
        return sum(t.steps for t in trials if t.phase != "confirm") < budget.steps

    def _queue(
        self,
        source: Source,
        seeds: list[int],
        phase: Any,
        may_start: Callable[[], bool] = lambda: True,
    ) -> TrialQueue:
        table = LiveTable(self._search, self._out)

        def watch(queue: TrialQueue, trial: Trial | None) -> None:
            if trial is not None:
                self._keeper.add(trial)
            table.show(queue, trial)

        return TrialQueue(self._search, self._log, source, seeds, phase, may_start, watch)

    def _run(self, queue: TrialQueue, stops_early: bool) -> None:
        if not queue.has_work():
            return
        resources, fits = self._prepare(next(iter(queue.running.values())).work)
        from tune.ray_tune import concurrency, run_trials

        run_trials(queue, resources, concurrency(self._search, fits, self._out), stops_early)

    def _prepare(self, work: Workspace) -> tuple[dict[str, float], int]:
        """Starts Ray and makes what trials read; what a trial takes, and how many fit."""
        self._open()
        from tune.ray_tune import trial_resources

        found = trial_resources(self._search, work)
        for recipe in self._search.preparations():
            inputs = make_plan(recipe).nodes["train"].node.inputs
            make_needed(recipe, inputs.values(), self._out)
        return found

    def _open(self) -> None:
        if self._is_open:
            return
        search = self._search
        planned = make_plan(search.recipe).nodes.values()
        check_nodes(one.node for one in planned if not one.done)
        self._out(f"{search.name}: starting Ray")
        from pipeline.run.session import ray_session

        self._stack.enter_context(ray_session(self._address))
        self._is_open = True


def _tests_student(node: Node) -> bool:
    label = node.stage.measures
    return label is not None and label.role == "after" and not label.ranks


class Keeper:
    """Sees to it that only the best settings keep their weights.

    Weights that another run made, or that a run of a recipe refers to, are not its to drop.
    """

    def __init__(self, search: Search, log: TrialLog) -> None:
        self._search = search
        self._runs: dict[str, set[str]] = {}
        self._held: dict[str, Trial] = {}
        for trial in own_trials(search, log)[0]:
            self.add(trial)

    def add(self, trial: Trial) -> None:
        """Counts a trial's weights in, and drops the worst setting's if there are too many."""
        if trial.status != "finished":
            return
        manifest = self._search.store.manifest(trial.folder)
        if manifest is None or manifest.stats.get("search") != self._search.name:
            return
        self._held[trial.folder] = trial
        searched = [one for one in self._held.values() if one.phase == "search"]
        for setting in rank(self._search, searched)[self._search.settings.keep :]:
            for one in setting.trials:
                self._drop(one)

    def drop_all_but(self, folders: set[str]) -> None:
        """Drops confirmations, except these."""
        for trial in list(self._held.values()):
            if trial.phase == "confirm" and trial.folder not in folders:
                self._drop(trial)

    def _drop(self, trial: Trial) -> None:
        del self._held[trial.folder]
        # asked anew each time: a run may have begun to use it while the search went on
        if trial.folder not in artifacts_in_history(self._search.store.root, self._runs):
            self._search.store.forget(trial.folder)
