"""Variables that go with a job in two halves."""

import base64
import os

import pytest

from pipeline.run.passed import PAD, VARIABLE, split, take
from stages.errors import UserError

PASSED = {"ONE_TOKEN": "sécret 1", "ANOTHER": ""}


def test_both_halves_give_the_variables_and_one_gives_nothing(tmp_path, monkeypatch):
    for name in PASSED:
        monkeypatch.setenv(name, "before")
    take(tmp_path)  # a process without a job's variables
    half, pad = split(PASSED)
    other_half, other_pad = split(PASSED)
    assert half != other_half and pad != other_pad
    assert not [one for one in (base64.b64decode(half), pad) if b"TOKEN" in one]
    monkeypatch.setenv(VARIABLE, half)
    with pytest.raises(UserError, match=rf"cannot be read: .*{PAD}"):
        take(tmp_path)
    (tmp_path / PAD).write_bytes(pad)
    take(tmp_path)
    assert {name: os.environ[name] for name in PASSED} == PASSED
