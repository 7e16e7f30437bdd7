"""Asking a chat endpoint with the settings and the patience of tests."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from stages.endpoint.failures import Patience
from stages.endpoint.journal import Journal
from stages.files import Root
from stages.rewrite.chat import Answer
from stages.rewrite.client import ChatClient
from stages.rewrite.rewrites import Outcome
from stages.rewrite.rewriting import Rewriting

QUICK = Patience(first_seconds=0.005, most_seconds=0.05, busy_seconds=20.0)


def settings_of(**changes: Any) -> Rewriting:
    chosen = {"model": "m", "key_variable": None} | changes
    return Rewriting.model_validate(chosen)


def ask(
    server: Any,
    tmp_path: Path,
    sentences: Sequence[str],
    key: SecretStr | None = None,
    patience: Patience = QUICK,
    say: Callable[..., None] = lambda line, important=False: None,
    **settings: Any,
) -> dict[str, Outcome]:
    """Outcomes by sentence; the rows' refs are their numbers."""
    chosen = settings_of(base_url=server.url, **{"timeout_seconds": 20.0} | settings)
    journal = Journal(Root(str(tmp_path)), "answers", "me", Answer)
    client = ChatClient(chosen, key, journal, say, patience)
    found = dict(client.run(enumerate(sentences)))
    assert len(found) == len(sentences)
    return {sentences[number]: outcome for number, outcome in found.items()}
