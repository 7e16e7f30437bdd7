"""Asks an OpenAI-compatible embeddings endpoint for many vectors (stages/endpoint/client.py).

A batch that the endpoint minds, or always fails at, is halved until the one sentence is found that
is at fault. There must be a vector for every sentence, so that one stops the stage. What has been
answered is in the journal, by sentence, and never asked for again.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import SecretStr

from stages.embed.embeddings import (
    Embeddings,
    Vector,
    estimated_tokens,
    kept,
    payload,
    read_embeddings,
    sentence_key,
)
from stages.embed.endpoint import EmbeddingEndpoint
from stages.endpoint.client import Client, GivenUp, Request
from stages.endpoint.failures import CONTINUES, Patience
from stages.endpoint.http import Reply
from stages.endpoint.journal import Journal, Spent
from stages.errors import UserError
from stages.rows import directions, without_direction

Ref = tuple[int, int]  # shard, place
Rows = tuple[list[Ref], np.ndarray]


@dataclass
class _Batch(Request):
    """Sentences that are asked for together; `known`: their vectors (n, D), which are there."""

    refs: list[Ref]
    texts: list[str]
    known: np.ndarray | None = None

    @property
    def num_sentences(self) -> int:
        return len(self.texts)


class EmbeddingClient(Client[_Batch, Embeddings, Rows]):
    """Sentences in, unit vectors out; see the module.

    Args:
        width: that vectors must have; 0: that of the first.
    """

    def __init__(
        self,
        settings: EmbeddingEndpoint,
        key: SecretStr | None,
        journal: Journal[Vector],
        say: Callable[..., None],
        patience: Patience | None = None,
        variables: Mapping[str, SecretStr] | None = None,
        may_pay: Callable[[], bool] = lambda: True,
        width: int = 0,
    ) -> None:
        super().__init__(settings, key, journal, say, patience, variables, may_pay)
        self._settings = settings
        self._width = width or settings.dimensions or 0
        self._has_split = False
        # whose other rows have the same text, which is asked for once
        self._asked_for: dict[str, list[Ref]] = {}

    def run(self, rows: Iterable[tuple[Ref, str]]) -> Iterator[Rows]:
        """Sentences' refs with their unit vectors (n, D) fp16, as they come, in any order.

        Args:
            rows: sentences as they are asked for, prompts included (`EmbeddingEndpoint.asked`).

        Raises:
            UserError: the endpoint cannot be used, answers no more, gives vectors that cannot be
                used, refuses a sentence, or the budget is spent.
        """
        return self.run_requests(self._batches(rows))

    def known(self, text: str) -> np.ndarray | None:
        """The vector of a sentence that is there already, (D,) fp16; its width is that of all.

        Raises:
            UserError: it is another one.
        """
        found = self._journal.get(sentence_key(self._settings, text))
        if found is None:
            return None
        self._check_width(len(found.numbers))
        return found.numbers

    def _batches(self, rows: Iterable[tuple[Ref, str]]) -> Iterator[_Batch]:
        """Sentences whose vectors are there apart from those that are to be asked for."""
        there: list[tuple[Ref, str]] = []
        wanted: list[tuple[Ref, str]] = []
        vectors: list[np.ndarray] = []
        size = self._settings.batch_size
        for row in rows:
            if row[1] in self._asked_for:
                self._asked_for[row[1]].append(row[0])
                continue
            vector = self.known(row[1])
            if vector is None:
                self._asked_for[row[1]] = []
                wanted.append(row)
            else:
                there.append(row)
                vectors.append(vector)
            if len(wanted) == size:
                yield _batch(wanted)
                wanted = []
            if len(there) == size:
                yield _batch(there, np.stack(vectors))
                there, vectors = [], []
        if there:
            yield _batch(there, np.stack(vectors))
        if wanted:
            yield _batch(wanted)

    def prepare(self, batch: _Batch) -> Rows | None:
        batch.body = payload(self._settings, batch.texts)
        return None if batch.known is None else (batch.refs, batch.known)

    def probe(self) -> dict[str, Any]:
        return payload(self._settings, [self._settings.asked("Yes.")])

    def estimated_tokens(self, body: dict[str, Any]) -> int:
        return estimated_tokens(body)

    def read(self, reply: Reply, body: dict[str, Any]) -> Embeddings | None:
        answer = read_embeddings(reply, body, self._endpoint.url)
        if answer is not None:
            self._check_width(answer.vectors.shape[1])
        return answer

    def keep(self, batch: _Batch, answer: Embeddings) -> None:
        """Writes down all vectors that have a direction, also where one has none."""
        vectors = answer.vectors.astype(np.float64)
        norms = np.linalg.norm(vectors, axis=1)
        good = np.delete(np.arange(len(norms)), without_direction(norms))
        units = (vectors[good] / norms[good, None]).astype(np.float16)
        if not len(good):
            self._journal.charge(Spent(1, answer.prompt_tokens, unanswered=1))
        keys = [sentence_key(self._settings, batch.texts[row]) for row in good]
        self._journal.add(zip(keys, kept(units, answer.prompt_tokens), strict=True))

    def judge(self, batch: _Batch, answer: Embeddings) -> Rows:
        units = directions(
            answer.vectors, self._endpoint.url, lambda row: shown(batch.refs[row], batch.texts[row])
        )
        others = [self._asked_for.pop(text) for text in batch.texts]
        rows = [row for row, refs in enumerate(others) for _ in refs]
        refs = [ref for refs in others for ref in refs]
        return batch.refs + refs, units.astype(np.float16)[[*range(len(units)), *rows]]

    def give_up(self, batch: _Batch, reason: str, said: str) -> GivenUp[_Batch, Rows]:
        about = f"{reason} {said}".strip()
        count = len(batch.texts)
        if count == 1:
            raise UserError(
                f"{self._endpoint.url} gives no vector for sentence "
                f"{shown(batch.refs[0], batch.texts[0])}, and every sentence needs one: {about}. "
                "Is it too long? Leave such sentences out (sentences.max_chars), or have the "
                f"endpoint cut them (endpoint.extra). {CONTINUES}"
            )
        if not self._has_split:
            self._has_split = True
            self._say(
                f"WARNING: {count} sentences in one request: {about}. It is halved until all are "
                "answered or the one at fault is found. If none is, such requests are too large "
                "and all this is slow: lower endpoint.batch_size",
                important=True,
            )
        rows = list(zip(batch.refs, batch.texts, strict=True))
        return GivenUp(instead=(_batch(rows[: count // 2]), _batch(rows[count // 2 :])))

    def _check_width(self, width: int) -> None:
        """Takes note of the first vector's width.

        Raises:
            UserError: this one has another.
        """
        self._width = self._width or width
        if width == self._width:
            return
        asked = self._settings.dimensions
        if asked is not None:
            raise UserError(
                f"endpoint.dimensions is {asked}, but {self._endpoint.url} gives vectors of "
                f"{width}: it ignores the setting. Leave it out, or take a model that can be cut"
            )
        raise UserError(
            f"{self._endpoint.url} gives vectors of {width} dimensions, after some of "
            f"{self._width}. Is another model behind the name '{self._settings.model}' now? "
            "Serve it under a name of its own, so that the two are not mixed"
        )


def _batch(rows: Sequence[tuple[Ref, str]], known: np.ndarray | None = None) -> _Batch:
    return _Batch([ref for ref, _ in rows], [text for _, text in rows], known)


def shown(ref: Ref, text: str) -> str:
    """A sentence as messages name it."""
    cut = text if len(text) <= 80 else f"{text[:80]}..."
    return f"{cut!r} ({len(text):,} characters; row {ref[1]} of shard {ref[0]})"
