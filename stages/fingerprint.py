"""Fingerprints: what changes the result, as one hash."""

import hashlib
import json
import math
from typing import Any


def fingerprint(value: Any) -> str:
    """SHA-256 (hex) of plain data; the order of a dict's keys does not matter.

    Raises:
        TypeError: anything that has no stable encoding (objects, callables, sets, nan).
    """
    _check(value, "value")
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _check(value: Any, where: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise TypeError(f"{where} is {value}, which has no stable fingerprint")
    if value is None or isinstance(value, bool | int | float | str):
        return
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}, which is not a string")
            _check(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            _check(item, f"{where}[{number}]")
    else:
        raise TypeError(f"{where} is a {type(value).__name__}, which has no stable fingerprint")
