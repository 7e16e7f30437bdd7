"""Asking an embeddings endpoint with the settings and the patience of tests."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import SecretStr

from stages.embed.client import EmbeddingClient
from stages.embed.embeddings import Vector
from stages.embed.endpoint import EmbeddingEndpoint
from stages.endpoint.credentials import read_variables
from stages.endpoint.failures import Patience
from stages.endpoint.journal import Journal
from stages.files import Root
from tests.support.chat_client import QUICK
from tests.support.embedding_server import made_up


def settings_of(**changes: Any) -> EmbeddingEndpoint:
    return EmbeddingEndpoint.model_validate({"model": "m", "key_variable": None} | changes)


def journal_in(place: Path | Root) -> "Journal[Vector]":
    root = place if isinstance(place, Root) else Root(str(place))
    return Journal(root, "embeddings", "me", Vector)


def ask(
    server: Any,
    tmp_path: Path,
    sentences: Sequence[str],
    key: SecretStr | None = None,
    patience: Patience = QUICK,
    say: Callable[..., None] = lambda line, important=False: None,
    may_pay: Callable[[], bool] = lambda: True,
    root: Root | None = None,
    **settings: Any,
) -> np.ndarray:
    """Vectors in the order of the sentences (N, D) fp16; each is given exactly once."""
    defaults = {"base_url": server.url, "timeout_seconds": 20.0, "batch_size": 4}
    chosen = settings_of(**defaults | settings)
    client = EmbeddingClient(
        chosen, key, journal_in(root or tmp_path), say, patience, read_variables(chosen), may_pay
    )
    found: dict[int, np.ndarray] = {}
    asked = map(chosen.asked, sentences)
    for refs, vectors in client.run(((0, row), text) for row, text in enumerate(asked)):
        for (_, row), vector in zip(refs, vectors, strict=True):
            assert row not in found
            found[row] = vector
    return np.stack([found[row] for row in range(len(sentences))])


def expected(sentences: Sequence[str], prompt: str = "") -> np.ndarray:
    """What the server's made-up vectors become (N, D) fp16."""
    vectors = made_up([prompt + text for text in sentences]).astype(np.float64)
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float16)
