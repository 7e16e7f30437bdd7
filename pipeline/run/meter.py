"""What a process takes while it works."""

import time
from collections.abc import Callable

from pipeline.store.manifest import Usage


class Meter:
    """Measures a process from its making to the first lap, and from lap to lap.

    Args:
        cores: that the process was given.
        processes: that work alike, of which this is one.
        cpu_clock: seconds of computing, of all threads.
    """

    def __init__(
        self,
        cores: float,
        processes: int = 1,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._cores, self._processes = cores, processes
        self._clocks = clock, cpu_clock
        self._begun = clock(), cpu_clock()
        self._tokens = self._positions = 0

    def count_tokens(self, tokens: int, positions: int) -> None:
        """Adds what a model was fed: tokens, and positions with padding."""
        self._tokens += tokens
        self._positions += positions

    def lap(self) -> Usage:
        """What was taken since the last lap."""
        now = self._clocks[0](), self._clocks[1]()
        seconds, cpu_seconds = (
            self._processes * (end - begin) for begin, end in zip(self._begun, now, strict=True)
        )
        counts = self._processes * self._tokens, self._processes * self._positions
        self._begun, self._tokens, self._positions = now, 0, 0
        return Usage(seconds, self._cores * seconds, cpu_seconds, *counts)
