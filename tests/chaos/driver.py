"""The command line as a schedule starts it: with a clock that can be moved, and hasty leases.

    python -m tests.chaos.driver FILE run recipe.yaml ...

FILE holds by how many seconds this process's clock is wrong, and may change at any time. Leases
beat and become stale ten times as fast as they do for users, so that a frozen run is overtaken in
seconds. A few shards make a segment of the ledger, where users have a thousand.
"""

import sys
import time
from pathlib import Path
from time import struct_time
from typing import Any

from pipeline.cli import command
from pipeline.run import making, work
from pipeline.store import history, leases, manifest
from stages import files

BEAT_SECONDS = leases.BEAT_SECONDS / 10
STALE_SECONDS = leases.STALE_SECONDS / 10


class WrongClock:
    """The module `time`, but for the time of day."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def _wrong_by(self) -> int:
        return int(self._file.read_text() or 0)

    def time(self) -> float:
        return time.time() + self._wrong_by()

    def time_ns(self) -> int:
        return time.time_ns() + self._wrong_by() * 10**9

    def gmtime(self) -> struct_time:
        return time.gmtime(self.time())

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


if __name__ == "__main__":
    for module in (files, history, leases, making, manifest):  # others' must stay as they are
        module.time = WrongClock(Path(sys.argv[1]))  # type: ignore[assignment]
    leases.Leases.__init__.__defaults__ = (BEAT_SECONDS, STALE_SECONDS)
    work.SHARDS_IN_SEGMENT, work.FEWEST_IN_SEGMENT = 4, 2
    sys.argv[:2] = ["sentray"]
    command()
