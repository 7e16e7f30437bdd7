"""${VARIABLES} of a recipe. What they stand for is neither saved nor printed: files and messages
name the variable."""

import copy
import os
import re
from collections.abc import Iterable
from typing import Any

from stages.plain import without_passwords

# How strings of a recipe name an environment variable: ${NAME}.
VARIABLE = re.compile(r"\$\{(\w+)\}")
# Strings that contain ${VARIABLES}, by setting path: (filled in, as written).
Texts = dict[tuple[str, ...], tuple[str, str]]
# Shorter values are parts of ordinary words, and no secrets.
LEAST_HIDDEN = 4
# What this process has filled in, by variable: messages come from anywhere, and must not show it.
FILLED_IN: dict[str, str] = {}


def hide_values(text: str) -> str:
    """The text with ${NAME} in place of what this process has filled in for it, and without user
    and password of addresses."""
    found = {
        form: name
        for name, value in FILLED_IN.items()
        for form in (value, value.rstrip("/"), os.path.expanduser(value), os.path.abspath(value))
        if len(value.rstrip("/")) >= LEAST_HIDDEN
    }
    for form in sorted(found, key=len, reverse=True):
        text = text.replace(form, f"${{{found[form]}}}")
    return without_passwords(text)


def with_texts(raw: Any, texts: Texts) -> Any:
    """Plain data with strings as they were written, where they still are what was read."""
    raw = copy.deepcopy(raw)
    for path, (value, text) in texts.items():
        *parents, last = path
        place = value_at(raw, parents)
        if place is not None and value_at(place, [last]) == value:
            place[int(last) if isinstance(place, list) else last] = text
    return raw


def value_at(raw: Any, path: Iterable[str]) -> Any:
    """The value at a setting path of plain data; None where there is none."""
    for part in path:
        if isinstance(raw, list) and part.isdecimal() and int(part) < len(raw):
            raw = raw[int(part)]
        elif isinstance(raw, dict):
            raw = raw.get(part)
        else:
            return None
    return raw
