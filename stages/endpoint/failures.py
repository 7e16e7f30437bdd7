"""What it means that a request is not answered.

The endpoint is busy (429): everybody waits, nobody is blamed. One request fails while others are
answered (5xx, time-outs, broken connections): it is tried `max_attempts` times, then given up.
Nothing is answered any more: the stage stops, no request is given up for that, and running again
continues. A tiny request about nothing, the probe, tells the last two apart, and whether a refusal
(400, 403) is about the request.
"""

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from stages.endpoint.http import Endpoint, Reply
from stages.endpoint.limits import Limits
from stages.endpoint.settings import EndpointSettings
from stages.errors import UserError

FAILED_BEFORE_STOP = 5  # requests, none answered before
UNREACHED_BEFORE_STOP = 3  # connections, none answered before
TOLD_SECONDS = 10.0  # shorter waits are not told, nor are more than one in that time
CONTINUES = "What was answered is kept; run again to continue."


@dataclass(frozen=True)
class Patience:
    """How long to wait; tests wait less.

    first_seconds, most_seconds: of the back-off, which doubles and is drawn from [0, that].
    busy_seconds: how long an endpoint may say nothing but 429, from the first one on.
    """

    first_seconds: float = 0.5
    most_seconds: float = 30.0
    busy_seconds: float = 600.0

    def backoff(self, number: int) -> float:
        """Seconds before the next attempt after so many."""
        most = min(self.most_seconds, self.first_seconds * 2 ** min(number, 20))
        return random.uniform(0, most)  # full jitter: those who failed together come back apart


class Failures:
    """Counts what fails in one stage, and says when it must stop.

    reached: whether the endpoint has answered anything. num_busy: how often it said 429.

    Args:
        works: whether the endpoint answers the probe; None where that failed and may not another
            time.
        say: is told of longer waits (a `Say`).
    """

    def __init__(
        self,
        settings: EndpointSettings,
        endpoint: Endpoint,
        limits: Limits,
        patience: Patience,
        works: Callable[[], Awaitable[bool | None]],
        say: Callable[..., None],
    ) -> None:
        self._settings, self._endpoint, self._limits = settings, endpoint, limits
        self._patience, self._works, self._say = patience, works, say
        self._told = -math.inf
        self._failed_in_row = self._busy_in_row = self._probes_failed = self.num_busy = 0
        self._busy_since = 0.0
        self.reached = False
        self._probing = asyncio.Lock()
        self._worked_at = -math.inf  # when the last probe that was answered began

    def answered(self) -> None:
        """Takes note of an answer."""
        self.reached = True
        self._failed_in_row = self._busy_in_row = self._probes_failed = 0

    def busy(self, reply: Reply) -> None:
        """429: all wait, as long as is asked for or longer each time.

        Raises:
            UserError: it has been so for too long.
        """
        self.num_busy += 1
        now = time.monotonic()
        if not self._busy_in_row:  # nothing may have been asked for long, e.g. of a journal's part
            self._busy_since = now
        silent = now - self._busy_since
        if silent > self._patience.busy_seconds:
            raise UserError(
                f"{self._endpoint.url} has said nothing but 429 (too many requests) for "
                f"{silent:,.0f} s: {self._endpoint.message(reply.text)}. Lower "
                f"{self._settings.section}.requests_per_minute or concurrency. {CONTINUES}"
            )
        self._busy_in_row += 1
        self.pause(reply, self._patience.backoff(self._busy_in_row))

    def pause(self, reply: Reply, otherwise: float = 0.0) -> None:
        """All wait as long as the endpoint asks for, or so many seconds.

        Raises:
            UserError: it asks for more than anybody would wait for.
        """
        asked = reply.retry_after_seconds
        if asked is not None and asked > self._patience.busy_seconds:
            raise UserError(
                f"{self._endpoint.url} asks to wait for {asked:,.0f} s: HTTP {reply.status} "
                f"{self._endpoint.message(reply.text)}. {CONTINUES}"
            )
        seconds, now = otherwise if asked is None else asked, time.monotonic()
        if seconds >= TOLD_SECONDS and now - self._told >= TOLD_SECONDS:
            self._told = now
            self._say(
                f"waits for {seconds:.0f} s, as {self._endpoint.url} answers HTTP {reply.status}",
                True,
            )
        self._limits.pause(seconds)

    async def failed(self, reply: Reply, attempts: int) -> str | None:
        """A request failed that may be answered later: None to try it again, else why to give up.

        Args:
            attempts: how often this request has failed.

        Raises:
            UserError: nothing is answered any more.
        """
        failure = f"HTTP {reply.status}"
        if reply.status == 0:
            failure = self._endpoint.hidden(reply.text)
        elif reply.status == 200:
            failure = f"its answer is not {self._settings.answer_name}"
        if reply.status != 200:
            self.pause(reply)
        self._failed_in_row += 1
        enough = max(20, 2 * self._settings.concurrency)
        if not self.reached:  # requests still go one by one
            enough = FAILED_BEFORE_STOP if reply.connected else UNREACHED_BEFORE_STOP
        exhausted = attempts >= self._settings.max_attempts
        if not exhausted and self._failed_in_row < enough:
            return None
        async with self._probing:
            stops = self._failed_in_row >= min(enough, attempts)
            if stops and not await self._works():
                said = self._endpoint.message(reply.text) if reply.status else ""
                raise UserError(
                    f"{self._endpoint.url} failed {self._failed_in_row} times in a row, the last "
                    f"time with: {failure} {said}".rstrip()
                    + ". Check "
                    f"{self._settings.section}.base_url and the endpoint. {CONTINUES}"
                )
            self._failed_in_row, self.reached = 0, True
        return f"failed: {failure}" if exhausted else None

    async def refused(self, reply: Reply) -> str | None:
        """What the endpoint says about a request that it will not answer, however often it is sent;
        None to try it again, where the probe failed, as long as others are answered.

        Raises:
            UserError: it is not about the request, but about key, address, account or model.
        """
        url, status, arrived = self._endpoint.url, reply.status, time.monotonic()
        about = self._endpoint.message(reply.text)
        if status == 404 or 300 <= status < 400:
            raise UserError(
                f"{url}: HTTP {status} {about}. Check {self._settings.section}.base_url and model "
                f"'{self._settings.model}'. {CONTINUES}"
            )
        if status not in (401, 402, 429):  # 429: without credit
            async with self._probing:
                if self._worked_at < arrived:  # else the probe of another one has told
                    began = time.monotonic()
                    works = await self._works()
                    if works:
                        self._worked_at = began
                    elif works is None:
                        self._probes_failed += 1
                        if self._probes_failed < FAILED_BEFORE_STOP:
                            return None
                        raise UserError(
                            f"{url} refuses requests (HTTP {status} {about}), and fails at one "
                            f"about nothing, {self._probes_failed} times. Check "
                            f"{self._settings.section}.base_url and the endpoint. {CONTINUES}"
                        )
            if self._worked_at >= arrived:
                return about
        if status in (401, 402, 403, 429):
            name = self._settings.key_variable
            where = f"the key in {name}" if name else "to work without a key"
            raise UserError(f"{url} refuses {where}: HTTP {status} {about}. {CONTINUES}")
        raise UserError(
            f"{url} refuses all requests now: HTTP {status} {about}. Check the account there, "
            f"and {self._settings.section}'s {self._settings.sent}. {CONTINUES}"
        )
