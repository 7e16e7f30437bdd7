"""Answers on this machine's disk until an object store has them.

    $XDG_CACHE_HOME/sentray/answers/<digest of the journal's place>/<segment>.jsonl

A process holds a lock of its file (flock), which the kernel takes back when the process dies. Then
the next journal of that place that is opened on this machine stores what the file holds: a kill
without notice loses no answer that had arrived.
"""

import fcntl
import hashlib
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path

from stages.content import cache_folder
from stages.files import Root, storage_errors

TAKING = ".taking"


class Spool:
    """The segment that a journal has not stored yet.

    Args:
        root, folder: where the journal is.
    """

    def __init__(self, root: Root, folder: str) -> None:
        place = f"{root.uri.rstrip('/')}\n{folder}".encode()
        digest = hashlib.blake2b(place, digest_size=8).hexdigest()
        self._folder = cache_folder() / "answers" / digest
        self._path: Path | None = None
        self._file: FileIO | None = None

    def begin(self, name: str) -> None:
        """Makes the file of a segment, if there is none yet.

        Raises:
            StorageError: it cannot be made.
        """
        if self._file is not None:
            return
        with storage_errors(str(self._folder)):
            self._folder.mkdir(parents=True, exist_ok=True)
            path, hidden = self._folder / name, self._folder / f".{name}"
            file = FileIO(hidden, "w")
            fcntl.flock(file, fcntl.LOCK_EX)  # before anybody can see it
            hidden.rename(path)
        self._path, self._file = path, file

    def add(self, lines: bytes) -> None:
        """Writes all or, with an error, nothing.

        Raises:
            StorageError: it cannot be written.
        """
        assert self._file is not None
        start, left = self._file.tell(), memoryview(lines)
        with storage_errors(str(self._folder)):
            try:
                while left:
                    left = left[self._file.write(left) :]
            except OSError:
                self._file.truncate(start)  # half a line would spoil the next one
                self._file.seek(start)
                raise

    def stored(self) -> None:
        """The store has the segment."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        self.let_go()

    def let_go(self) -> None:
        """Leaves what is not stored to the next journal; nothing may be added to it any more."""
        if self._file is not None:
            self._file.close()
        self._path = self._file = None

    def take(self, store: Callable[[str, bytes], None]) -> None:
        """Stores segments of processes that died, each under its name.

        Whoever else does so is waited for: a journal that looks at the store before has not got
        what was its own.

        Raises:
            StorageError: one cannot be read, or as `store`; it stays.
        """
        if not self._folder.is_dir():
            return
        with storage_errors(str(self._folder)), FileIO(self._folder / TAKING, "w") as taking:
            fcntl.flock(taking, fcntl.LOCK_EX)
            for path in sorted(self._folder.glob("[!.]*")):
                with suppress(FileNotFoundError), FileIO(path, "r+") as file:  # NFS: not "r"
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:  # whoever writes it lives
                        continue
                    if lines := file.readall():
                        store(path.name, lines)
                    path.unlink(missing_ok=True)
