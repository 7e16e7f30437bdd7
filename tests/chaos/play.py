"""Plays a schedule: what its faults do, and what must be so when they are over."""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from pipeline.upkeep.contents import key_of
from tests.chaos.arena import BATCH, CONCURRENCY, Arena, Running
from tests.chaos.compare import check_same
from tests.chaos.schedule import Fault, Schedule
from tests.chaos.storage import Bucket, Disk, Storage, manifests

SECONDS_OF_OUTAGE = (1.0, 8.0)
# Beyond what makes a lease stale (tests/chaos/driver.py)
FROZEN_SECONDS = 5.0
CLOCKS = (-86_400, -3_600, -60, 60, 3_600, 86_400, 0)
MOST_RUNS = 4
# Of machines and workers: too many end a run
LOSSES = ("kill worker", "lose node", "freeze worker")
# Answers that a killed run may lose: of each request under way, to either endpoint
UNDER_WAY = CONCURRENCY * (1 + BATCH)


@dataclass
class Outcome:
    """What became of a schedule.

    survived: kinds of faults that the run went on through; ended: that ended it, so that it was
    started again; missed: whose time had not come when it ended, or that met nobody. lost: answers
    of endpoints that were not written down, as their process was killed or the disk could not be
    written; may_lose: how many may be. paid_twice: answers. stored_again: records of shards, and
    steps_again checkpoints, that were stored a second time.
    """

    seconds: float = 0.0
    survived: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    paid_twice: int = 0
    lost: int = 0
    may_lose: int = 0
    stored_again: int = 0
    steps_again: int = 0
    num_compared: int = 0


class Play:
    """Plays one schedule in an arena.

    Raises AssertionError where something is not as it must be.
    """

    def __init__(self, arena: Arena, schedule: Schedule) -> None:
        self._arena, self._schedule = arena, schedule
        self._storage: Storage = arena.storages[schedule.storage]
        self._draws = random.Random(schedule.seed + 1)
        self._runs: list[Running] = []
        self.outcome = Outcome()

    def __call__(self) -> Outcome:
        begun = time.monotonic()
        self.run()
        self.check()
        self.outcome.seconds = time.monotonic() - begun
        return self.outcome

    def run(self) -> None:
        """Until the faults are over and a run has ended well."""
        arena, schedule = self._arena, self._schedule
        subject = self._subject = arena.know(schedule.subject)
        arena.begin(self._storage, frozenset() if schedule.again else subject.lacking)
        self._num_writes = arena.num_writes(subject)
        self._begin_run()
        for fault in schedule.faults:
            if self._wait(fault):
                self._apply(fault)
            else:
                self.outcome.missed.append(fault.kind)
        arena.move_clock(0)
        self._settle()

    @property
    def log(self) -> str:
        """All that its runs have said."""
        return "\n".join(f"--- run {n}\n{run.output}" for n, run in enumerate(self._runs, 1))

    def _begin_run(self) -> Running:
        again = self._schedule.again and not self._runs  # those that come after go on with it
        self._runs.append(self._arena.run(self._subject, self._schedule.whole, again))
        return self._runs[-1]

    @property
    def _run(self) -> Running:
        return self._runs[-1]

    def _wait(self, fault: Fault) -> bool:
        """Until it is time for a fault; whether the run is still there."""
        share, seconds = fault.after
        while not self._run.ended:
            if (
                self._run.said(self._subject.started)
                and self._storage.num_writes() >= share * self._num_writes
            ):
                break
            time.sleep(0.02)
        with suppress(Exception):
            self._run.process.wait(seconds)  # the moment: some faults hit what writes nothing
        return not self._run.ended

    def _apply(self, fault: Fault) -> None:
        apply: dict[str, Callable[[], bool | None]] = {  # False: it met nobody
            "kill driver": self._kill_driver, "stop driver": self._stop_driver,
            "kill worker": self._kill_worker, "freeze driver": self._freeze_driver,
            "freeze worker": self._freeze_worker, "move clock": self._move_clock,
            "second run": self._second_run, "kill both runs": self._kill_both,
            "kill overtaker": self._kill_overtaker,
            "lose node": self._lose_node, "lose cluster": self._lose_cluster,
            "stumble": self._stumble, "outage": self._outage,
            "full disk": self._full_disk, "read-only disk": self._read_only_disk,
        }  # fmt: skip
        run = self._run
        if apply[fault.kind]() is False:
            self.outcome.missed.append(fault.kind)
            return
        went_on = not run.ended or run.process.returncode == 0
        (self.outcome.survived if went_on else self.outcome.ended).append(fault.kind)

    def _killing(self, kill: Callable[[], bool | None], all_of_it: bool = True) -> bool:
        """Kills; in half of all cases when answers have been written down, and no others come.

        Args:
            all_of_it: whoever asks endpoints dies; else nobody can tell when the dead have gone.

        Returns:
            whether it met anybody (kill says no by False).
        """
        lost, is_quiet = UNDER_WAY, self._draws.random() < 0.5
        if is_quiet:
            self._arena.quiesce(self._storage)
            lost = 0 if all_of_it else self._arena.under_way()
        struck = kill() is not False
        if is_quiet and not all_of_it:  # some may have been sent meanwhile
            lost = max(lost, self._arena.under_way())
        self.outcome.may_lose += lost * struck
        if not all_of_it:
            self._arena.may_answer.set()
        return struck

    def _kill_driver(self) -> None:
        self._killing(self._run.process.kill)
        self._run.end()
        self._arena.resume()
        self._begin_run()

    def _stop_driver(self) -> None:
        run = self._run
        run.process.send_signal(signal.SIGTERM)
        code = run.end()
        # 143: before it makes anything, or when all is made
        assert code in (0, 75, 143), f"SIGTERM: exit code {code}"
        self._begin_run()

    def _a_worker(self) -> int | None:
        """One that is at work, as soon as there is one; None where the run ends before."""
        worker = None
        while worker is None and not self._run.ended:
            worker = self._arena.a_worker(self._draws)
            time.sleep(0.02)
        return worker

    def _kill_worker(self) -> bool:
        worker = self._a_worker()
        if worker is None:
            return False
        return self._killing(lambda: _signal(worker, signal.SIGKILL), all_of_it=False)

    def _freeze_driver(self) -> None:
        """Another run takes over, and the frozen one wakes again."""
        frozen, other = self._frozen()
        with suppress(Exception):
            other.process.wait(FROZEN_SECONDS + 4.0)  # its start, and until the lease is stale
        frozen.process.send_signal(signal.SIGCONT)
        self._both_end(frozen, other)

    def _kill_overtaker(self) -> bool:
        """Another run takes over and is killed at work, before the frozen one wakes again."""
        frozen, other = self._frozen()
        while not (other.ended or other.said(self._subject.started)):
            time.sleep(0.02)
        with suppress(Exception):  # it soon ends where the frozen one's workers went on
            other.process.wait(self._draws.choice((0.0, 0.0, 0.1)))
        took_over = not other.ended
        self._killing(other.process.kill, all_of_it=False)
        other.end()
        frozen.process.send_signal(signal.SIGCONT)
        self._runs.remove(frozen)
        self._runs.append(frozen)
        return took_over

    def _frozen(self) -> tuple[Running, Running]:
        """The run, frozen, and another that begins."""
        frozen = self._run
        frozen.process.send_signal(signal.SIGSTOP)
        return frozen, self._begin_run()

    def _freeze_worker(self) -> bool:
        worker = self._a_worker()
        if worker is None or not _signal(worker, signal.SIGSTOP):
            return False
        with suppress(Exception):
            self._run.process.wait(FROZEN_SECONDS)
        _signal(worker, signal.SIGCONT)
        return True

    def _move_clock(self) -> None:
        self._arena.move_clock(self._draws.choice(CLOCKS))

    def _second_run(self) -> None:
        first = self._run
        self._both_end(first, self._begin_run())

    def _both_end(self, first: Running, second: Running) -> None:
        for run in (first, second):
            code = run.end()
            assert code == 0, f"exit code {code} of one of two runs"

    def _kill_both(self) -> None:
        first, second = self._run, self._begin_run()
        with suppress(Exception):
            second.process.wait(self._draws.choice((2.0, 4.0, 6.0)))

        def kill() -> None:
            first.process.kill()
            second.process.kill()

        self._killing(kill)
        first.end()
        second.end()
        self._arena.resume()
        self._begin_run()

    def _lose_node(self) -> None:
        self._killing(self._arena.lose_node, all_of_it=False)

    def _lose_cluster(self) -> None:
        self._killing(self._arena.lose_cluster)
        self._run.end()
        self._arena.resume()
        self._begin_run()

    def _stumble(self) -> bool:
        return self._failing(self._draws.uniform(5, 20), 0.3)

    def _outage(self) -> bool:
        return self._failing(self._draws.uniform(*SECONDS_OF_OUTAGE), 1.0)

    def _failing(self, seconds: float, share: float) -> bool:
        """Whether any request failed."""
        storage = self._storage
        assert isinstance(storage, Bucket)
        end = time.monotonic() + seconds
        storage.stumble(seconds, share, self._schedule.seed)
        while not (storage.num_failed or self._run.ended or time.monotonic() > end):
            time.sleep(0.02)
        return storage.num_failed > 0

    def _full_disk(self) -> bool:
        assert isinstance(self._storage, Disk)
        allowed = self.outcome.may_lose
        met = self._unwritable(self._storage.fill)
        self.outcome.may_lose = allowed  # the journal has kept room for what is in flight
        return met

    def _read_only_disk(self) -> bool:
        assert isinstance(self._storage, Disk)
        return self._unwritable(self._storage.make_read_only)

    def _unwritable(self, make: Callable[[], bool | None]) -> bool:
        """Until the run ends: with one message."""
        run = self._run
        if not self._killing(make, all_of_it=False):
            return False
        code = run.end()
        self._storage.heal()
        assert code in (0, 2), f"exit code {code} of a run whose disk cannot be written"
        if code:
            self._begin_run()
        return True

    def _settle(self) -> None:
        """The run ends, and where a fault ended it, another one."""
        code = self._run.end()
        self._storage.heal()
        while code and len(self._runs) < MOST_RUNS + 2 * len(self._schedule.faults):
            lost = [kind for kind in self.outcome.survived if kind in LOSSES]
            assert code == 2 and lost, f"exit code {code}, for which there is no reason"
            self.outcome.survived.remove(lost[-1])
            self.outcome.ended.append(lost[-1])
            self._begin_run()
            code = self._run.end()
        assert code == 0, f"exit code {code} of an undisturbed run"

    def check(self) -> None:
        """What was made is what an undisturbed run makes, and nothing was lost or paid twice."""
        arena, storage = self._arena, self._storage
        reference = {key_of(folder): one for folder, one in arena.made.items()}
        root = storage.root
        found = {key_of(folder): (folder, one) for folder, one in manifests(root).items()}
        made = self._subject.lacking if self._schedule.whole else self._subject.made
        for wanted in sorted(made):
            if key_of(wanted) not in reference:  # nothing asks for it
                continue
            assert key_of(wanted) in found, f"{wanted} is not made"
            folder, manifest = found[key_of(wanted)]
            check_same(root, folder, manifest, reference[key_of(wanted)])
            self.outcome.num_compared += 1
        times = Counter[str]()
        for server in arena.endpoints:
            times.update(server.answered)
        self.outcome.paid_twice = sum(times.values()) - len(times)
        self.outcome.lost = sum(times.values()) - storage.answers()
        assert self.outcome.paid_twice <= self.outcome.lost, (
            f"{self.outcome.paid_twice} answers were paid twice, {self.outcome.lost} lost"
        )
        assert self.outcome.lost <= self.outcome.may_lose, f"{self.outcome.lost} answers were lost"
        self.outcome.stored_again, self.outcome.steps_again = storage.written_again()
        for number, run in enumerate(self._runs, 1):
            assert "Traceback" not in run.output, f"run {number} printed a trace"


def _signal(process: int, number: signal.Signals) -> bool:
    """Whether there was such a process."""
    with suppress(ProcessLookupError):
        os.kill(process, number)
        return True
    return False
