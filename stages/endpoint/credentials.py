"""Credentials of endpoints: kept out of recipes, read from the environment, filled in late."""

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import SecretStr

from stages.endpoint.settings import EndpointSettings
from stages.errors import UserError
from stages.variables import VARIABLE


def read_key(
    settings: EndpointSettings, read: Callable[[str], str | None] = os.environ.get
) -> SecretStr | None:
    """The endpoint's key.

    Args:
        read: gives the value of an environment variable.

    Raises:
        UserError: the variable is not set, empty, or no key at all.
    """
    name = settings.key_variable
    if name is None:
        return None
    value = read(name)
    if value is None or not value.strip():
        state = "not set" if value is None else "empty"
        raise UserError(
            f"{settings.section}.key_variable: the environment variable {name} is {state}; put the "
            "endpoint's key there, or set key_variable: null if it needs none"
        )
    key = value.strip()
    if any(letter < " " or letter == "\x7f" for letter in key):  # no header can hold it
        raise UserError(
            f"{settings.section}.key_variable: the environment variable {name} has a line break or "
            "another control character inside; put the endpoint's key alone there, in one line"
        )
    return SecretStr(key)


def read_variables(
    settings: EndpointSettings, read: Callable[[str], str | None] = os.environ.get
) -> dict[str, SecretStr]:
    """What the ${VARIABLES} of `extra` and the like stand for; arguments as `read_key`.

    Raises:
        UserError: one of them is not set, or empty.
    """
    found = {}
    for name, field in variables_of(settings).items():
        value = read(name)
        if not value:
            raise UserError(
                f"{settings.section}.{field}: the environment variable {name} is not set, or empty"
            )
        found[name] = SecretStr(value)
    return found


def variables_of(settings: EndpointSettings) -> dict[str, str]:
    """Variables that `extra` and other such fields name, and which of them does."""
    return {
        name: field
        for field in settings.late_fields()
        for name in VARIABLE.findall(json.dumps(getattr(settings, field)))
    }


def secrets_of(settings: EndpointSettings) -> tuple[str, ...]:
    """All environment variables that a request takes (`Resources.secrets`)."""
    key = [settings.key_variable] if settings.key_variable else []
    return tuple(dict.fromkeys([*key, *variables_of(settings)]))


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
