"""What is known of every trial: `tune/<name>/trials.jsonl`, a line when it begins and when it ends.

Object stores cannot append: there every trial is an object of its own, `tune/<name>/trials/...`, so
that two processes never write the same one for different trials.

A trial is the training of one configuration with one seed. Its result is an artifact (`trial/...`,
without weights), so that another search finds it; this file is what the search itself has seen:
those stopped early and failed too. A later line about the same trial replaces an earlier one.
"""

import json
import math
import os
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from operator import itemgetter
from typing import Any, Literal

from pipeline.run.work import NodeWork
from pipeline.store.manifest import Manifest
from stages.contract import Fingerprinted, Stage
from stages.files import Root, storage_error
from stages.variables import hide_values
from tune.space import Configuration

# [step, share of the training in percent, value of the metric]
Curve = list[list[float]]
Phase = Literal["search", "confirm", "population"]


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@dataclass(frozen=True)
class Trial:
    """One trial.

    fingerprint: of its training; folder: where that training's artifact is, or was.
    phase: confirm: with a fresh seed.
    values: its configuration.
    status: running; finished; stopped early; or failed, for `reason`.
    rule: by which the search stopped trials then.
    score: the metric at the chosen checkpoint; of a stopped trial, its last value.
    steps: of this training, over all runs of the search.
    seconds: of training in the process that ended it; overhead_seconds: all else since that
        process was free, until the result was published.
    reused: the result was there already.
    retryable: the failure was not of the configuration's making, so it is tried again.
    trace: where in the code it failed unexpectedly; a worker's stderr is read by nobody.
    """

    fingerprint: str
    folder: str
    phase: Phase
    values: Configuration
    seed: int
    status: Literal["running", "finished", "stopped", "failed"]
    metric: str
    score: float | None = None
    reason: str = ""
    rule: str = ""
    steps: int = 0
    seconds: float = 0.0
    overhead_seconds: float = 0.0
    curve: Curve = field(default_factory=list)
    reused: bool = False
    retryable: bool = False
    trace: str = ""
    ended: str = field(default_factory=now)


class TrialLog:
    """The trials of one search that have ended, in that order."""

    def __init__(self, root: Root, folder: str) -> None:
        self._root = root
        self._folder = folder
        self._trials: dict[str, Trial] = {}
        self._begun: dict[str, Trial] = {}
        self._torn = False
        try:
            lines = root.read(f"{folder}/trials.jsonl").split(b"\n")
        except FileNotFoundError:
            lines = [b""]
        self._torn = lines[-1] != b""  # the last line of a killed search
        for line in [*lines, *self._objects()]:
            try:
                row = json.loads(line)
                if "mendable" in row:  # as written before version 0.2
                    row["retryable"] = row.pop("mendable")
                self._keep(Trial(**row))
            except (ValueError, TypeError):
                continue

    def _objects(self) -> list[bytes]:
        """Trials of an object store, in the order in which they ended."""
        if self._root.is_local:
            return []
        names = [
            f"{self._folder}/trials/{name}" for name in self._root.list(f"{self._folder}/trials")
        ]
        return sorted(self._root.read_all(names), key=_ended)

    def __iter__(self) -> Iterator[Trial]:
        return iter(list(self._trials.values()))

    def __len__(self) -> int:
        return len(self._trials)

    def get(self, fingerprint: str) -> Trial | None:
        return self._trials.get(fingerprint)

    def begun(self) -> list[Trial]:
        """Trials that have begun and not ended: they run, or their search was killed."""
        return list(self._begun.values())

    def add(self, trial: Trial) -> None:
        """Keeps a trial, instead of what was known of it. Its line is written afterwards."""
        hidden = hide_values(trial.reason), hide_values(trial.trace)
        trial = replace(trial, reason=hidden[0], trace=hidden[1])
        self._keep(trial)
        if not self._root.is_local:
            self._root.write(f"{self._folder}/trials/{trial.fingerprint}.json", _line(trial))
            return
        path = self._root.path(f"{self._folder}/trials.jsonl")
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "ab") as file:
                file.write(b"\n" * self._torn + _line(trial))
        except OSError as error:
            raise storage_error(self._root.uri, error) from None
        self._torn = False

    def lines(self) -> bytes:
        """All trials that have ended, as trials.jsonl has them."""
        return b"".join(map(_line, self))

    def _keep(self, trial: Trial) -> None:
        self._begun.pop(trial.fingerprint, None)
        trials = self._begun if trial.status == "running" else self._trials
        trials.pop(trial.fingerprint, None)  # the newest stands last
        trials[trial.fingerprint] = trial


def _line(trial: Trial) -> bytes:
    return json.dumps(asdict(trial)).encode() + b"\n"


def _ended(line: bytes) -> str:
    try:
        return str(json.loads(line)["ended"])
    except (ValueError, TypeError, KeyError):
        return ""


def curve_of(history: list[dict[str, Any]], metric: str) -> Curve:
    """The metric's values in rows of training, where they are numbers."""
    return [
        [row["step"], 100 * row["step"] / row["num_steps"], row[metric]]
        for row in history
        if math.isfinite(row.get(metric, math.nan))
    ]


def recent_loss(history: list[dict[str, Any]], step: int, num_steps: int) -> float:
    """The mean loss at a row's step, over the rows of at least the last `num_steps` steps.

    A row is the mean since the row before it: after an evaluation, or at the end, perhaps of one
    batch, whose loss is mostly luck.
    """
    place = bisect_right(history, step, key=itemgetter("step"))
    total, since = 0.0, step
    while since and step - since < num_steps:
        place -= 1
        since = history[place - 1]["step"] if place else 0
        total += history[place]["loss"] * (history[place]["step"] - since)
    return total / (step - since)


def score_of(curve: Curve, metric: str, best_step: int) -> float | None:
    """The metric at the checkpoint that training chose, or the last value of a loss.

    None where it was no number there: an earlier one is not that checkpoint's.
    """
    if metric == "loss":
        return curve[-1][2] if curve else None
    chosen = [value for step, _, value in curve if step == best_step]
    return chosen[-1] if chosen else None


@dataclass(frozen=True)
class TrialResult(Stage):
    """What a training measured, without its weights; it has the training's fingerprint."""

    kind = "trial"
    version = 1

    def identity(self, inputs: Mapping[str, Fingerprinted]) -> dict[str, Any]:
        raise NotImplementedError("a trial's result has the identity of its training")


def publish_result(work: NodeWork, result: NodeWork) -> None:
    """Publishes what a finished training measured."""
    trained = work.store.open(work.folder, work.name)
    lines = trained.file_path("metrics/metrics.jsonl").read_text().splitlines()
    result.publish(trained.stats | {"history": [json.loads(line) for line in lines]})


def measured(result: Manifest, metric: str, loss_steps: int) -> dict[str, Any]:
    """What a published result says of its trial, as fields of `Trial`.

    Args:
        loss_steps: what a loss is the mean of (see `recent_loss`).
    """
    history = result.stats["history"]
    if metric == "loss":
        recent = [recent_loss(history, row["step"], loss_steps) for row in history]
        history = [row | {"loss": loss} for row, loss in zip(history, recent, strict=True)]
    curve = curve_of(history, metric)
    score = score_of(curve, metric, result.stats["best_step"])
    if score is None:
        reason = f"training measured no {metric} that is a number; look at train.dev"
        return {"status": "failed", "reason": reason}
    return {"status": "finished", "curve": curve, "score": score}
