"""What goes over the wire to a chat endpoint: the key, and how its messages are read."""

import email.utils
import json
import os
import time
from collections.abc import Mapping
from typing import Any

from stages.errors import UserError
from stages.rewrite.chat import Answer
from stages.rewrite.settings import Rewriting
from stages.variables import VARIABLE


class Secret:
    """A key that is not printed."""

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def hide_in(self, text: str) -> str:
        """The text without the key, in case an endpoint repeats it."""
        return text.replace(self._value, "***")

    def __repr__(self) -> str:
        return "Secret(***)"


def read_key(settings: Rewriting) -> Secret | None:
    """The endpoint's key from the environment.

    Raises:
        UserError: the variable is not set, or empty.
    """
    name = settings.key_variable
    if name is None:
        return None
    value = os.environ.get(name, "").strip()
    if not value:
        state = "empty" if name in os.environ else "not set"
        raise UserError(
            f"rewriting.key_variable: the environment variable {name} is {state}; put the "
            "endpoint's key there, or set key_variable: null if it needs none"
        )
    return Secret(value)


def read_variables(settings: Rewriting) -> dict[str, Secret]:
    """What the ${VARIABLES} of `extra` and `engine_options` stand for, from the environment.

    Raises:
        UserError: one of them is not set, or empty.
    """
    found = {}
    for name, field in variables_of(settings).items():
        if not os.environ.get(name):
            raise UserError(
                f"rewriting.{field}: the environment variable {name} is not set, or empty"
            )
        found[name] = Secret(os.environ[name])
    return found


def variables_of(settings: Rewriting) -> dict[str, str]:
    """Variables that `extra` and `engine_options` name, and which of the two does."""
    return {
        name: field
        for field in ("extra", "engine_options")
        for name in VARIABLE.findall(json.dumps(getattr(settings, field)))
    }


def filled(value: Any, variables: Mapping[str, Secret]) -> Any:
    """Plain data with ${VARIABLES} filled in: only for what is sent, never for what is kept."""
    if isinstance(value, dict):
        return {key: filled(item, variables) for key, item in value.items()}
    if isinstance(value, list):
        return [filled(item, variables) for item in value]
    if isinstance(value, str):
        return VARIABLE.sub(
            lambda found: variables[found[1]].reveal() if found[1] in variables else found[0], value
        )
    return value


def estimated_tokens(body: dict[str, Any]) -> int:
    """Prompt tokens, rather too many: three bytes each, and some around every message."""
    texts = [message["content"] for message in body["messages"]]
    return sum(len(text.encode("utf-8", "surrogatepass")) // 3 + 8 for text in texts) + 8


def read_completion(text: str, body: dict[str, Any]) -> Answer | None:
    """The answer in a chat completion to the request `body`; None where it is none.

    Tokens that it does not count are estimated, three bytes each: a budget must hold.
    """
    try:
        whole = json.loads(text)
        choice = whole["choices"][0]
        usage = whole.get("usage") or {}
        content = str(choice["message"].get("content") or "")
        prompt, made = usage.get("prompt_tokens"), usage.get("completion_tokens")
        return Answer(
            content,
            str(choice.get("finish_reason") or ""),
            estimated_tokens(body) if prompt is None else int(prompt),
            len(content.encode("utf-8", "replace")) // 3 + 1 if made is None else int(made),
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None


def error_message(text: str) -> str:
    """An error body's message, shortened."""
    try:
        whole = json.loads(text)
        error = whole["error"] if "error" in whole else whole["detail"]
        text = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        pass
    return " ".join(str(text).split())[:300]


def retry_after_seconds(retry_after: str | None) -> float | None:
    """Retry-After as seconds from now: a number, or an HTTP date."""
    if retry_after is None:
        return None
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    except ValueError:
        return None
