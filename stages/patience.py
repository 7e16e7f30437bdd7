"""Object stores stumble: requests that may get through later are made again, for minutes, and said.

Arrow's own client gives up after some six seconds (31 requests, all answered 503), obstore's after
three minutes.
"""

import math
import os
import random
import re
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from stages.errors import UserError

T = TypeVar("T")

# Seconds for which a request is made again. A first request may have a wrong address: less, but in
# a worker, whose driver has had answers.
VARIABLE, KNOWN = "SENTRAY_STORAGE_PATIENCE", "SENTRAY_STORAGE_KNOWN"
SECONDS, FIRST_SECONDS = 300.0, 20.0
LEAST_PAUSE, MOST_PAUSE = 0.5, 20.0
SECONDS_BETWEEN_LINES = 30.0

# Who else is told how stores stumble, in this process: a worker's stderr is read by nobody.
listeners: list[Callable[[str], None]] = []

# What the stores' clients say of overload, time-outs and lost connections; a wrong key, a missing
# bucket or an unknown host (curl's 6) are none of these.
TRANSIENT = re.compile(
    r"HTTP status (429|5\d\d)|\b(429|50[0234])\b [A-Z]|slow_?down|throttl|service_?unavailable"
    r"|internal_?(failure|error)|request_?time|timed? ?out|network_?connection"
    r"|curlCode: (?!6\b)\d|connection (was )?(reset|refused|closed|aborted)|broken pipe"
    r"|error sending request|error decoding response|incomplete|unexpected eof",
    re.I,
)


def is_transient(error: Exception) -> bool:
    """Whether the same request may be answered later."""
    return not isinstance(error, FileNotFoundError) and bool(TRANSIENT.search(str(error)))


class Silent(OSError):
    """The last answer of a store that patience has not helped with."""


class Patience:
    """Makes requests to one store, each as long as it takes.

    Args:
        name: of the store, for people.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._answered = KNOWN in os.environ
        _chosen_seconds()  # said at once where it is none

    def ask(self, request: Callable[[], T]) -> T:
        """The answer. A request must be one that does no harm when it is made twice.

        Raises:
            Silent: patience is at its end; with what the store answered last.
            OSError: an answer that patience would not change.
        """
        began, pause, told = time.monotonic(), LEAST_PAUSE, -math.inf
        while True:
            try:
                answer = request()
            except OSError as error:
                waited = time.monotonic() - began
                if not is_transient(error):
                    raise
                if waited > self._seconds():
                    raise Silent(str(error)) from error
                if time.monotonic() - told > SECONDS_BETWEEN_LINES:
                    told, still = time.monotonic(), f" for {waited:.0f} s" if told > 0 else ""
                    self._say(f"does not answer{still} ({str(error).splitlines()[0][:200]}); "
                              f"trying for up to {self._seconds():.0f} s")  # fmt: skip
                # so that those who failed together do not come again together
                time.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, MOST_PAUSE)
            else:
                self._answered = True
                if told > 0:
                    self._say(f"answers again, after {time.monotonic() - began:.0f} s")
                return answer

    def _seconds(self) -> float:
        whole = _chosen_seconds()
        return whole if self._answered else min(whole, FIRST_SECONDS)

    def _say(self, text: str) -> None:
        line = f"storage {self._name} {text}"
        print(line, file=sys.stderr, flush=True)
        for listener in list(listeners):
            listener(line)


def _chosen_seconds() -> float:
    given = os.environ.get(VARIABLE, str(SECONDS))
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise UserError(f"{VARIABLE}: '{given}' is no number of seconds; write one such as 600")
    return seconds
