"""A whole search: inputs once, trials, the best again with fresh seeds, then its test sets.

    tune/<name>/trials.jsonl   every trial that has ended
    tune/<name>/log/           what happened, for machines (pipeline/run/log.py)
    tune/<name>/search.yaml    settings of the newest run
    tune/<name>/needs.json     artifacts that it, and its trials, read
    tune/<name>/best.yaml      the best configuration as a recipe
    tune/<name>/report.html    ranking, pictures, test sets
    tune/<name>/settings.html  pictures of what settings do, for the page of the best one's run

Every step asks first what is known, so a search that was killed, or has got more trials or another
space, goes on with what is missing. A finished one is shown again without Ray.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from pipeline.plan.plan import make_plan
from pipeline.recipe.read import dump_recipe
from pipeline.report.differences import with_differences
from pipeline.report.figures import Results, collect
from pipeline.run.log import RunLog
from pipeline.run.metrics import RunMetrics
from pipeline.run.runner import check_nodes, make_needed, run, told_of
from pipeline.run.stopping import asked_by_signals
from pipeline.run.work import NodeWork
from pipeline.store.leases import Leases
from pipeline.store.needs import needs_are_settled, needs_of, write_needs
from stages.contract import NO_FIGURES
from stages.encoder.hub import reading
from stages.errors import Stopped, UserError
from stages.packages import need
from stages.plain import as_yaml
from stages.recipe import Recipe
from tune.assignment import Assignment, Member
from tune.definition import Search
from tune.inputs import commits_of, preparations
from tune.progress import LiveTable, values_text
from tune.ranking import Ranked, counted, fresh_seeds, own_trials, rank
from tune.resources import Reservation, trial_resources
from tune.searchers import Listed, Searcher, listed_configurations
from tune.trial_queue import TrialQueue
from tune.trials import Phase, Trial, TrialLog
from tune.weights import Keeper


@dataclass(frozen=True)
class Outcome:
    """What a search came to.

    trials: those of the recipe as it is; `num_left_out` older ones are not.
    ranking: configurations of which every trial finished, best first.
    confirmed: the first of them with fresh seeds, best first.
    best: first of `confirmed`, or of `ranking` where nothing is confirmed.
    tests: results of the best configuration by seed, the best first.
    """

    search: Search
    trials: list[Trial]
    num_left_out: int
    ranking: list[Ranked]
    confirmed: list[Ranked]
    best: Ranked
    tests: dict[int, Results]

    @property
    def scored(self) -> list[Trial]:
        """Trials of the search itself that measured anything."""
        trials = counted(self.search, self.trials)
        return [trial for trial in trials if trial.score is not None]


def run_search(search: Search, address: str | None, out: Callable[[str], None]) -> Outcome:
    """Brings a search up to date.

    Raises:
        UserError: bad input; a cluster that is too small; all trials failed.
    """
    need("tune", "a search")
    with ExitStack() as stack:
        root = search.store.root
        search.store.check_writable()
        leases = stack.enter_context(Leases(root, out))
        phases: _Phases | None = None
        _wait_for_others(search, leases, out, lambda: phases.told if phases else "begins")
        run_log = stack.enter_context(RunLog(root, f"{search.folder}/log", out))
        root.write(f"{search.folder}/search.yaml", as_yaml(search.plain_settings).encode())
        log = TrialLog(root, search.folder)
        phases = _Phases(search, log, run_log, leases, address, out, stack)
        phases.search()
        trials = counted(search, own_trials(search, log))
        ranking = rank(search, trials)
        if not ranking:
            raise _nothing_to_rank(search, trials)
        confirmed = phases.confirm(ranking)
        best = (confirmed or ranking)[0]
        tests = phases.test(best)
    trials = own_trials(search, log)
    return Outcome(search, trials, len(log) - len(trials), ranking, confirmed, best, tests)


def _wait_for_others(
    search: Search, leases: Leases, out: Callable[[str], None], told: Callable[[], str]
) -> None:
    """Until no other process runs this search; what it has found is this one's."""

    leases.take(search.folder, lambda: False, told_of(f"search {search.name}", out), told)


def _nothing_to_rank(search: Search, trials: list[Trial]) -> UserError:
    reasons = [trial.reason for trial in trials if trial.status == "failed"]
    if not reasons:
        return UserError(
            f"search {search.name}: no trial has finished ({len(trials)} were stopped early); "
            "raise search.budget or search.trials"
        )
    most = max(set(reasons), key=reasons.count)
    return UserError(
        f"search {search.name}: nothing to rank: {len(reasons)} of {len(trials)} trials failed, "
        f"{reasons.count(most)} of them with: {most}"
    )


class _Phases:
    """The steps of a search; Ray starts when the first of them has work to do.

    told: how far it is.
    """

    def __init__(
        self,
        search: Search,
        log: TrialLog,
        run_log: RunLog,
        leases: Leases,
        address: str | None,
        out: Callable[[str], None],
        stack: ExitStack,
    ) -> None:
        self._search, self._log, self._address, self._out = search, log, address, out
        self._run_log, self._leases, self.told = run_log, leases, "begins"
        self._stack, self._asked = stack, threading.Event()
        self._is_open = False
        self._needs = set(needs_of(search.store.root, search.folder))
        self._started = time.monotonic()
        self._keeper = Keeper(search, log)

    def search(self) -> None:
        """Trains what the searcher proposes."""
        if self._search.settings.scheduler == "population":
            self._population()
        else:
            searcher = self._searcher()
            self._say_if_few(searcher.num_left())
            self._run(searcher, self._search.seeds, "search")

    def _say_if_few(self, found: int) -> None:
        trials = self._search.settings.trials
        if trials is not None and found < trials:
            self._out(f"trials: {trials:,}, but only {found:,} were found that differ")

    def _population(self) -> None:
        """Trains the members that have not ended; they go on from and with each other."""
        search, seed, document = self._search, self._search.seeds[0], self._search.filled_in()
        trials = own_trials(search, self._log)
        ended = {trial.fingerprint.partition("-")[2] for trial in trials if not trial.retryable}
        members: dict[str, Assignment] = {}
        refused: UserError | None = None
        every = listed_configurations(search.settings, search.space)
        self._say_if_few(len(every))
        for values in every:
            try:
                work = search.work_of(values, seed)
            except UserError as error:
                refused = error
                self._out(f"left out of the population: {values_text(values)}: {error}")
                continue
            if (name := work.node.fingerprint[:8]) not in ended:
                members[name] = Assignment(
                    work, search.result_work(work), values, seed, search.settings.metric,
                    search.name, member=Member(name, search.space, document),
                )  # fmt: skip
        if members:
            assignments = list(members.values())
            reservation = self._prepare(assignments[0].work)
            from tune.population import run_population

            with self._until_asked():
                run_population(
                    search, self._log, assignments, reservation, self._of_members, self._asked
                )
        elif refused is not None and not ended:
            raise refused

    def _of_members(self, line: str) -> None:
        self._out(line)
        self.told = line
        self._run_log.add("population", "said", line, NO_FIGURES)
        self._run_log.write_if_due()

    def confirm(self, ranking: list[Ranked]) -> list[Ranked]:
        """The best configurations again, with seeds that had no part in choosing them."""
        search = self._search
        chosen = ranking[: search.settings.confirm.settings]
        seeds = fresh_seeds(search, own_trials(search, self._log))
        self._run(Listed([ranked.values for ranked in chosen]), seeds, "confirm")
        fresh = [trial for trial in own_trials(search, self._log) if trial.seed in seeds]
        ids = {ranked.id for ranked in chosen}
        return [ranked for ranked in rank(search, fresh) if ranked.id in ids]

    def test(self, best: Ranked) -> dict[int, Results]:
        """Writes the best configuration's recipe and evaluates its students, for each seed."""
        search = self._search
        self.told = "tests of the best"
        self._keeper.drop_all_but({trial.folder for trial in best.trials})
        results = {}
        for number, trial in enumerate(best.trials):
            recipe = search.best_recipe(best.values, trial.seed)
            plan = make_plan(recipe)
            missing = [planned.node for planned in plan.nodes.values() if planned.to_do]
            tests = [
                node.name for node in missing if (label := node.stage.measures) and label.is_student
            ]
            if number == 0:
                text = dump_recipe(recipe).encode()
                search.store.root.write(f"{search.folder}/best.yaml", text)
                if missing:
                    self._open()
                run(recipe, self._address, pools=search.pools, out=self._out)
            elif tests:
                self._open()
                self._note_needs([recipe])
                self._make(recipe, tests)
            results[trial.seed] = with_differences(plan.store, collect(plan))
        return results

    def _searcher(self) -> Searcher:
        search = self._search
        begun = [trial for trial in self._log.begun() if search.owns(trial)]
        tried = {
            search.configuration_id(trial.values): trial.values
            for trial in own_trials(search, self._log) + begun
            if trial.phase == "search"
        }
        return search.searcher(list(tried.values()))

    def _within_budget(self) -> bool:
        budget = self._search.settings.budget
        minutes = (time.monotonic() - self._started) / 60
        if budget.minutes is not None and minutes >= budget.minutes:
            return False
        if budget.steps is None:
            return True
        trials = own_trials(self._search, self._log)
        return sum(trial.steps for trial in trials if trial.phase != "confirm") < budget.steps

    def _run(self, searcher: Searcher, seeds: list[int], phase: Phase) -> None:
        """Trains what is not known. Confirmations have no budget, and are not stopped early."""
        table = LiveTable(self._search, self._out)
        metrics = RunMetrics(self._search.name)
        may_start = self._within_budget if phase == "search" else lambda: True

        def watch(queue: TrialQueue, trial: Trial | None) -> None:
            if trial is not None:
                self._keeper.add(trial)
                score = {} if trial.score is None else {"score": trial.score}
                text = f"{trial.status}: {values_text(trial.values)}, seed {trial.seed}"
                text += f": {trial.reason}" if trial.reason else ""
                self._run_log.add(phase, "said", text, score)
            table.show(queue, trial)
            self.told = table.told or self.told
            if self._run_log.is_due:
                self._run_log.add(phase, "said", self.told, table.figures)
                self._run_log.write()
            metrics.figures("search", table.figures)

        def goes_on() -> bool:
            return not self._asked.is_set() and may_start()

        say = told_of(f"search {self._search.name}", self._out)
        queue = TrialQueue(
            self._search, self._log, searcher, seeds, phase, goes_on, watch, self._leases, say
        )
        first = queue.peek()
        if first is None:
            return
        reservation = self._prepare(first.work)
        from tune.ray_tune import run_trials

        with self._until_asked():
            while first is not None:
                run_trials(queue, reservation, phase == "search", self._asked)
                first = queue.peek()  # what other runs have left; without Ray's cores meanwhile

    @contextmanager
    def _until_asked(self) -> Iterator[None]:
        """Signals ask for an end; raises Stopped at the end if one has."""
        with asked_by_signals(self._asked, self._out):
            yield
        if self._asked.is_set():
            raise Stopped

    def _prepare(self, work: NodeWork) -> Reservation:
        """Starts Ray and makes what trials read; what a trial takes."""
        self._open()
        reservation = trial_resources(self._search.settings, work, self._out)
        recipes = preparations(self._search)
        self._note_needs(recipes)
        for recipe in recipes:
            self._make(recipe, make_plan(recipe).nodes["train"].node.inputs.values())
        return reservation

    def _make(self, recipe: Recipe, names: Iterable[str]) -> None:
        search = self._search
        make_needed(recipe, names, self._out, search.pools, search.folder, self._run_log)

    def _note_needs(self, recipes: Iterable[Recipe]) -> None:
        """Says what is needed from now on, before anything of it is looked for."""
        search = self._search
        for recipe in recipes:
            self._needs.update(make_plan(recipe).folders.values())
        with needs_are_settled(search.store.root, told_of(search.name, self._out)):
            write_needs(search.store.root, search.folder, self._needs)

    def _open(self) -> None:
        if self._is_open:
            return
        plan = make_plan(self._search.recipe)
        self._stack.enter_context(reading(commits_of(self._search)))
        check_nodes(planned.node for planned in plan.nodes.values() if planned.to_do)
        self._out(f"{self._search.name}: starting Ray")
        from pipeline.run.session import ray_session

        self._stack.enter_context(ray_session(self._address, self._out))
        self._is_open = True
