"""Fingerprints of plain data."""

import hashlib
import json

import pytest

from stages.fingerprint import fingerprint


def test_fingerprints_ignore_key_order_and_refuse_what_is_not_data():
    assert fingerprint({"a": 1, "b": [1.5, None]}) == fingerprint({"b": [1.5, None], "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 1.0})
    assert fingerprint("x") == hashlib.sha256(json.dumps("x").encode()).hexdigest()
    for value in (object(), {1: 2}, float("nan"), {"a": [fingerprint]}, b"bytes"):
        with pytest.raises(TypeError, match=r"no stable fingerprint|not a string"):
            fingerprint(value)
