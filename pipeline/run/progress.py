"""What the driver makes known while nodes are made: lines with the time of day, few enough to read,
and all of it in the run's log and its metrics."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.run.log import RunLog
from pipeline.run.metrics import RunMetrics
from pipeline.store.manifest import Usage
from stages.contract import NO_FIGURES
from stages.plain import shortened
from stages.text import clock
from stages.variables import hide_values

# Lines about the same node come at most this often, so that a terminal stays readable.
SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """Tells what happens to nodes; safe to call from their threads."""

    def __init__(self, out: Callable[[str], None], log: RunLog, metrics: RunMetrics) -> None:
        self._out, self.log, self.metrics = out, log, metrics
        self._last: dict[str, float] = {}
        self._said: dict[str, str] = {}
        self._newest = ""
        self._lock = threading.Lock()

    def say(
        self,
        node: str,
        text: str,
        important: bool = False,
        figures: Mapping[str, float] = NO_FIGURES,
        event: str = "said",
    ) -> None:
        self.log.add(node, event, text, figures)
        self.metrics.figures(node, figures)
        with self._lock:
            self._said[node] = text = hide_values(text)
            self._newest = f"{node}: {text}"
            now = time.monotonic()
            recent = now - self._last.get(node, 0.0) < SECONDS_BETWEEN_LINES
            if important or not recent:
                self._out(f"{time.strftime('%H:%M:%S')}  {node:<16}  {text}")
                self._last[node] = now

    def of(self, node: str) -> "NodeProgress":
        return NodeProgress(self, node)

    def said(self, node: str) -> str:
        """What a node said last."""
        return self._said.get(node, "")

    def said_last(self) -> str:
        """What any node said last."""
        return self._newest

    def relay(self, board: Any) -> None:
        """Tells what workers have told the board since."""
        import ray

        for news in ray.get(board.take.remote()):
            self.say(*news)
        self.log.write_if_due()


@dataclass(frozen=True)
class NodeProgress:
    """Takes the progress of one node (a `Say`)."""

    whole: Progress
    node: str

    def __call__(
        self, text: str, important: bool = False, figures: Mapping[str, float] = NO_FIGURES
    ) -> None:
        self.whole.say(self.node, text, important, figures)

    def started(self) -> None:
        self.whole.say(self.node, "started", important=True, event="started")

    def done(self, seconds: float, folder: str, usage: Usage) -> None:
        """It is published; it took `seconds`, and its processes `usage`."""
        took = f"{clock(seconds)} ({usage})" if str(usage) else clock(seconds)
        figures = {"elapsed_seconds": seconds} | asdict(usage)
        self.whole.say(self.node, f"done in {took} -> {folder}", True, figures, event="done")

    def failed(self, reason: str) -> None:
        """It cannot be made; what does not need it goes on."""
        text = f"FAILED, all that does not need it goes on ({shortened(' '.join(reason.split()))})"
        self.whole.say(self.node, text, important=True, event="failed")

    def made(self, num_rows: int, num_shards: int, usage: Usage) -> None:
        """Counts what was made, and what that took."""
        self.whole.metrics.made(self.node, num_rows, num_shards, usage)
