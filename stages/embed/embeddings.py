"""What an embeddings endpoint is asked, and how its answers are read.

An answer is `{"data": [{"index": 0, "embedding": ...}, ...], "usage": {"prompt_tokens": 12}}`. An
embedding is a list of numbers or, in base64, little-endian float32. Which one was asked for does
not matter: servers that know no base64 give numbers.
"""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from stages.embed.endpoint import EmbeddingEndpoint
from stages.endpoint.http import Reply, bytes_as_tokens, counted, parsed
from stages.endpoint.journal import request_key
from stages.errors import UserError


@dataclass(frozen=True)
class Embeddings:
    """One answered request: vectors (n, D) as they were given, float32 or float64, in the order of
    the sentences. Tokens as the endpoint counts them."""

    requests: ClassVar[int] = 1
    answer_tokens: ClassVar[int] = 0
    vectors: np.ndarray
    prompt_tokens: int


@dataclass(frozen=True)
class Vector:
    """What the journal keeps of one sentence: its unit vector, and what it cost.

    vector: fp16 in base64, so 2.7 bytes a number. requests: 1 for the first of a request, else 0.
    prompt_tokens: its share of the request's.
    """

    answer_tokens: ClassVar[int] = 0
    vector: str
    prompt_tokens: int
    requests: int

    @property
    def numbers(self) -> np.ndarray:
        """(D,) fp16"""
        return np.frombuffer(base64.b64decode(self.vector), "<f2")


def payload(settings: EmbeddingEndpoint, texts: Sequence[str]) -> dict[str, Any]:
    """The request for the vectors of some sentences, which have their prompts already."""
    body = _about(list(texts), settings)
    return body | {"encoding_format": settings.encoding}


def sentence_key(settings: EmbeddingEndpoint, text: str) -> bytes:
    """What the journal knows a sentence's vector by, whatever batch it came in."""
    return request_key(_about(text, settings))


def _about(given: str | list[str], settings: EmbeddingEndpoint) -> dict[str, Any]:
    width = {} if settings.dimensions is None else {"dimensions": settings.dimensions}
    return {"model": settings.model, "input": given} | width | settings.extra


def estimated_tokens(body: dict[str, Any]) -> int:
    """Tokens of the sentences, rather too many: see `bytes_as_tokens`, and some around each."""
    return sum(bytes_as_tokens(text) + 4 for text in body["input"])


def kept(units: np.ndarray, prompt_tokens: int) -> list[Vector]:
    """What the journal keeps of an answer: units (n, D) fp16, and the tokens of them all."""
    each, rest = divmod(prompt_tokens, max(1, len(units)))
    rows = [base64.b64encode(row.astype("<f2").tobytes()).decode() for row in units]
    return [Vector(row, each + (0 if i else rest), 0 if i else 1) for i, row in enumerate(rows)]


def read_embeddings(reply: Reply, body: dict[str, Any], what: str) -> Embeddings | None:
    """The vectors that a reply gives to the request `body`; None where it is no such list.

    Tokens that it does not count are estimated: a budget must hold.

    Args:
        what: where it comes from; starts messages.

    Raises:
        UserError: it is a list, but not of a vector of numbers for each sentence.
    """
    if reply.status != 200:
        return None
    whole = parsed(reply.text)
    try:
        rows = [(row.get("index"), row["embedding"]) for row in whole["data"]]
    except (KeyError, TypeError, AttributeError):
        return None
    count = len(body["input"])
    if len(rows) != count:
        raise UserError(
            f"{what} gave {len(rows)} vectors for {count} sentences, so nobody knows whose they "
            "are. Lower endpoint.batch_size, or look at the server"
        )
    found = [index for index, _ in rows]
    if not all(type(index) is int for index in found) or sorted(found) != list(range(count)):
        raise UserError(
            f"{what} must number its {count} vectors from 0 to {count - 1} in the field 'index', "
            f"each once; it gave {_shown(found)}. Nobody knows whose they are: look at the server"
        )
    vectors = [_numbers(embedding, what) for _, embedding in sorted(rows, key=lambda row: row[0])]
    widths = {len(vector) for vector in vectors}
    if len(widths) > 1:
        raise UserError(
            f"{what} gave vectors of several widths in one answer: {sorted(widths)}. One model has "
            "one width: look at the server"
        )
    return Embeddings(np.stack(vectors), counted(whole, "prompt_tokens", estimated_tokens(body)))


def _numbers(embedding: Any, what: str) -> np.ndarray:
    """(D,) float32 or float64"""
    vector = np.empty(0)
    try:
        if isinstance(embedding, str):
            vector = np.frombuffer(base64.b64decode(embedding, validate=True), "<f4")
        elif isinstance(embedding, list):
            vector = np.asarray(embedding)
    except (binascii.Error, ValueError):
        pass  # an empty vector is refused below
    if vector.ndim != 1 or vector.dtype.kind not in "fiu" or not vector.size:
        raise UserError(
            f"{what} gave an embedding that is neither a list of numbers nor base64 of 4-byte "
            f"floats: {_shown(embedding)}. Try endpoint.encoding: float, or look at the server"
        )
    return vector


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
