"""A run's log: JSON lines under the storage root. `sentray status NAME --log` prints it for people.

    history/<recipe>/<time>/log/20261122T062741.482913.jsonl, ...    of `run`
    tune/<search>/log/...                                            of `tune`, its trials too

Object stores cannot append, so there is a file for each half minute in which anything was said.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from stages import patience
from stages.contract import NO_FIGURES
from stages.errors import Stopped, StorageError
from stages.files import Root
from stages.variables import hide_values

SECONDS_BETWEEN_FILES = 30.0


class RunLog:
    """Takes what happens, safe to be called from threads, and writes it now and then.

    Args:
        warn: told where the log cannot be written; the run goes on without these lines.
    """

    def __init__(self, root: Root, folder: str, warn: Callable[[str], None]) -> None:
        self._root, self._folder, self._warn = root, folder, warn
        self._lines: list[str] = []
        self._written = time.monotonic()
        self._lock = threading.Lock()

    def add(self, stage: str, event: str, text: str, figures: Mapping[str, float]) -> None:
        """Adds a line.

        Args:
            stage: the node's name; "" for the run.
            event: started, said, done, failed, stopped or ended.
        """
        entry: dict[str, Any] = {"stage": stage, "event": event, "text": hide_values(text)}
        if figures:  # what is no number is null: JSON knows no NaN
            found = {name: x if math.isfinite(x) else None for name, x in figures.items()}
            entry |= {"figures": found}
        with self._lock:  # the time too, or lines of two threads change places
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            self._lines.append(json.dumps({"time": now} | entry))

    def __enter__(self) -> "RunLog":
        self.add("", "started", "", NO_FIGURES)
        patience.listeners.append(self._hear)
        self.write()  # whoever asks for the run's state sees that it is there
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        patience.listeners.remove(self._hear)
        if error is None:
            self.add("", "ended", "", NO_FIGURES)
        else:
            event = "stopped" if isinstance(error, Stopped | KeyboardInterrupt) else "failed"
            self.add("", event, f"{type(error).__name__}: {error}", NO_FIGURES)
        self.write()

    def _hear(self, line: str) -> None:
        self.add("", "said", line, NO_FIGURES)

    @property
    def is_due(self) -> bool:
        """Whether it was not written a moment ago."""
        return time.monotonic() - self._written > SECONDS_BETWEEN_FILES

    def write_if_due(self) -> None:
        """Writes what is new, if that was not done a moment ago."""
        if self.is_due:
            self.write()

    def write(self) -> None:
        """Writes what is new."""
        with self._lock:
            lines, self._lines = self._lines, []
        self._written = time.monotonic()
        if not lines:
            return
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")
        try:
            text = "\n".join(lines) + "\n"
            self._root.write(f"{self._folder}/{stamp}.jsonl", text.encode())
        except StorageError as error:
            self._warn(f"warning: the run's log lacks lines: {error}")
