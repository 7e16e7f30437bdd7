"""A folder of its own for a process's temporary files. Whoever is killed leaves it, and the next
run on that machine takes it away, unless the machine was started anew.

    $TMPDIR/sentray-1f0c9a52-x7k2p9/.lock    locked by the system as long as its process lives

The first digits are the machine's: on a file system that several share, locks may be each one's.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from pipeline.store.leases import boot_id

LOCK = ".lock"


@contextmanager
def own_scratch() -> Iterator[None]:
    """Temporary files of this process lie in a folder of its own; first, those of the dead go."""
    remove_dead()
    kept = tempfile.tempdir
    found = _taken()
    if found is not None:
        tempfile.tempdir = str(found[0])
    try:
        yield
    finally:
        tempfile.tempdir = kept
        if found is not None:
            folder, lock = found
            with suppress(OSError):  # the next run finds what is left; nor hide an error of before
                _remove(folder)
            os.close(lock)


def remove_dead() -> None:
    """Removes folders whose process is gone."""
    with suppress(OSError):  # no place, or one that cannot be read: whoever needs it says so
        for lock in Path(tempfile.gettempdir()).glob(f"{_prefix()}*/{LOCK}"):
            with suppress(OSError):  # another user's, or of the living
                file = os.open(lock, os.O_RDWR)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(lock.parent)
                finally:
                    os.close(file)


def _taken() -> tuple[Path, int] | None:
    """A new folder and its lock, which nobody else ever had: it gets its name when it is held. None
    where there is no place or room: whatever needs a temporary file says so itself."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=_prefix()))
    except OSError:
        return None
    try:
        lock = os.open(folder / f"{LOCK}-new", os.O_CREAT | os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(folder / f"{LOCK}-new", folder / LOCK)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        return None
    return folder, lock


def _remove(folder: Path) -> None:
    """The lock last: what is cut short is found again."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != LOCK:
            path.unlink(missing_ok=True)
    if {path.name for path in folder.iterdir()} == {LOCK}:
        (folder / LOCK).unlink()
        folder.rmdir()


@cache
def _prefix() -> str:
    return f"sentray-{boot_id()[:8]}-"
