"""A run resumed, and storage cleared, by somebody who may read but not write."""

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.cli import main
from pipeline.plan.plan import make_plan
from pipeline.recipe.read import load_recipe
from pipeline.run.runner import finish, record_start
from tests.support.here import make_here
from tests.support.models import make_model
from tests.support.recipes import tiny, write_recipe

NOBODY = 65534
LONG_AGO = 0.0


@contextmanager
def as_another_user(folder):
    """Nobody, where we are root; else ourselves, without the right to write."""
    places = [folder, *folder.rglob("*")]
    modes = {place: place.stat().st_mode for place in places if not place.is_symlink()}
    for place, mode in modes.items():
        place.chmod(mode & ~0o222 | 0o444)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        for place, mode in modes.items():
            place.chmod(mode)


@pytest.fixture(scope="module")
def made():
    """A finished run's folder, that others may read, and its recipe file."""
    # pytest's folders, and a session's, are closed to others
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        model = make_model(folder / "model")
        raw = tiny(folder, model, model) | {"evaluate": {"speed": False, "max_length": 48}}
        file = write_recipe(folder / "recipe.yaml", raw)
        plan = make_plan(load_recipe(file, []))
        record = record_start(plan)
        make_here(plan.recipe)
        finish(plan, record)
        make_here(load_recipe(file, ["train.max_steps=1"]))  # of no run, so that it can go
        for place in folder.rglob("*"):
            os.utime(place, (LONG_AGO, LONG_AGO))
        yield folder


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "recipe.yaml", "--set", "train.max_steps=3"),
        ("run", "recipe.yaml", "--force", "sentences"),
        ("run", "recipe.yaml", "--set", "name=mine"),  # nothing to make, but a student to lay out
        ("gc", "--delete"),
    ],
)
def test_who_may_not_write_is_told_and_changes_nothing(made, arguments, capsys, monkeypatch):
    monkeypatch.chdir(made)
    before = sorted(made.rglob("*"))
    with as_another_user(made):
        assert main(list(arguments)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot be read or written ([Errno 13]" in line
    assert sorted(made.rglob("*")) == before


def test_who_may_not_write_may_look(made, capsys, monkeypatch):
    monkeypatch.chdir(made)
    with as_another_user(made):
        for arguments in (["plan", "recipe.yaml"], ["run", "recipe.yaml"], ["status"], ["du"]):
            assert main(arguments) == 0
    assert "student after" in capsys.readouterr().out
