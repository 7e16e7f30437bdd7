"""What the driver prints while nodes are made: lines with the time of day, few enough to read."""

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from stages.contract import Say
from stages.variables import hide_values

# Lines about the same node come at most this often, so that a log file stays readable.
SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """Prints what nodes say; safe to call from their threads."""

    def __init__(self, out: Callable[[str], None]) -> None:
        self._out = out
        self._last: dict[str, float] = {}
        self._said: dict[str, str] = {}
        self._lock = threading.Lock()

    def say(self, node: str, text: str, important: bool = False) -> None:
        with self._lock:
            self._said[node] = text = hide_values(text)
            now = time.monotonic()
            recent = now - self._last.get(node, 0.0) < SECONDS_BETWEEN_LINES
            if important or not recent:
                self._out(f"{time.strftime('%H:%M:%S')}  {node:<16}  {text}")
                self._last[node] = now

    def of(self, node: str) -> Say:
        """What takes the progress of one node."""
        return partial(self.say, node)

    def said(self, node: str) -> str:
        """What a node said last."""
        return self._said.get(node, "")

    def relay(self, board: Any) -> None:
        """Prints what workers have told the board since."""
        import ray

        for node, text, important in ray.get(board.take.remote()):
            self.say(node, text, important)
