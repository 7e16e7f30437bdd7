"""What a search prints while it runs: a table on a terminal, a line now and then elsewhere."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from statistics import mean

from stages.text import clock
from stages.variables import hide_values
from tune.definition import Search
from tune.space import Configuration
from tune.trial_queue import TrialQueue
from tune.trials import Trial, now

SECONDS_BETWEEN_LINES = 15.0


class LiveTable:
    """Best so far, what runs, how many stopped and failed, seconds per trial, and what is left.

    told: the first line of what it printed last.
    """

    def __init__(self, search: Search, out: Callable[[str], None]) -> None:
        self._search, self._out = search, out
        self._started = time.monotonic()
        self._began = now()
        self._last = 0.0
        self._ended: dict[str, Trial] = {}
        self._num_lines = 0
        self.told = ""

    def show(self, queue: TrialQueue, trial: Trial | None) -> None:
        """Takes in a trial that ended, or none, and prints unless that was done a moment ago."""
        if trial is not None:
            self._ended[trial.fingerprint] = trial
        terminal = sys.stdout.isatty()
        waited = time.monotonic() - self._last
        failed = trial is not None and trial.status == "failed"
        if failed and trial is not None:
            self._clear()
            reason = hide_values(trial.reason)
            self._out(f"failed: {values_text(trial.values)}, seed {trial.seed}: {reason}")
        too_soon = waited < (0.5 if terminal else SECONDS_BETWEEN_LINES)
        if not queue.running or (too_soon and not failed):
            return
        self._last += waited
        self._clear()
        lines = [self._summary(queue)]
        self.told = lines[0]
        for key, running in queue.running.items():
            result = queue.results.get(key, {})
            value = shown_score(result["value"]) if "value" in result else ""
            lines.append(
                f"  {result.get('progress', 0):3.0f}%  {value:>7}  seed {running.seed}  "
                f"{values_text(running.values)}"
            )
        if terminal:
            self._num_lines = len(lines)
        for line in lines if terminal else lines[:1]:
            self._out(line)

    @property
    def figures(self) -> dict[str, float]:
        """How many trials ended how, and the best score, for monitoring."""
        counts = Counter(trial.status for trial in self._ended.values())
        found: dict[str, float] = {f"trials_{status}": count for status, count in counts.items()}
        if (best := self._best()) is not None:
            found["best_score"] = best.score or 0.0
        return found

    def _best(self) -> Trial | None:
        trials = [t for t in self._ended.values() if t.status == "finished" and t.score is not None]
        choose = max if self._search.settings.maximise else min
        return choose(trials, key=lambda trial: trial.score or 0.0, default=None)

    def _clear(self) -> None:
        if self._num_lines:
            print(f"\x1b[{self._num_lines}F\x1b[J", end="")
        self._num_lines = 0

    def _summary(self, queue: TrialQueue) -> str:
        ended = list(self._ended.values())
        counts = ", ".join([f"{len(queue.running)} running", *status_counts(ended)])
        text = f"{time.strftime('%H:%M:%S')}  {queue.phase:<8} {counts}"
        if (best := self._best()) is not None:
            score = shown_score(best.score or 0.0)
            text += f"; best {score} ({values_text(best.values)}, seed {best.seed})"
        made = [trial for trial in ended if trial.ended >= self._began and not trial.reused]
        if made:
            seconds = mean(trial.seconds + trial.overhead_seconds for trial in made)
            text += f"; {seconds:.1f} s a trial"
            pace = (time.monotonic() - self._started) / len(made)  # several run at once
            text += f"; ETA {clock(queue.num_left() * pace)}"
        return text


def status_counts(trials: Iterable[Trial]) -> list[str]:
    """How many trials ended how, as ["3 finished", "1 failed"]."""
    counts = Counter(trial.status for trial in trials)
    return [f"{counts[s]} {s}" for s in ("finished", "stopped", "failed") if counts[s]]


def values_text(values: Configuration) -> str:
    """A configuration in few words."""
    names = short_names(values)
    return ", ".join(f"{names[path]} {shown(value)}" for path, value in values.items())


def short_names(paths: Iterable[str]) -> dict[str, str]:
    """By setting path its last part, or all of it where another one ends alike."""
    last = {path: path.rpartition(".")[2] for path in paths}
    ends = list(last.values())
    return {path: path if ends.count(end) > 1 else end for path, end in last.items()}


def shown_score(value: float) -> str:
    """A score as a person writes it: Spearman x 100 and losses below 1 alike."""
    return f"{value:.2f}" if abs(value) >= 10 else f"{value:.4g}"


def shown(value: object) -> str:
    """A value as a person writes it."""
    return f"{value:g}" if isinstance(value, float) else str(value)
