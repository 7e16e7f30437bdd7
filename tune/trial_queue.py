"""Which trial comes next, and what became of those before. Knows neither Ray nor torch.

Every configuration begins with its first seed; only one that finishes gets its other seeds, so that
a configuration that was stopped or failed costs one trial. What is known already is never asked for
again.

A trial trains under a lease (pipeline/store/leases.py), as a run of a recipe does. What another run
trains is left for later, and read if that run finishes it.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any

from pipeline.run.work import NodeWork, silent
from pipeline.store.leases import Lease, Leases
from pipeline.store.manifest import Manifest
from stages.contract import Say
from stages.errors import UserError
from stages.variables import hide_values
from tune.assignment import Assignment
from tune.definition import Search
from tune.searchers import Searcher
from tune.space import Configuration, key_of
from tune.trials import Phase, Trial, TrialLog, measured, publish_result


@dataclass
class _Candidate:
    """A configuration that is being tried.

    seeds: still to begin. num_open: trials that run, or are ready to.
    """

    values: Configuration
    seeds: list[int]
    num_open: int = 1
    trials: list[Trial] = field(default_factory=list)


class TrialQueue:
    """Hands out trials of one phase and keeps their results.

    Args:
        seeds: of every configuration.
        may_start: False once the budget is spent.
        watch: called with every trial that ended, and with None when one has a new result.
        leases: None: nobody else is at work on the storage. say: is told who is waited for.
    """

    def __init__(
        self,
        search: Search,
        log: TrialLog,
        searcher: Searcher,
        seeds: list[int],
        phase: Phase,
        may_start: Callable[[], bool] = lambda: True,
        watch: Callable[["TrialQueue", Trial | None], None] = lambda queue, trial: None,
        leases: Leases | None = None,
        say: Say = silent,
    ) -> None:
        self.search, self.log, self.phase = search, log, phase
        self._searcher, self._seeds = searcher, seeds
        self._may_start, self._watch = may_start, watch
        self._leases, self._say = leases, say
        self._held: dict[str, Lease] = {}  # by fingerprint of the running trial
        self._elsewhere: deque[tuple[_Candidate, int]] = deque()  # another run trains these
        self._ready: deque[tuple[_Candidate, int]] = deque()
        self._owner: dict[str, _Candidate] = {}  # by fingerprint of the running trial
        self._seen: set[str] = set()
        self._next: Assignment | None = None
        self.running: dict[str, Assignment] = {}
        self.results: dict[str, dict[str, Any]] = {}  # the newest of every running trial

    def peek(self) -> Assignment | None:
        """What `next` will give, before any runs; what is known already is written down.

        Waits where other runs train all that is left.
        """
        self._next = self._next or self._find()
        while self._next is None and self._elsewhere and self._may_start():
            self._next = self._begin(*self._elsewhere.popleft(), waits=True) or self._find()
            self._look_again()
        return self._next

    def _look_again(self) -> None:
        """What other runs trained may be free by now."""
        self._ready.extend(self._elsewhere)
        self._elsewhere.clear()

    def next(self) -> Assignment | None:
        """The next trial to run; None when there is none before one of those that run has ended, or
        but those that other runs train."""
        assignment, self._next = self._next or self._find(), None
        if assignment is not None:
            self.log.add(self._trial(assignment, status="running"))
        return assignment

    def _find(self) -> Assignment | None:
        while self._may_start():
            while self._ready:
                assignment = self._begin(*self._ready.popleft())
                if assignment is not None:
                    return assignment
            values = self._searcher.next()
            if values is None:
                break
            name = self.search.configuration_id(values)
            if name in self._seen:
                self._searcher.tell(values, None)
                continue
            self._seen.add(name)
            first, *others = self._seeds
            self._ready.append((_Candidate(values, others), first))
        return None

    def num_left(self) -> int:
        """At most so many trials are ahead, running ones included."""
        ahead = [*self._ready, *self._elsewhere]
        waiting = [candidate for candidate, _ in ahead] + list(self._owner.values())
        seeds = sum(1 + len(candidate.seeds) for candidate in waiting)
        return self._searcher.num_left() * len(self._seeds) + seeds

    def tell_result(self, fingerprint: str, result: dict[str, Any]) -> None:
        """How far a running trial is."""
        self.results[fingerprint] = result
        self._watch(self, None)

    def end(self, fingerprint: str, **facts: Any) -> Trial:
        """Writes down a trial that ran; `facts` are fields of `Trial` that are known of it now."""
        self.results.pop(fingerprint, None)
        trial = self._trial(self.running.pop(fingerprint), **facts)
        self._close(self._owner.pop(fingerprint), trial)
        self._release(fingerprint)
        self._look_again()
        return trial

    def put_away(self, fingerprint: str) -> None:
        """Forgets a trial that runs no more and has not ended: the next search goes on with it."""
        self.results.pop(fingerprint, None)
        del self.running[fingerprint], self._owner[fingerprint]
        self._release(fingerprint)
        self._look_again()

    def give_back(self, fingerprint: str) -> None:
        """A trial whose process was lost is the next one again."""
        seed, candidate = self.running[fingerprint].seed, self._owner[fingerprint]
        self.put_away(fingerprint)
        self._ready.appendleft((candidate, seed))

    def _begin(self, candidate: _Candidate, seed: int, waits: bool = False) -> Assignment | None:
        """Starts a trial, unless its end is known or another run trains it."""
        metric = self.search.settings.metric
        try:
            work = self.search.work_of(candidate.values, seed)
        except UserError as error:
            name = f"{key_of(candidate.values)}, seed {seed}"  # it never got a fingerprint
            reason = hide_values(str(error))
            refused = Trial(
                fingerprint=name, folder="", phase=self.phase, values=candidate.values, seed=seed,
                status="failed", metric=metric, reason=reason,
            )  # fmt: skip
            known = self.log.get(name)
            self._close(candidate, known if known and known.reason == reason else refused)
            return None
        assignment = Assignment(
            work, self.search.result_work(work), candidate.values, seed, metric, self.search.name,
            may_be_stopped=self.may_be_stopped(seed),
        )  # fmt: skip
        known = self._known(assignment)
        if known is not None:
            self._close(candidate, known)
            return None
        if self._leases is not None:
            lease = self._leases.take(
                work.lease, lambda: self._is_over(work), self._say,
                lambda: self._said(work.node.fingerprint), waits,
            )  # fmt: skip
            if lease is None:
                self._elsewhere.append((candidate, seed))
                return None
            self._held[work.node.fingerprint] = lease
            stale_seconds = self._leases.stale_seconds
            work = replace(work, attempt=lease.holder.id, stale_seconds=stale_seconds)
            assignment = replace(assignment, work=work)
        self.running[work.node.fingerprint] = assignment
        self._owner[work.node.fingerprint] = candidate
        return assignment

    def _is_over(self, work: NodeWork) -> bool:
        """Whether a training that another run holds need not be waited for."""
        return not self._may_start() or work.store.manifest(work.folder) is not None

    def _said(self, fingerprint: str) -> str:
        """How far a trial is, for those who wait for it."""
        share = self.results.get(fingerprint, {}).get("progress", 0)
        return f"trial of search {self.search.name}, {share:.0f}%"

    def holds(self, fingerprint: str) -> bool:
        """Whether what a running trial has left unfinished is ours: no other run has taken over."""
        return self._leases is None or not self._leases.is_lost(self._held[fingerprint])

    def _release(self, fingerprint: str) -> None:
        if self._leases is not None:
            self._leases.release(self._held.pop(fingerprint))

    def _known(self, assignment: Assignment) -> Trial | None:
        """What this search, another search or a run of the recipe knows of a training."""
        work, result, store = assignment.work, assignment.result, self.search.store
        trial = self.log.get(work.node.fingerprint)
        if trial is not None and trial.metric == assignment.metric and not trial.retryable:
            # a confirmation is trained to the end, whatever the search did with that seed; so is
            # a seed that was the first when it was stopped, and is not now
            stopped_now = trial.rule == self.search.settings.rule and assignment.may_be_stopped
            still = trial.status == "failed" or stopped_now
            if trial.status == "finished" or (trial.phase == self.phase and still):
                facts: dict[str, Any] = {}
                if trial.status == "finished" and trial.metric == "loss":
                    # earlier versions wrote that of the last row down
                    found = store.manifest(result.folder)
                    facts = {} if found is None else self._measured(found, trial.metric)
                return replace(trial, values=assignment.values, **facts)
        manifest = store.manifest(result.folder)
        if manifest is None and store.manifest(work.folder) is not None:
            publish_result(work, result)
            manifest = store.manifest(result.folder)
        if manifest is None:
            return None
        return self._trial(assignment, reused=True, **self._measured(manifest, assignment.metric))

    def _measured(self, result: Manifest, metric: str) -> dict[str, Any]:
        return measured(result, metric, self.search.recipe.train.log_every_steps)

    def _close(self, candidate: _Candidate, trial: Trial) -> None:
        if self.log.get(trial.fingerprint) != trial:
            self.log.add(trial)
        candidate.trials.append(trial)
        candidate.num_open -= 1
        if trial.status == "finished":
            self._ready.extend((candidate, seed) for seed in candidate.seeds)
            candidate.num_open += len(candidate.seeds)
        candidate.seeds = []
        if candidate.num_open == 0:
            scores = [ended.score for ended in candidate.trials if ended.score is not None]
            self._searcher.tell(candidate.values, mean(scores) if scores else None)
        self._watch(self, trial)

    def _trial(self, assignment: Assignment, **facts: Any) -> Trial:
        return Trial(
            fingerprint=assignment.work.node.fingerprint, folder=assignment.work.folder,
            phase=self.phase, values=assignment.values, seed=assignment.seed,
            metric=assignment.metric, rule=self.search.settings.rule, **facts,
        )  # fmt: skip

    def may_be_stopped(self, seed: int) -> bool:
        """Whether a scheduler judges trials of this seed: a configuration that finished once is not
        stopped at its other seeds, since its mean would be of the lucky ones."""
        return seed == self._seeds[0]
