"""Asks an OpenAI-compatible chat endpoint about many sentences at once (stages/endpoint/client.py).

A sentence whose answer cannot be used is asked about again, with a reminder, up to `max_answers`
times. One that the endpoint minds, or always fails at, is rejected with that reason.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import SecretStr

from stages.endpoint.client import Client, GivenUp, Request
from stages.endpoint.failures import Patience
from stages.endpoint.http import Reply
from stages.endpoint.journal import Journal, request_key
from stages.errors import UserError
from stages.rewrite.chat import Answer, estimated_tokens, payload, read_answer, read_completion
from stages.rewrite.rewrites import Outcome
from stages.rewrite.rewriting import Rewriting

Ref = TypeVar("Ref")

UNUSABLE_BEFORE_STOP = 20  # answers, none usable before


@dataclass
class _Row(Request):
    """A sentence to be rewritten, and its unusable answers with their reasons."""

    ref: Any
    sentence: str
    unusable: list[tuple[str, str]] = field(default_factory=list)


class ChatClient(Client[_Row, Answer, tuple[Any, Outcome]]):
    """Sentences in, outcomes out; see the module."""

    def __init__(
        self,
        settings: Rewriting,
        key: SecretStr | None,
        journal: Journal[Answer],
        say: Callable[..., None],
        patience: Patience | None = None,
        variables: Mapping[str, SecretStr] | None = None,
        may_pay: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__(settings, key, journal, say, patience, variables, may_pay)
        self._settings = settings
        self._usable = self._unusable = 0

    def run(self, rows: Iterable[tuple[Ref, str]]) -> Iterator[tuple[Ref, Outcome]]:
        """Outcomes as they come, in any order; takes rows as it has room for them.

        Raises:
            UserError: the endpoint cannot be used, answers no more, or the budget is spent.
        """
        return self.run_requests(_Row(ref, sentence) for ref, sentence in rows)

    def prepare(self, row: _Row) -> tuple[Any, Outcome] | None:
        """The row's outcome as far as the journal has its answers; else its next request."""
        while True:
            row.body = payload(self._settings, row.sentence, row.unusable)
            answer = self._journal.get(request_key(row.body))
            if answer is None:
                return None
            outcome = self._judged(row, answer)
            if outcome is not None:
                return row.ref, outcome

    def probe(self) -> dict[str, Any]:
        body = payload(self._settings, "Yes.", [])
        # reasoning models refuse a limit that their thoughts may not keep to
        return body | ({"max_tokens": 4} if "max_tokens" in body else {})

    def estimated_tokens(self, body: dict[str, Any]) -> int:
        return estimated_tokens(body)

    def read(self, reply: Reply, body: dict[str, Any]) -> Answer | None:
        return read_completion(reply, body)

    def keep(self, row: _Row, answer: Answer) -> None:
        self._journal.add([(request_key(row.body), answer)])

    def judge(self, row: _Row, answer: Answer) -> tuple[Any, Outcome] | None:
        outcome = self._judged(row, answer)
        if not self._usable and self._unusable >= UNUSABLE_BEFORE_STOP:
            most = self._settings.max_answer_tokens
            cut = answer.finish_reason == "length"
            raise UserError(
                f"model '{self._settings.model}' gave {self._unusable} answers and none was a JSON "
                f"object with the field '{self._settings.rewrite_field}'; the last one "
                + (f"was cut off at rewriting.max_answer_tokens {most}, and " if cut else "")
                + f"began: {self._endpoint.hidden(answer.text)[:80]!r}. "
                + ("Raise that, or change" if cut else "Change")
                + " rewriting.prompt, fields or model."
            )
        return None if outcome is None else (row.ref, outcome)

    def give_up(self, row: _Row, reason: str, said: str) -> GivenUp[_Row, tuple[Any, Outcome]]:
        about_sentence = reason.startswith("refused")  # a failure's message is about the endpoint
        return GivenUp((row.ref, Outcome(said if about_sentence else "", reason=reason)))

    def _judged(self, row: _Row, answer: Answer) -> Outcome | None:
        """The outcome of an answer; None when the row is to be asked again."""
        outcome = read_answer(self._settings, answer)
        if outcome.reason is None:
            self._usable += 1
            return outcome
        self._unusable += 1
        row.unusable.append((answer.text, outcome.reason))
        return outcome if len(row.unusable) == self._settings.max_answers else None
