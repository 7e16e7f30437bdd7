"""Which nodes run when, and what a failure takes with it."""

import threading
from types import SimpleNamespace

import pytest

from pipeline.run.scheduler import run_ready
from stages.contract import Resources
from stages.errors import Stopped, UserError


def nodes(**inputs):
    """Nodes by name with the names that they read; NAME__BATCH stands in that batch."""
    found = []
    for name, read in inputs.items():
        stage = SimpleNamespace(shares=name.partition("__")[2], row_wise=False,
                                resources=lambda: Resources())  # fmt: skip
        found.append(SimpleNamespace(name=name, stage=stage, inputs=dict.fromkeys(read, "")))
        found[-1].inputs = {one: one for one in read}
    return found


def ran(several, errors, asked=None):
    """What was made, in order, and the error; a node of `errors` fails with that."""
    made, told, lock = [], [], threading.Lock()

    def make(batch):
        for node in batch:
            with lock:
                if node.name not in errors:
                    made.append(node.name)
        for node in batch:
            if node.name in errors:
                raise errors[node.name]

    def failed(batch, error):
        unmade = [node.name for node in batch if node.name not in made]
        told.append((unmade, str(error)))
        return unmade

    stop = asked or threading.Event()
    try:
        run_ready(several, make, lambda: None, stop, lambda: (), failed)
    except BaseException as error:
        return made, told, error
    return made, told, None


def test_all_are_made_after_what_they_read():
    made, told, error = ran(nodes(a=[], b=["a"], c=["a"], d=["b", "c"]), {})
    assert made[0] == "a" and made[-1] == "d" and set(made) == set("abcd")
    assert told == [] and error is None


def test_a_failure_takes_with_it_only_those_that_need_it():
    several = nodes(a=[], b=["a"], c=["b"], d=["c"], x=[], y=["x"], z=["y", "d"])
    made, told, error = ran(several, {"b": UserError("b is bad")})
    assert set(made) == {"a", "x", "y"}
    assert told == [(["b"], "b is bad")]
    assert str(error) == "b is bad"
    assert error.__notes__ == ["Not made: b, c, d, z. All else is; run again to go on from there."]


def test_of_several_failures_the_first_is_raised():
    several = nodes(a=[], b=["a"], c=["b"])
    made, told, error = ran(several + nodes(x=["a"]), {"b": OSError("1"), "x": OSError("1")})
    assert made == ["a"] and len(told) == 2 and isinstance(error, OSError)
    assert error.__notes__[0].startswith("Not made (of 2 failures this is the first): ")
    assert {"b", "c", "x"} == set(error.__notes__[0].split(": ")[1].split(".")[0].split(", "))


def test_what_a_batch_made_before_it_failed_counts():
    several = nodes(t1__m=[], t2__m=[], t3__m=[], reads_t1=["t1__m"], reads_t2=["t2__m"])
    made, _, error = ran(several, {"t2__m": UserError("no")})
    assert set(made) == {"t1__m", "t3__m", "reads_t1"}
    assert "Not made: t2__m, reads_t2." in error.__notes__[0]


def test_of_a_batch_only_those_are_lost_that_need_what_failed():
    """Tests that share a model stand where the first of them does."""
    several = nodes(t1__m=[], bad=[], worse=["bad"], t2__m=["worse"], reads=["t2__m"])
    made, _, error = ran(several, {"bad": UserError("no")})
    assert made == ["t1__m"]
    assert set(error.__notes__[0].split(": ")[1].split(".")[0].split(", ")) == {
        "bad", "worse", "t2__m", "reads",
    }  # fmt: skip


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Stopped()])
def test_an_end_is_no_failure(error):
    made, told, raised = ran(nodes(a=[], b=["a"]), {"a": error})
    assert raised is error and told == [] and made == []
    assert not hasattr(raised, "__notes__")


def test_what_runs_alone_is_not_waited_for_by_what_it_waits_for():
    """It comes after all that can be made without it, and before what reads it."""
    several = nodes(alone=["a"], reader=["alone"], last=["reader"], a=[], b=["a"])
    several[0].stage.resources = lambda: Resources(alone=True)
    waited_for_ever = threading.Event()
    watch = threading.Timer(20, waited_for_ever.set)
    watch.start()
    made, _, error = ran(several, {}, waited_for_ever)
    watch.cancel()
    assert error is None
    assert made[-3:] == ["alone", "reader", "last"] and set(made[:2]) == {"a", "b"}
