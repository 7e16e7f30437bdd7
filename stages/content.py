"""What a path or a list of packages *is*, apart from where it lies.

Files count by content, so a moved file is the same input. Contents are hashed once: digests are
kept in the user's cache folder under (path, size, modification time).
"""

import hashlib
import json
import os
import platform
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from stages.errors import StorageError, UserError
from stages.files import Root, masked_uri


def cache_folder() -> Path:
    """Where digests and copies of remote files are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "sentray"


def describe_path(path: str, setting: str) -> dict[str, Any]:
    """Content of a file and its kind (the suffix), or content of a folder's files by name.

    Raises:
        UserError: nothing is there; names `setting`.
    """
    place = Path(path).expanduser()
    if place.is_dir():
        files = sorted(p for p in place.rglob("*") if p.is_file() and not p.name.startswith("."))
        return {"files": {p.relative_to(place).as_posix(): digest(p) for p in files}}
    if not place.is_file():
        shown = masked_uri(path) if "://" in path else place
        raise UserError(f"{setting}: there is no file or folder {shown}")
    kind = [suffix for suffix in place.suffixes if suffix != ".gz"][-1:]
    return {"sha256": digest(place), "kind": "".join(kind)}


def describe_packages(packages: list[str] | None) -> dict[str, Any]:
    """Versions of the packages whose documentation is read, and of Python."""
    try:
        if packages is None:
            versions = {str(d.metadata["Name"]): d.version for d in metadata.distributions()}
        else:
            versions = {name: metadata.version(name) for name in packages}
    except metadata.PackageNotFoundError as error:
        raise UserError(
            f"sentences.packages: '{error.name}' is not installed in this Python; "
            "install it or take it off the list"
        ) from None
    return {"packages": versions, "python": platform.python_version()}


def digest(file: Path) -> str:
    """SHA-256 (hex) of a file's content, remembered while its size and time stay the same."""
    stat = file.stat()
    return _digest(file.resolve(), stat.st_size, stat.st_mtime_ns)


@cache  # an encoder's files are asked for once for each of its nodes
def _digest(file: Path, num_bytes: int, mtime_ns: int) -> str:
    key = hashlib.sha256(f"{file}|{num_bytes}|{mtime_ns}".encode()).hexdigest()
    remembered = cache_folder() / "digests" / f"{key}.json"
    if remembered.is_file():
        return str(json.loads(remembered.read_text())["sha256"])
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    with suppress(StorageError):  # without a cache it is only hashed again
        Root(str(remembered.parent)).write(remembered.name, json.dumps({"sha256": found}).encode())
    return found
