"""Asks an OpenAI-compatible chat endpoint about many sentences at once.

One dispatcher sends everything, so rates, pauses and the budget hold for the whole stage. A request
in flight holds one of `concurrency` slots; a sentence that waits to be tried again holds none. The
first request goes alone: a wrong address, key or model is one message within seconds.

What fails is sorted by what it means. The endpoint is busy (429): everybody waits, nobody is
blamed. One request fails while others are answered (5xx, time-outs, broken connections): it is
tried `max_attempts` times, then its sentence is rejected. Nothing is answered any more: the stage
stops, no sentence is rejected for that, and running again continues.
"""

import asyncio
import random
import time
import urllib.request
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

import aiohttp

from stages.errors import UserError
from stages.rewrite.chat import Answer, Outcome, payload, read_answer
from stages.rewrite.endpoint import (
    Secret,
    error_message,
    estimated_tokens,
    filled,
    read_completion,
    retry_after_seconds,
)
from stages.rewrite.journal import Journal, request_key
from stages.rewrite.limits import Limits, Taken
from stages.rewrite.settings import Rewriting

Ref = TypeVar("Ref", bound=Hashable)

MAX_ANSWER_BYTES = 1 << 20
SECONDS_BETWEEN_LINES = 5.0
UNUSABLE_BEFORE_STOP = 20  # answers, none usable before
REFUSED_BEFORE_STOP = 10  # sentences, none answered before
FAILED_BEFORE_STOP = 5  # requests, none answered before
UNREACHED_BEFORE_STOP = 3  # connections, none answered before
CONTINUES = "What was answered is kept; run again to continue."


@dataclass(frozen=True)
class Patience:
    """How long to wait; tests wait less.

    first_seconds, most_seconds: of the back-off, which doubles and is drawn from [0, that].
    busy_seconds: how long an endpoint may say nothing but 429.
    """

    first_seconds: float = 0.5
    most_seconds: float = 30.0
    busy_seconds: float = 600.0


@dataclass
class _Row(Generic[Ref]):
    ref: Ref
    sentence: str
    bad: list[tuple[str, str]] = field(default_factory=list)
    attempts: int = 0
    body: dict[str, Any] = field(default_factory=dict)


class ChatClient(Generic[Ref]):
    """Sentences in, outcomes out; see the module.

    Args:
        journal: answers that are there are not asked for again; its owner's budget counts.
        say: takes a line of progress.
        variables: what ${VARIABLES} in the settings' `extra` stand for.
    """

    def __init__(
        self,
        settings: Rewriting,
        key: Secret | None,
        journal: Journal,
        say: Callable[[str], None],
        patience: Patience = Patience(),
        variables: Mapping[str, Secret] | None = None,
    ) -> None:
        self._settings, self._key, self._journal, self._say = settings, key, journal, say
        self._patience, self._variables = patience, variables or {}
        self._limits = Limits(settings, journal.spent())
        self._url = settings.base_url.rstrip("/") + "/chat/completions"
        self._retries: asyncio.Queue[_Row[Ref]]
        # sentences taken and not finished, tasks that send one, requests on their way
        self._open = self._tasks = self._in_flight = 0
        self._usable = self._unusable = self._refused = 0
        self._failed_in_row = self._busy_in_row = self._busy = self._done = 0
        self._reached = False  # whether the endpoint has answered anything
        self._fatal: UserError | None = None
        self._last_line = self._last_answer = time.monotonic()

    def run(self, rows: Iterable[tuple[Ref, str]]) -> Iterator[tuple[Ref, Outcome]]:
        """Outcomes as they come, in any order; takes rows as it has room for them.

        Raises:
            UserError: the endpoint cannot be used, answers no more, or the budget is spent.
        """
        loop = asyncio.new_event_loop()
        try:
            out: asyncio.Queue[tuple[Ref, Outcome] | None] = asyncio.Queue(
                2 * self._settings.concurrency
            )
            driver = loop.create_task(self._drive(iter(rows), out))
            while (found := loop.run_until_complete(_next(out, driver))) is not None:
                yield found
        finally:
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(asyncio.sleep(0))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
            self._journal.flush()

    async def _drive(self, rows: Iterator[tuple[Ref, str]], out: asyncio.Queue[Any]) -> None:
        self._retries = asyncio.Queue()
        self._changed = asyncio.Event()
        self._controlling = asyncio.Lock()
        timeout = aiohttp.ClientTimeout(total=self._settings.timeout_seconds)
        connector = aiohttp.TCPConnector(limit=self._settings.concurrency)
        headers = {"Authorization": f"Bearer {self._key.reveal()}"} if self._key else {}
        async with (
            aiohttp.ClientSession(
                timeout=timeout, connector=connector, headers=headers, proxy=self._proxy()
            ) as session,
            asyncio.TaskGroup() as group,
        ):
            source = iter(rows)
            while (row := await self._next_row(source)) is not None:
                outcome = self._replayed(row)
                if outcome is not None:
                    await self._give(row, outcome, out)
                    continue
                taken = await self._permission(row)
                self._tasks += 1
                group.create_task(self._send(session, row, taken, out))
                self._tell()
        await out.put(None)

    def _proxy(self) -> str | None:
        """The environment's proxy for the endpoint; aiohttp's own look also reads ~/.netrc."""
        address = urlsplit(self._url)
        if urllib.request.proxy_bypass(address.hostname or ""):
            return None
        return urllib.request.getproxies().get(address.scheme)

    async def _next_row(self, source: Iterator[tuple[Ref, str]]) -> _Row[Ref] | None:
        """One to be tried again if there is any, else a new one; None when all are done."""
        while True:
            self._changed.clear()
            if self._fatal is None:
                if not self._retries.empty():
                    return self._retries.get_nowait()
                if self._open < 3 * self._settings.concurrency:  # else many wait already
                    new = next(source, None)
                    if new is not None:
                        self._open += 1
                        return _Row(*new)
                if not self._open:
                    return None
            elif not self._tasks:
                raise self._fatal
            await self._changed.wait()

    def _replayed(self, row: _Row[Ref]) -> Outcome | None:
        """The row's outcome as far as the journal has its answers; else its next request."""
        while True:
            row.body = payload(self._settings, row.sentence, row.bad)
            answer = self._journal.get(request_key(row.body))
            if answer is None:
                return None
            outcome = self._judged(row, answer)
            if outcome is not None:
                return outcome

    def _judged(self, row: _Row[Ref], answer: Answer) -> Outcome | None:
        """The outcome of an answer; None when the row is to be asked again."""
        outcome = read_answer(self._settings, answer)
        if outcome.reason is None:
            self._usable += 1
            return outcome
        self._unusable += 1
        row.bad.append((answer.text, outcome.reason))
        return outcome if len(row.bad) == self._settings.max_answers else None

    async def _permission(self, row: _Row[Ref]) -> Taken:
        """Waits for a slot, the limits and the budget."""
        tokens = estimated_tokens(row.body)
        while True:
            self._changed.clear()
            if self._fatal is not None and not self._tasks:
                raise self._fatal
            most = self._settings.concurrency if self._reached else 1
            most = 0 if self._fatal is not None else most
            delay = self._limits.wait(tokens)
            short = self._limits.exceeded(tokens)
            if short is not None and not self._tasks:
                raise UserError(
                    f"rewriting.budget.{short} is reached: {self._limits.summary} so far. "
                    "Raise it and run again to continue; nothing is paid twice."
                )
            if short is None and self._in_flight < most and delay <= 0:
                self._in_flight += 1
                return self._limits.take(tokens)
            free = short is None and self._in_flight < most
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), delay if free else None)

    async def _send(
        self,
        session: aiohttp.ClientSession,
        row: _Row[Ref],
        taken: Taken,
        out: asyncio.Queue[Any],
    ) -> None:
        try:
            outcome = await self._ask(session, row, taken)
            if outcome is not None:
                await self._give(row, outcome, out)
        except UserError as error:
            # others in flight are answered, and paid for: the driver lets them end before it stops
            self._fatal = self._fatal or error
        finally:
            self._tasks -= 1
            self._changed.set()

    async def _give(self, row: _Row[Ref], outcome: Outcome, out: asyncio.Queue[Any]) -> None:
        self._open -= 1
        self._done += 1
        await out.put((row.ref, outcome))

    async def _ask(
        self, session: aiohttp.ClientSession, row: _Row[Ref], taken: Taken
    ) -> Outcome | None:
        """Sends a row's request; its outcome, or None when the row was put back to be tried again.

        Raises:
            UserError: the stage must stop.
        """
        answer: Answer | None = None
        outcome: Outcome | None = None
        failure, connected = "", True
        try:
            status, retry_after, text = await self._post(session, row.body)
            if status == 200:
                answer = read_completion(text, row.body)
                failure = "" if answer else "its answer is not a chat completion"
            elif status == 429:
                self._busy_for(retry_after)
            elif status in (408, 409, 425) or status >= 500:
                failure = f"HTTP {status}"
                if retry_after is not None:
                    self._limits.pause(retry_after)
            else:
                outcome = await self._refusal(session, status, text)
        except TimeoutError:
            failure = f"no answer in {self._settings.timeout_seconds:g} s"
        except (aiohttp.ClientError, OSError) as error:
            failure = f"{type(error).__name__}: {error}"
            connected = not isinstance(error, aiohttp.ClientConnectorError | aiohttp.InvalidURL)
        finally:
            self._in_flight -= 1
            self._limits.settle(taken, answer)
            self._changed.set()
        if answer is not None:
            self._journal.add(request_key(row.body), answer)
            self._reached = True
            self._failed_in_row = self._busy_in_row = 0
            self._last_answer = time.monotonic()
            row.attempts = 0
            outcome = self._judged(row, answer)
            self._check_usable(answer)
        elif failure:
            outcome = await self._failed(session, row, failure, connected)
        if outcome is None:
            self._again(row, bool(failure))
        return outcome

    async def _post(
        self, session: aiohttp.ClientSession, body: dict[str, Any]
    ) -> tuple[int, float | None, str]:
        """Status, Retry-After in seconds, and text of the answer."""
        async with session.post(
            self._url, json=self._filled(body), allow_redirects=False
        ) as response:
            data = bytearray()
            async for chunk in response.content.iter_chunked(1 << 16):
                data += chunk
                if len(data) > MAX_ANSWER_BYTES:
                    raise aiohttp.ClientError("the answer is larger than 1 MiB")
            text = data.decode("utf-8", "replace")
            return response.status, retry_after_seconds(response.headers.get("Retry-After")), text

    def _filled(self, body: dict[str, Any]) -> dict[str, Any]:
        """The request as it is sent; a `${...}` in a sentence stays as it is."""
        extra = {key: body[key] for key in self._settings.extra if key in body}
        return body | {key: filled(item, self._variables) for key, item in extra.items()}

    def _hidden(self, text: str) -> str:
        for secret in [*([self._key] if self._key else []), *self._variables.values()]:
            text = secret.hide_in(text)
        return text

    def _busy_for(self, retry_after: float | None) -> None:
        """429: all wait, as long as is asked for or longer each time."""
        self._busy += 1
        silent = time.monotonic() - self._last_answer
        if silent > self._patience.busy_seconds:
            raise UserError(
                f"{self._url} has said nothing but 429 (too many requests) for {silent:,.0f} s. "
                f"Lower rewriting.requests_per_minute or concurrency. {CONTINUES}"
            )
        self._busy_in_row += 1
        pause = self._backoff(self._busy_in_row) if retry_after is None else retry_after
        self._limits.pause(pause)

    def _backoff(self, number: int) -> float:
        most = min(self._patience.most_seconds, self._patience.first_seconds * 2 ** min(number, 20))
        return random.uniform(0, most)  # full jitter: those who failed together come back apart

    async def _failed(
        self, session: aiohttp.ClientSession, row: _Row[Ref], failure: str, connected: bool
    ) -> Outcome | None:
        """What a failed request means: try again (None), reject the row, or stop the stage.

        Where nothing was answered meanwhile, a tiny request about nothing tells an outage from
        sentences that the endpoint chokes on.
        """
        self._failed_in_row += 1
        row.attempts += 1
        enough = max(20, 2 * self._settings.concurrency)
        if not self._reached:  # requests still go one by one
            enough = FAILED_BEFORE_STOP if connected else UNREACHED_BEFORE_STOP
        exhausted = row.attempts >= self._settings.max_attempts
        if not exhausted and self._failed_in_row < enough:
            return None
        async with self._controlling:
            if self._failed_in_row >= min(enough, row.attempts) and not await self._works(session):
                raise UserError(
                    f"{self._url} failed {self._failed_in_row} times in a row, the last time with: "
                    f"{self._hidden(failure)}. Check rewriting.base_url and the endpoint. "
                    f"{CONTINUES}"
                )
            self._failed_in_row, self._reached = 0, True
        return Outcome("", reason=f"failed: {failure}") if exhausted else None

    async def _works(self, session: aiohttp.ClientSession) -> bool:
        """Whether the endpoint answers a request that has nothing to do with any sentence."""
        body = payload(self._settings, "Yes.", []) | {"max_tokens": 4}
        try:
            status, _, text = await self._post(session, body)
        except (TimeoutError, aiohttp.ClientError, OSError):
            return False
        return status == 200 and read_completion(text, body) is not None

    async def _refusal(self, session: aiohttp.ClientSession, status: int, text: str) -> Outcome:
        """A request that the endpoint will not answer, however often it is sent.

        A tiny request about nothing tells a sentence that it minds from an account or a model
        that is no more.
        """
        about = self._hidden(error_message(text))
        if status in (401, 402, 403):
            where = (
                f"the key in {self._settings.key_variable}"
                if self._key
                else "to work without a key"
            )
            raise UserError(f"{self._url} refuses {where}: HTTP {status} {about}. {CONTINUES}")
        if status == 404 or 300 <= status < 400:
            raise UserError(
                f"{self._url}: HTTP {status} {about}. Check rewriting.base_url and model "
                f"'{self._settings.model}'. {CONTINUES}"
            )
        self._refused += 1
        if self._reached:
            async with self._controlling:
                stops = not await self._works(session)
        else:
            stops = self._refused >= REFUSED_BEFORE_STOP
        if stops:
            raise UserError(
                f"{self._url} refuses all requests now: HTTP {status} {about}. Check the account "
                f"there, rewriting.model and extra. {CONTINUES}"
            )
        return Outcome(about, reason=f"refused: HTTP {status}")

    def _check_usable(self, answer: Answer) -> None:
        if not self._usable and self._unusable >= UNUSABLE_BEFORE_STOP:
            raise UserError(
                f"model '{self._settings.model}' gave {self._unusable} answers and none was a JSON "
                f"object with the field '{self._settings.rewrite_field}'; the last one began: "
                f"{self._hidden(answer.text)[:80]!r}. Change rewriting.prompt, fields or model."
            )

    def _again(self, row: _Row[Ref], failed: bool) -> None:
        """Puts the row back in the queue, after a while if its request failed."""

        def ready() -> None:
            self._retries.put_nowait(row)
            self._changed.set()

        if failed:
            asyncio.get_running_loop().call_later(self._backoff(row.attempts), ready)
        else:
            ready()

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._say(
                f"{self._done:,} sentences, {self._in_flight} requests in flight, "
                f"{self._busy:,} times 429; {self._limits.summary}"
            )


async def _next(out: asyncio.Queue[Any], driver: asyncio.Task[None]) -> Any:
    """The next outcome, or the driver's error once all outcomes before it are out."""
    if out.empty():
        taking = asyncio.ensure_future(out.get())
        await asyncio.wait([taking, driver], return_when=asyncio.FIRST_COMPLETED)
        if taking.done():
            return taking.result()
        taking.cancel()
        _raise_first(driver)
    return out.get_nowait()


def _raise_first(driver: asyncio.Task[None]) -> None:
    """Raises what ended the driver, out of its group."""
    error = driver.exception()
    while isinstance(error, BaseExceptionGroup):
        wanted = [one for one in error.exceptions if isinstance(one, UserError)]
        error = wanted[0] if wanted else error.exceptions[0]
    if error is not None:
        raise error
