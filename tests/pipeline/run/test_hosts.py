"""Nodes that share what they load, made in one process."""

from types import SimpleNamespace

import pytest

from pipeline.run.hosts import _make_here
from stages.errors import Stopped, StorageSilent, UserError


def made_with(errors):
    """What is made of four nodes, some of which fail, and the error."""
    made = []

    def make(work, loaded):
        if work.name in errors:
            raise errors[work.name]
        made.append((work.name, loaded))

    stage = SimpleNamespace(load=lambda work: "model", make=make)
    works = [SimpleNamespace(name=name, node=SimpleNamespace(stage=stage)) for name in "abcd"]
    with pytest.raises(BaseException) as raised:  # noqa: PT011 - whatever it is
        _make_here(works)
    return made, raised.value


def test_one_that_fails_keeps_no_other_from_being_made():
    first = UserError("no pairs")
    made, error = made_with({"b": first, "d": ZeroDivisionError("by 0")})
    assert made == [("a", "model"), ("c", "model")]
    assert error is first and error.__notes__ == ["d: ZeroDivisionError: by 0"]


@pytest.mark.parametrize("error", [Stopped(), StorageSilent("s3://x: gone"), KeyboardInterrupt()])
def test_what_is_no_fault_of_a_node_ends_all(error):
    assert made_with({"b": error}) == ([("a", "model")], error)
