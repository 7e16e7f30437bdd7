"""The base of every settings class: strict, frozen, and split into identity and execution.

A field is *identity* (it changes the result, so it is part of the fingerprint) unless it is
declared with `execution(...)`: devices, worker counts, paths and inference batch sizes.
Settings classes import neither torch nor Ray, so that reading a recipe stays fast.
"""

import re
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


def execution(default: Any = ..., *, description: str, **constraints: Any) -> Any:
    """Declares a field that changes how or where the work is done, but not its result."""
    return Field(
        default, description=description, json_schema_extra={"execution": True}, **constraints
    )


# How strings of a recipe name an environment variable: ${NAME}.
VARIABLE = re.compile(r"\$\{(\w+)\}")


def late(default: Any = ..., *, description: str, **constraints: Any) -> Any:
    """Declares a field whose ${VARIABLES} are filled in when the work is done, not when it is read.

    What they stand for is secret: the settings, and so everything that is saved or fingerprinted,
    hold the names only.
    """
    return Field(default, description=description, json_schema_extra={"late": True}, **constraints)


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def identity(self) -> dict[str, Any]:
        """The settings that change the result, as plain values."""
        found: dict[str, Any] = {}
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            if isinstance(extra, dict) and extra.get("execution"):
                continue
            found[name] = _plain(getattr(self, name))
        return found


def _plain(value: Any) -> Any:
    if isinstance(value, Settings):
        return value.identity()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value
