"""Credentials of chat endpoints: kept out of recipes, read from the environment, filled in late."""

import json
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from stages.errors import UserError
from stages.variables import VARIABLE

if TYPE_CHECKING:
    from stages.rewrite.rewriting import Rewriting


def read_key(
    settings: "Rewriting", read: Callable[[str], str | None] = os.environ.get
) -> SecretStr | None:
    """The endpoint's key.

    Args:
        read: gives the value of an environment variable.

    Raises:
        UserError: the variable is not set, or empty.
    """
    name = settings.key_variable
    if name is None:
        return None
    value = read(name)
    if value is None or not value.strip():
        state = "not set" if value is None else "empty"
        raise UserError(
            f"rewriting.key_variable: the environment variable {name} is {state}; put the "
            "endpoint's key there, or set key_variable: null if it needs none"
        )
    return SecretStr(value.strip())


def read_variables(
    settings: "Rewriting", read: Callable[[str], str | None] = os.environ.get
) -> dict[str, SecretStr]:
    """What the ${VARIABLES} of `extra` and `engine_options` stand for; arguments as `read_key`.

    Raises:
        UserError: one of them is not set, or empty.
    """
    found = {}
    for name, field in variables_of(settings).items():
        value = read(name)
        if not value:
            raise UserError(
                f"rewriting.{field}: the environment variable {name} is not set, or empty"
            )
        found[name] = SecretStr(value)
    return found


def variables_of(settings: "Rewriting") -> dict[str, str]:
    """Variables that `extra` and `engine_options` name, and which of the two does."""
    return {
        name: field
        for field in ("extra", "engine_options")
        for name in VARIABLE.findall(json.dumps(getattr(settings, field)))
    }


def filled(value: Any, variables: Mapping[str, SecretStr]) -> Any:
    """Plain data with ${VARIABLES} filled in: only for what is sent, never for what is kept."""
    if isinstance(value, dict):
        return {key: filled(item, variables) for key, item in value.items()}
    if isinstance(value, list):
        return [filled(item, variables) for item in value]
    if isinstance(value, str):
        return VARIABLE.sub(
            lambda found: (
                variables[found[1]].get_secret_value() if found[1] in variables else found[0]
            ),
            value,
        )
    return value
