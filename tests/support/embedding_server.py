"""An embeddings endpoint on loopback (tests/support/endpoint_server.py); requests are about tuples
of sentences."""

import base64
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.support.endpoint_server import EndpointServer, Reply

WIDTH = 8


def made_up(texts: Sequence[str]) -> np.ndarray:
    """Vectors (n, WIDTH) float32 that depend on the text alone."""
    sources = [np.random.default_rng(zlib.crc32(text.encode())) for text in texts]
    return np.stack([source.normal(size=WIDTH) for source in sources]).astype(np.float32)


class EmbeddingServer(EndpointServer):
    """
    Args:
        vectors_of: gives the vectors (n, D) float32 of sentences.
        knows_base64: whether it does more than numbers as text.
    """

    route = "/embeddings"

    def __init__(
        self,
        behave: Callable[[tuple[str, ...], int, int], Reply] = lambda texts, nth, total: Reply(),
        vectors_of: Callable[[Sequence[str]], np.ndarray] = made_up,
        knows_base64: bool = True,
    ) -> None:
        self._vectors_of, self._knows_base64 = vectors_of, knows_base64
        super().__init__(behave)

    def about(self, body: dict[str, Any]) -> tuple[str, ...]:
        if [text[-4:] for text in body["input"]] == ["Yes."]:
            return ()  # not about a sentence: does the endpoint work?
        return tuple(body["input"])

    def paid(self, body: dict[str, Any]) -> list[str]:
        return list(body["input"])

    def answer(self, body: dict[str, Any], reply: Reply) -> dict[str, Any]:
        vectors = self._vectors_of(body["input"])
        as_base64 = self._knows_base64 and body["encoding_format"] == "base64"
        rows = [
            {"object": "embedding", "index": index, "embedding": embedded(vector, as_base64)}
            for index, vector in enumerate(vectors)
        ]
        tokens = 5 * len(rows)
        return {"object": "list", "model": body["model"], "data": rows,
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}  # fmt: skip


def embedded(vector: np.ndarray, as_base64: bool) -> str | list[float]:
    if as_base64:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(number) for number in vector]
