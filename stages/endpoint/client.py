"""Sends many requests at once to an endpoint that is paid by the request.

One dispatcher sends everything, so rates, pauses and the budget hold for the whole stage. A request
in flight holds one of `concurrency` slots until it is known what its failure means; one that waits
to be tried again holds none. The first request goes alone: a wrong address, key or model is one
message within seconds. What a failure means is in `failures`.

What is asked, and how answers are read, is its subclasses': stages/rewrite/client.py asks a chat
model, stages/embed/client.py an embedding model.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pydantic import SecretStr

from stages.endpoint.failures import Failures, Patience
from stages.endpoint.http import Endpoint, Reply, is_unpaid
from stages.endpoint.journal import SECONDS_IN_SEGMENT, Journal, Paid, Spent
from stages.endpoint.limits import Grant, Limits
from stages.endpoint.settings import EndpointSettings
from stages.errors import UserError

# Without an answer of use: none came, it is no answer, or a gateway gave up on a server at work.
POSSIBLY_PAID = (0, 200, 408, 504, 524)
SECONDS_BETWEEN_LINES = 5.0
# while no request may be sent
SECONDS_BETWEEN_LOOKS = 0.5


@dataclass
class Request:
    """What is asked about one or more sentences: the body, and how often it failed."""

    attempts: int = field(default=0, init=False)
    body: dict[str, Any] = field(default_factory=dict, init=False)

    @property
    def num_sentences(self) -> int:
        return 1


R = TypeVar("R", bound=Request)
A = TypeVar("A", bound=Paid)
Found = TypeVar("Found")


@dataclass(frozen=True)
class GivenUp(Generic[R, Found]):
    """What becomes of a request that is not answered: a result, or requests in its place."""

    found: Found | None = None
    instead: tuple[R, ...] = ()


class Client(ABC, Generic[R, A, Found]):
    """Requests in, results out; see the module.

    Args:
        journal: what is there is not asked for again; its owner's budget counts.
        say: takes a line of progress.
        variables: what ${VARIABLES} in the settings' `extra` stand for.
        may_pay: whether requests may be sent; raises UserError where no more ever may.
    """

    def __init__(
        self,
        settings: EndpointSettings,
        key: SecretStr | None,
        journal: Journal[Any],
        say: Callable[..., None],
        patience: Patience | None = None,
        variables: Mapping[str, SecretStr] | None = None,
        may_pay: Callable[[], bool] = lambda: True,
    ) -> None:
        self._asked, self._say, self._journal = settings, say, journal
        self._may_pay = may_pay
        self._patience = patience or Patience()
        self._limits = Limits(settings, journal.spent())
        self._endpoint = Endpoint(settings, key, variables or {})
        self._failures = Failures(
            settings, self._endpoint, self._limits, self._patience, self._works, say
        )
        self._results: asyncio.Queue[Found | None]
        self._results = asyncio.Queue(2 * settings.concurrency)
        self._retries: deque[R] = deque()
        self._changed = asyncio.Event()
        # requests taken and not finished, tasks that send one, requests on their way
        self._open = self._tasks = self._in_flight = 0
        self._done = 0
        self._fatal: Exception | None = None
        self._last_line = time.monotonic()

    @abstractmethod
    def prepare(self, request: R) -> Found | None:
        """The result as far as it is known without asking; else None, and `body` is filled in."""

    @abstractmethod
    def probe(self) -> dict[str, Any]:
        """The body of a tiny request that has nothing to do with any sentence."""

    @abstractmethod
    def estimated_tokens(self, body: dict[str, Any]) -> int:
        """Tokens of a request before it is sent, rather too many."""

    @abstractmethod
    def read(self, reply: Reply, body: dict[str, Any]) -> A | None:
        """What a reply to `body` answers; None where it is none of `answer_name`.

        Raises:
            UserError: this endpoint cannot be used.
        """

    @abstractmethod
    def keep(self, request: R, answer: A) -> None:
        """Writes the answer down."""

    @abstractmethod
    def judge(self, request: R, answer: A) -> Found | None:
        """The result of an answer; None when the request, with another body, is to be sent again.

        Raises:
            UserError: such answers are of no use.
        """

    @abstractmethod
    def give_up(self, request: R, reason: str, said: str) -> GivenUp[R, Found]:
        """What becomes of a request that will not be answered, although others are.

        Args:
            reason: e.g. `refused: HTTP 400`, or `failed: HTTP 500` after `max_attempts`.
            said: the endpoint's own message.

        Raises:
            UserError: there must be an answer.
        """

    @property
    def summary(self) -> str:
        """What has been spent, in words."""
        return self._limits.summary

    def run_requests(self, requests: Iterable[R]) -> Iterator[Found]:
        """Results as they come, in any order; takes requests as it has room for them.

        What is in flight is answered and kept whatever goes wrong elsewhere, as when a shard cannot
        be stored, and however long finding out takes.

        Raises:
            UserError: the endpoint cannot be used, answers no more, or the budget is spent.
        """
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            loop = runner.get_loop()
            driver = loop.create_task(self._drive(iter(requests)))  # noqa: F841 - or it is collected
            try:
                while (found := loop.run_until_complete(self._results.get())) is not None:
                    yield found
            except GeneratorExit:  # nobody takes what else is found
                self._stop(RuntimeError("its results are not taken"))
                while loop.run_until_complete(self._results.get()) is not None:
                    pass
                raise
        if self._fatal is not None:
            raise self._fatal

    async def _drive(self, requests: Iterator[R]) -> None:
        """Sends what is to be sent. A None ends the results; `_fatal` says what went wrong."""
        flushing = asyncio.create_task(self._flush())
        try:
            try:
                async with self._endpoint.opened(), asyncio.TaskGroup() as group:
                    try:
                        await self._send_all(requests, group)
                    except Exception as error:  # the group waits for those in flight
                        self._stop(error)
            finally:
                flushing.cancel()
                self._journal.close()
        except Exception as error:
            self._stop(error)
        await self._results.put(None)

    async def _send_all(self, requests: Iterator[R], group: asyncio.TaskGroup) -> None:
        while (request := await self._next(requests)) is not None:
            found = self.prepare(request)
            if found is not None:
                await self._give(request, found)
                continue
            grant = await self._permission(request)
            self._tasks += 1
            group.create_task(self._send(request, grant))
            self._tell()

    def _stop(self, error: Exception) -> None:
        """No more requests are sent; the first error is the one that is raised."""
        self._fatal = self._fatal or error
        self._changed.set()

    async def _flush(self) -> None:
        """What is held for an object store does not wait for the next answer."""
        try:
            while True:
                await asyncio.sleep(SECONDS_IN_SEGMENT)
                self._journal.flush(SECONDS_IN_SEGMENT)
        except Exception as error:
            self._stop(error)

    async def _next(self, requests: Iterator[R]) -> R | None:
        """One to be tried again if there is any, else a new one; None when all are done."""
        while True:
            self._changed.clear()
            if self._fatal is not None:
                raise self._fatal
            if self._retries:
                return self._retries.popleft()
            if self._open < 3 * self._asked.concurrency:  # else many wait already
                new = next(requests, None)
                if new is not None:
                    self._open += 1
                    return new
            if not self._open:
                return None
            await self._changed.wait()

    async def _permission(self, request: R) -> Grant:
        """Waits for a slot, the limits and the budget."""
        tokens = self.estimated_tokens(request.body)
        while True:
            self._changed.clear()
            if self._fatal is not None:
                raise self._fatal
            delay = self._limits.wait(tokens)
            short = self._limits.exceeded(tokens)
            if short is not None and not self._tasks:
                raise UserError(
                    f"{self._asked.section}.budget.{short} is reached: {self._limits.summary} so "
                    "far. Raise it and run again to continue; nothing is paid twice."
                )
            most = self._asked.concurrency if self._failures.reached else 1
            free = short is None and self._in_flight < most
            if free and not self._may_pay():
                delay = max(delay, SECONDS_BETWEEN_LOOKS)
            if free and delay <= 0:
                self._in_flight += 1
                return self._limits.take(tokens)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), delay if free else None)

    async def _send(self, request: R, grant: Grant) -> None:
        """Sends a request; gives its result, or puts it back to be tried again."""
        answer = found = None
        cost: Paid | None = None
        again: tuple[R, ...] = (request,)
        backoff_seconds = 0.0
        try:
            if self._fatal is not None:
                raise self._fatal
            self._journal.ready(self._asked.concurrency)
            reply = await self._endpoint.post(request.body)
            answer = self._read(reply, request.body)
            cost = answer or self._charge(reply, request.body)
            if answer is not None:
                self.keep(request, answer)
                self._failures.answered()
                request.attempts = 0
                found = self.judge(request, answer)
            elif reply.status == 429 and not is_unpaid(reply):
                self._failures.busy(reply)
            else:
                given_up = await self._failed(request, reply)
                if given_up is None:
                    backoff_seconds = self._patience.backoff(request.attempts)
                else:
                    found, again = given_up.found, given_up.instead
        except Exception as error:
            self._stop(error)
            found, again = None, (request,)
        finally:
            self._in_flight -= 1
            self._limits.settle(grant, cost)
            self._changed.set()
        if found is None:
            self._open += len(again) - 1
            for one in again:
                asyncio.get_running_loop().call_later(backoff_seconds, self._again, one)
        else:
            await self._give(request, found)
        self._tasks -= 1
        self._changed.set()

    async def _failed(self, request: R, reply: Reply) -> GivenUp[R, Found] | None:
        """What becomes of a request without an answer; None to try it again."""
        request.attempts += 1
        if _may_pass(reply):
            reason = await self._failures.failed(reply, request.attempts)
            said = self._endpoint.message(reply.text) if reply.status else ""
            return None if reason is None else self.give_up(request, reason, said)
        about = await self._failures.refused(reply)
        if about is None:
            return None
        return self.give_up(request, f"refused: HTTP {reply.status}", about)

    async def _works(self) -> bool | None:
        """Whether the endpoint answers the probe; None where that failed. Waits while it is busy,
        and for the limits: the probe is one request of the stage."""
        body = self.probe()
        tokens = self.estimated_tokens(body)
        while True:
            grant, cost = await self._granted(tokens), None
            try:
                reply = await self._endpoint.post(body)
                answer = self._read(reply, body)
                if answer is None:
                    cost = self._charge(reply, body)
                else:
                    cost = Spent(1, answer.prompt_tokens, answer.answer_tokens)
                    self._journal.charge(cost)
                    return True
            finally:
                self._limits.settle(grant, cost)
            if reply.status == 429 and not is_unpaid(reply):
                self._failures.busy(reply)
            elif _may_pass(reply):
                self._failures.pause(reply)
                return None
            else:
                return False

    async def _granted(self, tokens: int) -> Grant:
        """The limits' grant of a probe."""
        while True:
            self._changed.clear()
            if self._fatal is not None:  # many may have waited for their turn to ask
                raise self._fatal
            if (delay := self._limits.wait(tokens)) <= 0:
                return self._limits.take(tokens)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), delay)

    def _read(self, reply: Reply, body: dict[str, Any]) -> A | None:
        """`read`; an answer that ends the run is charged too, as whoever starts it again and again
        pays again."""
        try:
            return self.read(reply, body)
        except UserError:
            self._charge(reply, body)
            raise

    def _charge(self, reply: Reply, body: dict[str, Any]) -> Paid | None:
        """What a request without an answer of use may have cost: as much as it may, where it was
        sent and not refused."""
        if not reply.connected or reply.status not in POSSIBLY_PAID:
            return None
        cost = Spent(1, self.estimated_tokens(body), self._asked.most_answer_tokens, unanswered=1)
        self._journal.charge(cost)
        return cost

    async def _give(self, request: R, found: Found) -> None:
        self._open -= 1
        self._done += request.num_sentences
        await self._results.put(found)

    def _again(self, request: R) -> None:
        self._retries.append(request)
        self._changed.set()

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._say(
                f"{self._done:,} sentences, {self._in_flight} requests in flight, "
                f"{self._failures.num_busy:,} times 429; {self._limits.summary}"
            )


def _may_pass(reply: Reply) -> bool:
    """Whether what went wrong may not go wrong another time."""
    return reply.status in (0, 200, 408, 409, 425) or reply.status >= 500
