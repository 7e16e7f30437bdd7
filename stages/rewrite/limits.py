"""What may be sent, and when: rates per minute, pauses that the endpoint asks for, the budget."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from stages.errors import UserError
from stages.rewrite.chat import Answer
from stages.rewrite.journal import Spent
from stages.rewrite.settings import Rewriting

# Requests keep this much below the limits: two that leave a second apart may arrive closer
MARGIN = 0.98


@dataclass
class Grant:
    """What was taken of a limit, and when."""

    at: float
    cost: float


class Pacer:
    """A token bucket for what has a limit per minute: in no 60 seconds is more than it granted.

    Grants are spaced at the allowed rate, and those of the last minute are remembered, since one
    may be larger than those before it. Memory: one entry for each.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._free_at = 0.0
        self._used = 0.0
        self._last_minute: deque[Grant] = deque()

    def wait(self, cost: float) -> float:
        """Seconds until this cost may be taken; not positive when it may be now."""
        now = self._clock()
        while self._last_minute and self._last_minute[0].at + 60 <= now:
            self._used -= self._last_minute.popleft().cost
        spare, until = self._per_minute - self._used, now
        for grant in self._last_minute:
            if spare >= cost:
                break
            spare, until = spare + grant.cost, grant.at + 60
        return max(self._free_at, until) - now

    def take(self, cost: float) -> Grant:
        """Grants the cost now."""
        now = self._clock()
        self._free_at = max(self._free_at, now) + self._seconds(cost)
        self._used += cost
        self._last_minute.append(Grant(now, cost))
        return self._last_minute[-1]

    def give_back(self, grant: Grant, unused: float) -> None:
        """Returns what was taken and not used (or, below 0, takes what was used beyond)."""
        self._free_at -= self._seconds(unused)
        if self._last_minute and grant.at >= self._last_minute[0].at:
            grant.cost -= unused
            self._used -= unused

    def _seconds(self, cost: float) -> float:
        return 60 * cost / (MARGIN * self._per_minute)


@dataclass(eq=False)
class Taken:
    """A request on its way: what it may cost at most."""

    prompt_tokens: int
    answer_tokens: int
    grant: Grant | None = None


class Limits:
    """All limits of one stage; asked before every request.

    Raises:
        UserError: one request may need more tokens than tokens_per_minute allows.
    """

    def __init__(
        self, settings: Rewriting, spent: Spent, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._spent = spent
        self._clock = clock
        self._reserved: list[Taken] = []
        self._paused_until = 0.0
        self._requests = self._tokens = None
        if settings.requests_per_minute is not None:
            self._requests = Pacer(settings.requests_per_minute, clock)
        if settings.tokens_per_minute is not None:
            self._tokens = Pacer(settings.tokens_per_minute, clock)

    def pause(self, seconds: float) -> None:
        """Nothing is sent for so long."""
        self._paused_until = max(self._paused_until, self._clock() + seconds)

    def wait(self, prompt_tokens: int) -> float:
        """Seconds until a request may go; not positive when it may go now."""
        delay = self._paused_until - self._clock()
        if self._requests is not None:
            delay = max(delay, self._requests.wait(1))
        if self._tokens is not None:
            cost = prompt_tokens + self._settings.max_answer_tokens
            if cost > (self._settings.tokens_per_minute or 0):
                raise UserError(
                    f"rewriting.tokens_per_minute {self._settings.tokens_per_minute} is less than "
                    f"one request may need (about {cost} tokens); raise it, or lower "
                    "max_answer_tokens"
                )
            delay = max(delay, self._tokens.wait(cost))
        return delay

    def take(self, prompt_tokens: int) -> "Taken":
        """Grants a request; hand what is returned to `settle` when it is over."""
        taken = Taken(prompt_tokens, self._settings.max_answer_tokens)
        self._reserved.append(taken)
        if self._requests is not None:
            self._requests.take(1)
        if self._tokens is not None:
            taken.grant = self._tokens.take(taken.prompt_tokens + taken.answer_tokens)
        return taken

    def settle(self, taken: "Taken", answer: Answer | None) -> None:
        """Ends a request: what it did not use is free again."""
        self._reserved.remove(taken)
        used = 0 if answer is None else answer.prompt_tokens + answer.answer_tokens
        if self._tokens is not None and taken.grant is not None:
            unused = taken.prompt_tokens + taken.answer_tokens - used
            self._tokens.give_back(taken.grant, unused)

    def exceeded(self, prompt_tokens: int) -> str | None:
        """The budget setting that one more request could exceed, requests in flight included."""
        budget = self._settings.budget
        pending = [*self._reserved, Taken(prompt_tokens, self._settings.max_answer_tokens)]
        prompt = self._spent.prompt_tokens + sum(one.prompt_tokens for one in pending)
        answer = self._spent.answer_tokens + sum(one.answer_tokens for one in pending)
        requests = self._spent.requests + len(pending)
        if budget.max_requests is not None and requests > budget.max_requests:
            return "max_requests"
        if budget.max_tokens is not None and prompt + answer > budget.max_tokens:
            return "max_tokens"
        if budget.max_cost is not None and (self._cost(prompt, answer) or 0) > budget.max_cost:
            return "max_cost"
        return None

    @property
    def summary(self) -> str:
        """What has been spent, in words."""
        spent = self._spent
        text = f"{spent.requests:,} answers, {spent.prompt_tokens + spent.answer_tokens:,} tokens"
        cost = self._cost(spent.prompt_tokens, spent.answer_tokens)
        return text if cost is None else f"{text}, cost {cost:,.4f}"

    def _cost(self, prompt_tokens: int, answer_tokens: int) -> float | None:
        budget = self._settings.budget
        prices = budget.price_per_million_prompt_tokens, budget.price_per_million_answer_tokens
        if prices[0] is None or prices[1] is None:
            return None
        return (prompt_tokens * prices[0] + answer_tokens * prices[1]) / 1e6
