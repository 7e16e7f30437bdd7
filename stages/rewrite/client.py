"""Asks an OpenAI-compatible chat endpoint about many sentences at once.

One dispatcher sends everything, so rates, pauses and the budget hold for the whole stage. A request
in flight holds one of `concurrency` slots until it is known what its failure means; a sentence that
waits to be tried again holds none. The first request goes alone: a wrong address, key or model is
one message within seconds. What a failure means is in `failures`.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import SecretStr

from stages.errors import UserError
from stages.rewrite.chat import Answer, payload, read_answer
from stages.rewrite.endpoint import Endpoint, estimated_tokens, read_completion
from stages.rewrite.failures import Failures, Patience
from stages.rewrite.journal import Journal, request_key
from stages.rewrite.limits import Grant, Limits
from stages.rewrite.rewrites import Outcome
from stages.rewrite.rewriting import Rewriting

Ref = TypeVar("Ref")

SECONDS_BETWEEN_LINES = 5.0
UNUSABLE_BEFORE_STOP = 20  # answers, none usable before


@dataclass
class _Row:
    """A sentence to be rewritten: its unusable answers, failed attempts and next request."""

    ref: Any
    sentence: str
    unusable: list[tuple[str, str]] = field(default_factory=list)
    attempts: int = 0
    body: dict[str, Any] = field(default_factory=dict)


class ChatClient:
    """Sentences in, outcomes out; see the module.

    Args:
        journal: answers that are there are not asked for again; its owner's budget counts.
        say: takes a line of progress.
        variables: what ${VARIABLES} in the settings' `extra` stand for.
    """

    def __init__(
        self,
        settings: Rewriting,
        key: SecretStr | None,
        journal: Journal,
        say: Callable[[str], None],
        patience: Patience | None = None,
        variables: Mapping[str, SecretStr] | None = None,
    ) -> None:
        self._settings, self._journal, self._say = settings, journal, say
        self._patience = patience or Patience()
        self._limits = Limits(settings, journal.spent())
        self._endpoint = Endpoint(settings, key, variables or {})
        self._failures = Failures(settings, self._endpoint, self._limits, self._patience)
        self._outcomes: asyncio.Queue[tuple[Any, Outcome] | None]
        self._outcomes = asyncio.Queue(2 * settings.concurrency)
        self._retries: deque[_Row] = deque()
        self._changed = asyncio.Event()
        # sentences taken and not finished, tasks that send one, requests on their way
        self._open = self._tasks = self._in_flight = 0
        self._usable = self._unusable = self._done = 0
        self._fatal: Exception | None = None
        self._last_line = time.monotonic()

    def run(self, rows: Iterable[tuple[Ref, str]]) -> Iterator[tuple[Ref, Outcome]]:
        """Outcomes as they come, in any order; takes rows as it has room for them.

        Raises:
            UserError: the endpoint cannot be used, answers no more, or the budget is spent.
        """
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            loop = runner.get_loop()
            driver = loop.create_task(self._drive(iter(rows)))  # noqa: F841 - or it is collected
            while (found := loop.run_until_complete(self._outcomes.get())) is not None:
                yield found
        if self._fatal is not None:
            raise self._fatal

    async def _drive(self, rows: Iterator[tuple[Any, str]]) -> None:
        """Sends what is to be sent. A None ends the outcomes; `_fatal` says what went wrong."""
        try:
            async with self._endpoint.opened(), asyncio.TaskGroup() as group:
                while (row := await self._next_row(rows)) is not None:
                    outcome = self._replayed(row)
                    if outcome is not None:
                        await self._give(row, outcome)
                        continue
                    grant = await self._permission(row)
                    self._tasks += 1
                    group.create_task(self._send(row, grant))
                    self._tell()
        except Exception as error:
            errors = error.exceptions if isinstance(error, ExceptionGroup) else [error]
            self._fatal = next((one for one in errors if isinstance(one, UserError)), errors[0])
        await self._outcomes.put(None)

    async def _next_row(self, rows: Iterator[tuple[Any, str]]) -> _Row | None:
        """One to be tried again if there is any, else a new one; None when all are done."""
        while True:
            self._changed.clear()
            if self._fatal is None:
                if self._retries:
                    return self._retries.popleft()
                if self._open < 3 * self._settings.concurrency:  # else many wait already
                    new = next(rows, None)
                    if new is not None:
                        self._open += 1
                        return _Row(*new)
                if not self._open:
                    return None
            elif not self._tasks:
                raise self._fatal
            await self._changed.wait()

    def _replayed(self, row: _Row) -> Outcome | None:
        """The row's outcome as far as the journal has its answers; else its next request."""
        while True:
            row.body = payload(self._settings, row.sentence, row.unusable)
            answer = self._journal.get(request_key(row.body))
            if answer is None:
                return None
            outcome = self._judged(row, answer)
            if outcome is not None:
                return outcome

    def _judged(self, row: _Row, answer: Answer) -> Outcome | None:
        """The outcome of an answer; None when the row is to be asked again."""
        outcome = read_answer(self._settings, answer)
        if outcome.reason is None:
            self._usable += 1
            return outcome
        self._unusable += 1
        row.unusable.append((answer.text, outcome.reason))
        return outcome if len(row.unusable) == self._settings.max_answers else None

    async def _permission(self, row: _Row) -> Grant:
        """Waits for a slot, the limits and the budget."""
        tokens = estimated_tokens(row.body)
        while True:
            self._changed.clear()
            if self._fatal is not None and not self._tasks:
                raise self._fatal
            delay = self._limits.wait(tokens)
            short = self._limits.exceeded(tokens)
            if short is not None and not self._tasks:
                raise UserError(
                    f"rewriting.budget.{short} is reached: {self._limits.summary} so far. "
                    "Raise it and run again to continue; nothing is paid twice."
                )
            most = self._settings.concurrency if self._failures.reached else 1
            free = self._fatal is None and short is None and self._in_flight < most
            if free and delay <= 0:
                self._in_flight += 1
                return self._limits.take(tokens)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), delay if free else None)

    async def _send(self, row: _Row, grant: Grant) -> None:
        """Sends a row's request; gives its outcome, or puts the row back to be tried again."""
        answer = outcome = None
        backoff_seconds = 0.0
        try:
            reply = await self._endpoint.post(row.body)
            answer = read_completion(reply, row.body)
            if answer is not None:
                self._journal.add(request_key(row.body), answer)
                self._failures.answered()
                row.attempts = 0
                outcome = self._judged(row, answer)
                self._check_usable(answer)
            elif reply.status == 429:
                self._failures.busy(reply)
            elif reply.status in (0, 200, 408, 409, 425) or reply.status >= 500:
                row.attempts += 1
                backoff_seconds = self._patience.backoff(row.attempts)
                outcome = await self._failures.failed(reply, row.attempts)
            else:
                outcome = await self._failures.refused(reply)
        except UserError as error:
            # others in flight are answered, and paid for: the driver lets them end before it stops
            self._fatal, outcome = self._fatal or error, None
        finally:
            self._in_flight -= 1
            self._limits.settle(grant, answer)
            self._changed.set()
        if outcome is None:
            asyncio.get_running_loop().call_later(backoff_seconds, self._again, row)
        else:
            await self._give(row, outcome)
        self._tasks -= 1
        self._changed.set()

    async def _give(self, row: _Row, outcome: Outcome) -> None:
        self._open -= 1
        self._done += 1
        await self._outcomes.put((row.ref, outcome))

    def _again(self, row: _Row) -> None:
        self._retries.append(row)
        self._changed.set()

    def _check_usable(self, answer: Answer) -> None:
        if not self._usable and self._unusable >= UNUSABLE_BEFORE_STOP:
            raise UserError(
                f"model '{self._settings.model}' gave {self._unusable} answers and none was a JSON "
                f"object with the field '{self._settings.rewrite_field}'; the last one began: "
                f"{self._endpoint.hidden(answer.text)[:80]!r}. Change rewriting.prompt, fields or "
                "model."
            )

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._say(
                f"{self._done:,} sentences, {self._in_flight} requests in flight, "
                f"{self._failures.num_busy:,} times 429; {self._limits.summary}"
            )
