"""Telling credentials that are written down from what may be."""

import re
from collections.abc import Iterator
from typing import Any

from stages.variables import VARIABLE

CREDENTIAL_WORDS = {"authorization", "auth", "password", "passwd", "secret", "credential",
                    "credentials", "bearer", "cookie", "apikey"}  # fmt: skip
CREDENTIAL_PAIRS = re.compile(r"(api|access|private|secret|subscription|account|auth)_?keys?(_|$)")
TEXT_TOKENS = {"bos", "eos", "pad", "unk", "sep", "cls", "mask", "stop", "start", "end", "image"}


def clear_credential(value: Any) -> str | None:
    """Path of the first string in plain data that is a credential in clear text.

    It looks like one, or a key above it is named after a header or account field.
    """
    for path, text in _strings(value):
        if not text or VARIABLE.search(text):
            continue
        named = any(_names_credential(key) for key in path)
        if named or re.match(r"(bearer|basic)\s+\S", text, re.IGNORECASE):
            return ".".join(path)
    return None


def _strings(value: Any, *path: str) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _strings(item, *path, str(key))


def _names_credential(key: str) -> bool:
    name = re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower())
    words = set(name.split("_"))
    token = "token" in words and not words & TEXT_TOKENS
    return token or bool(words & CREDENTIAL_WORDS) or bool(CREDENTIAL_PAIRS.search(name))
