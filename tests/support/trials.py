"""Searched settings, and trials that ended as a test says."""

from collections.abc import Mapping
from typing import Any

from tune.trial_queue import TrialQueue
from tune.trials import Trial

RATE = "train.learning_rate"
TAU2 = "train.objectives.listnet.student_temperature"
TAU3 = "train.objectives.listnet.teacher_temperature"


def trial(fingerprint: str, **changes: Any) -> Trial:
    """A trial that finished, but for `changes`."""
    fields: dict[str, Any] = {
        "fingerprint": fingerprint, "folder": f"train/{fingerprint}", "phase": "search",
        "values": {RATE: 0.1}, "seed": 1, "status": "finished", "metric": "dev_spearman",
        "score": 50.0,
    }  # fmt: skip
    return Trial(**(fields | changes))


def play(
    queue: TrialQueue, results: Mapping[tuple[float, int], dict[str, Any]]
) -> list[tuple[float, int]]:
    """Runs a queue with made-up ends of trials; returns what ran, in order."""
    ran = []
    while (started := queue.next()) is not None:
        name = (started.values[RATE], started.seed)
        ran.append(name)
        facts = results.get(name, {"status": "finished", "score": 50.0})
        queue.end(started.work.node.fingerprint, steps=12, **facts)
    return ran
