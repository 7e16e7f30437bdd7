"""What monitoring sees of a run: Ray metrics, which Prometheus reads from the driver's machine.

The driver counts for all processes, since Ray forgets what a process counted when that ends.
Names and labels are documented in docs/cluster.md; Ray puts `ray_` before the names.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from pipeline.store.manifest import Usage

LABELS = ("recipe", "stage")
COUNTERS = {
    "sentray_rows_total": "Rows made.",
    "sentray_shards_total": "Shards made.",
    "sentray_process_seconds_total": "Seconds of processes that made something.",
    "sentray_core_seconds_total": "Seconds of the cores that these processes were given.",
    "sentray_cpu_seconds_total": "Seconds in which these cores computed.",
    "sentray_tokens_total": "Tokens that models were fed, without padding.",
    "sentray_positions_total": "Positions that models were fed, padding included.",
}
FIGURE = "sentray_figure"


class RunMetrics:
    """Metrics of one recipe, set in a process that has joined Ray."""

    def __init__(self, recipe: str) -> None:
        self._recipe = recipe

    def made(self, stage: str, num_rows: int, num_shards: int, usage: Usage) -> None:
        """Counts what was made, and what that took."""
        values = (
            num_rows, num_shards, usage.seconds, usage.core_seconds, usage.cpu_seconds,
            usage.tokens, usage.positions,
        )  # fmt: skip
        for name, value in zip(COUNTERS, values, strict=True):
            if value > 0:
                _counter(name).inc(value, {"recipe": self._recipe, "stage": stage})

    def figures(self, stage: str, figures: Mapping[str, float]) -> None:
        """Sets figures of the moment."""
        for name, value in figures.items():
            _gauge().set(value, {"recipe": self._recipe, "stage": stage, "figure": name})


@cache
def _counter(name: str) -> Any:
    from ray.util.metrics import Counter

    return Counter(name, COUNTERS[name], tag_keys=LABELS)


@cache
def _gauge() -> Any:
    from ray.util.metrics import Gauge

    about = "A figure of the moment, by name: loss, learning_rate, rows_per_second, ..."
    return Gauge(FIGURE, about, tag_keys=(*LABELS, "figure"))
