"""Folders of temporary files: a process's own, and those of the dead."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pipeline.run.scratch import own_scratch, remove_dead

WAITS = """
import tempfile
from pipeline.run.scratch import own_scratch
with own_scratch():
    print(tempfile.mkdtemp(), flush=True)
    input()
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def another():
    """A process with a folder of its own, and a file's place in it."""
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return process, Path(process.stdout.readline().strip())


def test_what_the_dead_leave_is_taken_away_and_nothing_of_the_living(temporary):
    others = temporary / "sentray-00000000-of-another-machine"
    others.mkdir()
    (others / ".lock").touch()
    (dead, left), (living, held) = another(), another()
    assert left.parent.parent == held.parent.parent == temporary
    dead.kill()
    dead.wait()
    with own_scratch():
        own = Path(tempfile.mkdtemp()).parent
        assert own.parent == temporary and own.exists()
        assert not left.parent.exists() and held.exists()
    assert tempfile.gettempdir() == str(temporary) and not own.exists()
    living.communicate("\n")
    assert [*temporary.iterdir()] == [others]


def test_a_process_that_is_asked_to_end_leaves_nothing(temporary):
    living, held = another()
    remove_dead()
    assert held.exists()
    living.communicate("\n")
    assert not held.parent.exists()


def test_what_cannot_be_removed_whole_is_found_again(temporary, monkeypatch):
    dead, left = another()
    dead.kill()
    dead.wait()
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda *_, **__: None)
        remove_dead()
    assert left.exists()
    remove_dead()
    assert not left.parent.exists()


@pytest.mark.parametrize("broken", ["tempfile.mkdtemp", "os.rename"])
def test_without_any_place_it_goes_on(temporary, monkeypatch, broken):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(broken, full)
    with own_scratch():
        assert tempfile.gettempdir() == str(temporary)
    assert not [*temporary.iterdir()]


def test_what_cannot_be_removed_hides_no_error(temporary, monkeypatch):
    def busy(self):
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(Path, "iterdir", busy)
    with pytest.raises(KeyError), own_scratch():
        raise KeyError
