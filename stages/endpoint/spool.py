"""Answers on this machine's disk until an object store has them.

    $XDG_CACHE_HOME/sentray/answers/<digest of the journal's place>/<segment>.jsonl

A process holds a lock of its file (flock), which the kernel takes back when the process dies. Then
the next journal of that place that is opened on this machine stores what the file holds: a kill
without notice loses no answer that had arrived.
"""

import fcntl
import hashlib
from collections.abc import Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path

from stages.content import cache_folder
from stages.files import Root, storage_errors


class Spool:
    """The segment that a journal has not stored yet.

    Args:
        root, folder: where the journal is.
    """

    def __init__(self, root: Root, folder: str) -> None:
        place = hashlib.blake2b(f"{root.uri}\n{folder}".encode(), digest_size=8).hexdigest()
        self._folder = cache_folder() / "answers" / place
        self._path: Path | None = None
        self._file: FileIO | None = None

    def add(self, name: str, lines: bytes, segment: bytearray) -> None:
        """Writes what was added to a segment; all of it, where it was let go.

        Raises:
            StorageError: it cannot be written.
        """
        with storage_errors(str(self._folder)):
            left = memoryview(lines)
            if self._file is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._path, left = self._folder / name, memoryview(segment)
                hidden = self._folder / f".{name}"  # until it is locked
                self._file = FileIO(hidden, "w")
                fcntl.flock(self._file, fcntl.LOCK_EX)
                hidden.rename(self._path)
            while left:
                left = left[self._file.write(left) :]

    def let_go(self) -> None:
        """Leaves what it holds to the next journal: the store does not answer."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def stored(self) -> None:
        """The store has the segment."""
        self.let_go()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def left(self) -> Iterator[tuple[str, bytes]]:
        """Segments of processes that died, by name; each is removed once it is taken.

        Raises:
            StorageError: one cannot be read.
        """
        for path in sorted(self._folder.glob("[!.]*")):
            with storage_errors(str(self._folder)), suppress(FileNotFoundError):
                with FileIO(path, "r+") as file:  # NFS locks only what can be written
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:  # whoever writes it lives
                        continue
                    yield path.name, file.readall()
                    path.unlink(missing_ok=True)
