"""A folder of its own for a process's temporary files. Whoever is killed leaves it, and the next
run on that machine takes it away.

    $TMPDIR/sentray-x7k2p9/.lock    locked by the system as long as its process lives
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX, LOCK = "sentray-", ".lock"


@contextmanager
def own_scratch() -> Iterator[None]:
    """Temporary files of this process lie in a folder of its own; first, those of the dead go."""
    kept, lock = tempfile.tempdir, None
    with suppress(OSError):  # no place, or a full one: whatever needs a temporary file says so
        remove_dead()
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        lock = _locked(folder)
        tempfile.tempdir = str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = kept
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _locked(folder: Path) -> int:
    """A lock that nobody else ever had: it gets its name when it is held."""
    file = os.open(folder / f"{LOCK}-new", os.O_CREAT | os.O_RDWR)
    fcntl.flock(file, fcntl.LOCK_EX)
    os.rename(folder / f"{LOCK}-new", folder / LOCK)
    return file


def remove_dead() -> None:
    """Removes folders whose process is gone, but for other users' ones."""
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        with suppress(OSError):
            file = os.open(lock, os.O_RDWR)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent)
            finally:
                os.close(file)
