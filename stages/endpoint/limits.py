"""What may be sent, and when: rates per minute, pauses that the endpoint asks for, the budget."""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from stages.endpoint.journal import Paid, Spent
from stages.endpoint.settings import EndpointSettings
from stages.errors import UserError

# Requests keep this much below the limits: two that leave a second apart may arrive closer
MARGIN = 0.98


@dataclass(eq=False)
class Grant:
    """What was taken of a limit, and when."""

    at: float
    cost: float


class Pacer:
    """A token bucket for what has a limit per minute: in no 60 seconds is more than it granted.

    Grants are spaced at the allowed rate, and those of the last minute are remembered, since one
    may be larger than those before it. Memory: one entry for each.
    """

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
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


class Limits:
    """All limits of one stage; asked before every request."""

    def __init__(
        self,
        settings: EndpointSettings,
        spent: Spent,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._spent = spent
        self._clock = clock
        self._in_flight: list[Grant] = []
        self._paused_until = 0.0
        self._requests = Pacer(settings.requests_per_minute or math.inf, clock)
        self._tokens = Pacer(settings.tokens_per_minute or math.inf, clock)

    def pause(self, seconds: float) -> None:
        """Nothing is sent for so long."""
        self._paused_until = max(self._paused_until, self._clock() + seconds)

    def wait(self, prompt_tokens: int) -> float:
        """Seconds until a request may go; not positive when it may go now.

        Raises:
            UserError: it may need more tokens than tokens_per_minute allows.
        """
        cost = prompt_tokens + self._settings.most_answer_tokens
        if cost > (self._settings.tokens_per_minute or math.inf):
            raise UserError(
                f"{self._settings.section}.tokens_per_minute {self._settings.tokens_per_minute} is "
                f"less than one request may need (about {cost} tokens); raise it, or lower "
                f"{self._settings.lowers_tokens}"
            )
        pause = self._paused_until - self._clock()
        return max(pause, self._requests.wait(1), self._tokens.wait(cost))

    def take(self, prompt_tokens: int) -> Grant:
        """Grants a request and its tokens; hand what is returned to `settle` when it is over."""
        self._requests.take(1)
        self._in_flight.append(self._tokens.take(prompt_tokens + self._settings.most_answer_tokens))
        return self._in_flight[-1]

    def settle(self, grant: Grant, answer: Paid | None) -> None:
        """Ends a request: what it did not use is free again."""
        self._in_flight.remove(grant)
        used = 0 if answer is None else answer.prompt_tokens + answer.answer_tokens
        self._tokens.give_back(grant, grant.cost - used)

    def exceeded(self, prompt_tokens: int) -> str | None:
        """The budget setting that one more request could exceed, requests in flight included."""
        budget, most_answer = self._settings.budget, self._settings.most_answer_tokens
        pending = [prompt_tokens, *(grant.cost - most_answer for grant in self._in_flight)]
        prompt = self._spent.prompt_tokens + sum(pending)
        answer = self._spent.answer_tokens + len(pending) * most_answer
        requests = self._spent.requests + len(pending)
        if budget.max_requests is not None and requests > budget.max_requests:
            return "max_requests"
        if budget.max_tokens is not None and prompt + answer > budget.max_tokens:
            return "max_tokens"
        if budget.max_cost is not None and (budget.cost(prompt, answer) or 0) > budget.max_cost:
            return "max_cost"
        return None

    @property
    def summary(self) -> str:
        """What has been spent, in words."""
        spent = self._spent
        text = f"{spent.requests - spent.unanswered:,} answers, "
        if spent.unanswered:
            text += f"{spent.unanswered:,} requests without one (each as dear as it may be), "
        text += f"{spent.prompt_tokens + spent.answer_tokens:,} tokens"
        cost = self._settings.budget.cost(spent.prompt_tokens, spent.answer_tokens)
        return text if cost is None else f"{text}, cost {cost:,.4f}"
