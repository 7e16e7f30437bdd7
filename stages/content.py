"""What a path or a list of packages *is*, apart from where it lies.

Files count by content, so a moved file is the same input. Contents are hashed once: digests are
kept in the user's cache folder under the path, size, times and inode.
"""

import hashlib
import json
import os
import platform
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from stages.errors import StorageError, UserError
from stages.files import Root, masked_uri

# How names begin where tools keep what is theirs: downloads, and Spark beside the parts of a table.
HIDDEN = (".", "_")
# In a folder of texts; with more of them it is rather a disk.
MOST_FILES = 1_000_000
# To hash a smaller file costs no more than to read what is remembered of it.
REMEMBERED_BYTES = 1 << 16


def cache_folder() -> Path:
    """Where digests, copies of remote files, and what is on its way to a store are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "sentray"


@dataclass(frozen=True)
class Described:
    """A file or folder as `describe_path` found it (`digest`, of the whole description)."""

    path: str
    setting: str
    deep: bool
    hidden: tuple[str, ...]
    digest: str

    def check(self) -> None:
        """Looks whether it still is what it was.

        Raises:
            UserError: it is not.
        """
        if _hash(_described(self.path, self.setting, self.deep, self.hidden)) != self.digest:
            raise UserError(
                f"{self.setting}: {self.path} is not what it was when this run began, and what was "
                "made of it may be of either. It is not kept; run again"
            )


_noted: ContextVar[list[Described] | None] = ContextVar("noted", default=None)


@contextmanager
def noting() -> Iterator[list[Described]]:
    """What is described within it."""
    found: list[Described] = []
    token = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(token)


def describe_path(
    path: str, setting: str, deep: bool = False, hidden: tuple[str, ...] = (".",)
) -> dict[str, Any]:
    """Content of a file and its kind (the suffix), or content of a folder's files by name.

    Args:
        deep, hidden: as `files_of` has them.

    Raises:
        UserError: nothing is there, or a link in the folder leads nowhere; names `setting`.
    """
    found = _described(path, setting, deep, hidden)
    if (noted := _noted.get()) is not None:
        noted.append(Described(path, setting, deep, hidden, _hash(found)))
    return found


def _hash(description: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(description).encode()).hexdigest()


def _described(path: str, setting: str, deep: bool, hidden: tuple[str, ...]) -> dict[str, Any]:
    place = Path(path).expanduser()
    if place.is_dir():
        files = files_of(place, setting, deep, hidden)
        try:
            return {"files": {one.relative_to(place).as_posix(): digest(one) for one in files}}
        except FileNotFoundError as error:
            raise UserError(
                f"{setting}: {error.filename} is gone since the folder was looked at; try again"
            ) from None
    if not place.is_file():
        shown = masked_uri(path) if "://" in path else place
        raise UserError(f"{setting}: there is no file or folder {shown}")
    kind = [suffix for suffix in place.suffixes if suffix.lower() != ".gz"][-1:]
    return {"sha256": digest(place), "kind": "".join(kind)}


def files_of(
    folder: Path,
    setting: str | None = None,
    deep: bool = True,
    hidden: tuple[str, ...] = (".",),
) -> list[Path]:
    """A folder's files in the order of their paths.

    Args:
        deep: whether files in its folders count too, also in linked ones, each folder once; but
            not in those of a storage root.
        hidden: how the names of files and folders begin that are left out.

    Raises:
        UserError: a link leads nowhere, or there are too many files; names `setting`. Without one
            neither matters.
    """
    found: list[Path] = []
    for place, files in _walked(folder, deep, hidden):
        found += [Path(place, name) for name in files if not name.startswith(hidden)]
        if setting is not None and len(found) > MOST_FILES:
            raise UserError(f"{setting}: more than {MOST_FILES:,} files in {folder}; name another")
    broken = next((one for one in sorted(found) if not one.exists()), None)
    if setting is not None and broken is not None:
        raise UserError(f"{setting}: the link {broken} leads nowhere; mend it or take it out")
    return sorted(one for one in found if one.is_file())


def _walked(folder: Path, deep: bool, hidden: tuple[str, ...]) -> Iterator[tuple[str, list[str]]]:
    """The folder and those in it, then those that are linked there, each once under one name; with
    the names of their files."""
    seen, todo = set[str](), deque([folder])
    while todo:
        for place, folders, files in os.walk(todo.popleft()):
            real = os.path.realpath(place)
            inner = [Path(place, name) for name in sorted(folders) if not name.startswith(hidden)]
            folders.clear()
            if real in seen:
                continue
            seen.add(real)
            yield place, files
            for one in inner if deep else ():
                if one.is_symlink():
                    todo.append(one)
                elif not _is_storage(one):
                    folders.append(one.name)


def _is_storage(folder: Path) -> bool:
    """Whether runs store there what they make: it changes with every run, and is no input."""
    return all((folder / name).is_dir() for name in ("history", "leases"))


def describe_packages(packages: list[str] | None) -> dict[str, Any]:
    """Versions of the packages whose documentation is read, and of Python."""
    try:
        if packages is None:
            versions = {name: metadata.version(name) for name in installed()}
        else:
            versions = {name: metadata.version(name) for name in packages}
    except metadata.PackageNotFoundError as error:
        raise UserError(
            f"sentences.packages: '{error.name}' is not installed in this Python; "
            "install it or take it off the list"
        ) from None
    return {"packages": versions, "python": platform.python_version()}


def installed() -> list[str]:
    """Names of all installed distributions, sorted; an installer may have left an empty folder."""
    names = (one.metadata["Name"] for one in metadata.distributions())
    return sorted({str(name) for name in names if name})


def digest(file: Path) -> str:
    """SHA-256 (hex) of a file's content, remembered while its size, times and inode are the same:
    whoever puts another file of the same size in its place can set all but the time of change."""
    stat = file.stat()
    if stat.st_size < REMEMBERED_BYTES:
        return sha256_of(file)
    return _digest(file.resolve(), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


def sha256_of(file: Path) -> str:
    """SHA-256 (hex) of a file's content, read a piece at a time."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@cache  # an encoder's files are asked for once for each of its nodes
def _digest(file: Path, *state: int) -> str:
    key = hashlib.sha256("|".join(map(str, (file, *state))).encode()).hexdigest()
    remembered = cache_folder() / "digests" / f"{key}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):  # damaged: it is hashed again
        return str(json.loads(remembered.read_text())["sha256"])
    found = sha256_of(file)
    with suppress(StorageError):  # without a cache it is only hashed again
        Root(str(remembered.parent)).write(remembered.name, json.dumps({"sha256": found}).encode())
    return found
