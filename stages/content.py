"""Files by content: SHA-256 digests, and the user's cache folder that remembers them.

A file is hashed once: its digest is kept under (path, size, modification time).
"""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from stages.errors import StorageError


def cache_folder() -> Path:
    """Where digests and copies of remote files are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "sentray"


def digest(file: Path) -> str:
    """SHA-256 (hex) of a file's content, remembered while its size and time stay the same."""
    stat = file.stat()
    key = hashlib.sha256(f"{file.resolve()}|{stat.st_size}|{stat.st_mtime_ns}".encode()).hexdigest()
    remembered = cache_folder() / "digests" / f"{key}.json"
    if remembered.is_file():
        return str(json.loads(remembered.read_text())["sha256"])
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    from stages.files import Root  # imports pyarrow, which settings do without

    with suppress(StorageError):  # without a cache it is only hashed again
        Root(str(remembered.parent)).write(remembered.name, json.dumps({"sha256": found}).encode())
    return found
