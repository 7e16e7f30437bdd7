"""Copies of remote artifacts' files on this machine, which all its processes share.

    $XDG_CACHE_HOME/sentray/files/<fingerprint, 16 digits>/shards/00003.factors.9f3c21ab.npy
                          in-use/<fingerprint, 16 digits>/shards/00003.factors.9f3c21ab.npy

A file is fetched by one process while others wait for it. The folder has a limit in bytes: room is
made by removing what was used longest ago and is in use by nobody. In use is what a living process
holds a shared lock for (flock, of the file under `in-use`, since whoever copies a folder wants its
files only); the kernel takes it back from one that dies.
"""

import fcntl
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import BinaryIO

from stages.content import cache_folder
from stages.errors import StorageError, UserError
from stages.files import storage_error

LIMIT = "SENTRAY_CACHE_GB"
FILES, IN_USE, PART = "files", "in-use", ".part"
# Fetching takes one of so many locks; two files that share one wait for each other, no more.
FETCH_LOCKS = 64
# What is removed beyond the room that is asked for, since each time costs a listing of all copies.
SPARE = 0.1

# The locks of files in use (file descriptors): of this process, or inside `used_meanwhile`.
_of_process: dict[Path, int] = {}
_held: ContextVar[dict[Path, int]] = ContextVar("held", default=_of_process)


def byte_limit() -> int | None:
    """The limit that SENTRAY_CACHE_GB sets, in bytes; None where it is not set.

    Raises:
        UserError: it is no size.
    """
    given = os.environ.get(LIMIT, "")
    try:
        limit = float(given) * 1e9 if given else None
        if limit is not None and not 0 < limit < float("inf"):
            raise ValueError
    except ValueError:
        raise UserError(
            f"{LIMIT}: '{given}' is no size; give what copies may take on a machine in 10^9 bytes, "
            "like 50 or 0.5, or unset it for half of the free disk"
        ) from None
    return None if limit is None else int(limit)


@contextmanager
def used_meanwhile() -> Iterator[None]:
    """Copies that this thread asks for inside may be removed after it.

    Others stay until the process ends. What is mapped into memory can be read even when its file
    is removed.
    """
    held: dict[Path, int] = {}
    token = _held.set(held)
    try:
        yield
    finally:
        _held.reset(token)
        for lock in held.values():
            os.close(lock)


def local_copy(
    place: str, num_bytes: int, is_right: Callable[[Path], bool], fetch: Callable[[BinaryIO], None]
) -> Path | None:
    """The copy of a file, fetched unless it is there and right; it stays while it is in use.

    Args:
        place: of the file below the folder of copies. is_right: whether a file is what the copy
            should be. fetch: writes it into an open one.

    Returns:
        None: what was fetched is not right.

    Raises:
        FileNotFoundError: as `fetch`.
        StorageError: it does not fit under the limit beside what is in use, or onto the disk.
    """
    folder = cache_folder() / FILES
    file = folder / place
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _hold(file)
        if not is_right(file):
            with _locked(folder / f".fetch-{zlib.crc32(place.encode()) % FETCH_LOCKS}"):
                if not is_right(file) and not _fetch(folder, file, num_bytes, is_right, fetch):
                    return None
        os.utime(file, ns=(time.time_ns(), file.stat().st_mtime_ns))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise storage_error(str(folder), error) from error
    return file


def _hold(file: Path) -> None:
    """Keeps a copy, there or not yet, from being removed."""
    held = _held.get()
    if file in held or file in _of_process:
        return
    while True:
        lock = os.open(_use_of(file), os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_SH)
        if os.fstat(lock).st_nlink:
            held[file] = lock
            return
        os.close(lock)  # it was removed with its file meanwhile


def _use_of(file: Path) -> Path:
    """The file whose lock says that a copy is in use; its folder is there."""
    root = cache_folder()
    use = root / IN_USE / file.relative_to(root / FILES)
    use.parent.mkdir(parents=True, exist_ok=True)
    return use


@contextmanager
def _locked(lock: Path) -> Iterator[None]:
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(
    folder: Path,
    file: Path,
    num_bytes: int,
    is_right: Callable[[Path], bool],
    fetch: Callable[[BinaryIO], None],
) -> bool:
    """Whether what came is right, and in its place."""
    part, right = file.with_name(f"{file.name}{PART}"), False
    _reserve(folder, part, num_bytes)
    try:
        with part.open("r+b") as to:
            fetch(to)
            to.truncate()
        right = is_right(part)
    finally:
        with _locked(folder / ".lock"):  # a listing sees it as one or the other
            part.replace(file) if right else part.unlink()
    return right


def _reserve(folder: Path, part: Path, num_bytes: int) -> None:
    """Makes room for a file, and a file of that size without content, which counts from now on.

    The sum of all is kept beside them. It may be too high, after a fetch that failed, and is
    counted anew when it reaches the limit.
    """
    with _locked(folder / ".lock"):
        total = folder / ".bytes"
        try:
            taken = int(total.read_text())
        except (FileNotFoundError, ValueError):
            taken = sum(size for _, size, _ in _copies(folder))
        limit = byte_limit()
        if limit is None:
            limit = (shutil.disk_usage(folder).free + taken) // 2
        if taken + num_bytes > limit:
            taken = _make_room(folder, limit, num_bytes)
        with part.open("wb") as file:
            file.truncate(num_bytes)
        total.write_text(str(taken + num_bytes))


def _make_room(folder: Path, limit: int, num_bytes: int) -> int:
    """Removes what was used longest ago and nobody uses; returns the bytes of what is left."""
    copies = sorted(_copies(folder), key=lambda copy: copy[2])
    taken = sum(size for _, size, _ in copies)
    for file, size, _ in copies:
        if taken + num_bytes <= limit * (1 - SPARE):
            break
        if _remove_unused(file):
            taken -= size
    if taken + num_bytes > limit:
        raise StorageError(
            f"{folder}: a file of {num_bytes / 1e9:,.3f} GB does not fit under the limit of "
            f"{limit / 1e9:,.3f} GB for copies of remote artifacts, as running processes use "
            f"{taken / 1e9:,.3f} GB. Raise {LIMIT} (unset: half of the free disk), or set "
            "XDG_CACHE_HOME to a larger disk"
        )
    return taken


def _copies(folder: Path) -> Iterator[tuple[Path, int, int]]:
    """Each copy with its size and the time of its last use; under the folder's lock."""
    for path in folder.glob("*/**/*"):
        if path.is_file():
            stat = path.stat()
            yield path, stat.st_size, stat.st_atime_ns


def _remove_unused(file: Path) -> bool:
    use = _use_of(file.with_name(file.name.removesuffix(PART)))
    with use.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        file.unlink()
        use.unlink()
    return True
