"""Reading and writing under a storage root: a local path, `s3://` or `gs://`, the same code.

A file appears whole or not at all. Locally that is write-aside, fsync, rename; object stores
publish an object only when its upload is closed. Files that hold many are complete by a marker that
is written after them.
"""

import errno
import io
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import pyarrow as pa
from pyarrow import fs as pafs

from stages.errors import StorageError, StorageSilent, UserError
from stages.object_store import NoConditionalWrites, create_object, read_object
from stages.patience import Patience, Silent
from stages.plain import shortened

T = TypeVar("T")

REQUESTS_AT_ONCE = 16
# Of a file that is copied, in memory at once
PIECE_BYTES = 1 << 20

# user:password@ in front of a bucket or host; the password may contain slashes and more @.
CREDENTIALS = re.compile(r"^([\w+.-]+:/+)(?:[^/@?]*:.*@|[^/@?]*@)")
SECRET_QUERY = re.compile(
    r"([?&][^=&]*(?:key|secret|token|password|sig|credential)[^=&]*=)[^&]*", re.I
)


def masked_uri(uri: str) -> str:
    """The address with *** in place of credentials, for messages."""
    return SECRET_QUERY.sub(r"\1***", CREDENTIALS.sub(r"\1***@", uri))


@contextmanager
def understood(place: str) -> Iterator[None]:
    """What was stored and is not as it was written becomes one message.

    Args:
        place: of the file, for people.

    Raises:
        StorageError: in place of what reading or looking into damaged data raises.
    """
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = shortened(" ".join(f"{type(error).__name__}: {error}".split()))
        raise StorageError(
            f"{place}: is damaged, or of another version of Sentray ({reason}). Move it away, and "
            "what it stood for is made again"
        ) from None


class Root:
    """A folder on some file system; every path is relative to it, with forward slashes."""

    def __init__(self, uri: str) -> None:
        if masked_uri(uri) != uri:
            raise UserError(
                f"storage '{masked_uri(uri)}': credentials do not belong into the address (it is "
                "saved with every run); set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the "
                "like, instead"
            )
        if "://" in uri and not uri.partition("://")[2].strip("/"):
            raise UserError(f"storage '{uri}': it names no bucket; write it behind the slashes")
        self.uri = uri
        try:
            if "://" in uri:
                self.fs, self.base = pafs.FileSystem.from_uri(uri)
            else:
                self.fs, self.base = pafs.LocalFileSystem(), str(Path(uri).expanduser().absolute())
        except (pa.ArrowException, OSError, ValueError) as error:
            raise UserError(f"storage '{masked_uri(uri)}': cannot be opened ({error})") from None
        self.is_local = isinstance(self.fs, pafs.LocalFileSystem)
        self._patience = _patience_of(uri)

    def path(self, name: str) -> str:
        return f"{self.base}/{name}"

    def shown(self, name: str) -> str:
        """Where `name` is, for people: a path, or an address without its options."""
        scheme = "" if self.is_local else f"{self.uri.partition('://')[0]}://"
        return f"{scheme}{self.path(name)}"

    def local_path(self, name: str) -> Path | None:
        """The real path of `name` when the root is local, for memory mapping; else None."""
        return Path(self.path(name)) if self.is_local else None

    def exists(self, name: str) -> bool:
        info = self.asked(lambda: self.fs.get_file_info(self.path(name)))
        return bool(info.type != pafs.FileType.NotFound)

    def read(self, name: str) -> bytes:
        """The whole file.

        Raises:
            FileNotFoundError: there is none.
        """

        def read() -> bytes:
            with self.fs.open_input_stream(self.path(name)) as stream:
                return bytes(stream.read())

        return self.asked(read)

    def read_now(self, name: str) -> bytes:
        """A small file that others write and delete meanwhile, as it is at one moment.

        Arrow asks an object store twice, for the size and then for the content: of a file that
        changed in between it gives the first's size with bytes of neither, and for one that went an
        internal error.

        Raises:
            FileNotFoundError: there is none.
        """
        if not self.is_local:
            with suppress(NoConditionalWrites):  # who writes such files says so (`create`)
                return self.asked(lambda: read_object(self.uri, name))
        return self.read(name)

    def read_all(self, names: Iterable[str]) -> Sequence[bytes]:
        """Whole files, in order, each as `read_now` does, REQUESTS_AT_ONCE of them under way.

        Raises:
            FileNotFoundError: one of them is not there.
        """
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            return tuple(pool.map(self.read_now, names))

    def list(self, folder: str) -> list[str]:
        """Names (not paths) of what lies directly in `folder`; empty when there is no folder."""
        selector = pafs.FileSelector(self.path(folder), allow_not_found=True)

        def look() -> list[pafs.FileInfo]:
            with suppress(NotADirectoryError):
                return list(self.fs.get_file_info(selector))
            return []

        found = self.asked(look)
        return sorted(info.base_name for info in found if not half_written(info.base_name))

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of every file below `folder`, by its path inside it; one listing."""
        selector = pafs.FileSelector(self.path(folder), allow_not_found=True, recursive=True)
        found = self.asked(lambda: self.fs.get_file_info(selector))
        files = (info for info in found if info.type == pafs.FileType.File)
        above = f"{self.path(folder).rstrip('/')}/"
        return {info.path.removeprefix(above): info.size for info in files}

    def names(self, folder: str) -> set[str]:
        """Paths of all files below `folder`, inside it; one listing. Much faster than `sizes` on a
        local disk, which knows names without looking at files."""
        if not self.is_local:
            return set(self.sizes(folder))
        found: set[str] = set()
        base = self.path(folder).rstrip("/")
        for place, _, names in os.walk(base):
            inside = place[len(base) + 1 :]
            found.update(map(f"{inside}/".__add__, names) if inside else names)
        return found

    def age(self, name: str) -> float:
        """Seconds since a file was written, by the storage's clock and ours, which may differ.

        Raises:
            FileNotFoundError: there is none.
        """
        info = self.asked(lambda: self.fs.get_file_info(self.path(name)))
        if info.type == pafs.FileType.NotFound:
            raise FileNotFoundError(name)
        return time.time() - info.mtime_ns / 1e9

    def write(self, name: str, data: bytes) -> None:
        """Writes a file whole.

        Raises:
            UserError: the place cannot be written, or the disk is full; nothing is left behind.
        """
        self._put(name, lambda: io.BytesIO(data))

    def _put(self, name: str, source: Callable[[], BinaryIO]) -> None:
        """Writes what a stream gives, a piece at a time; `source` opens it, for every try anew."""
        path = self.path(name)

        def write() -> None:
            with source() as given:
                if self.is_local:
                    _write_local(path, given)
                    return
                with self.fs.open_output_stream(path) as stream:
                    shutil.copyfileobj(given, stream, PIECE_BYTES)

        try:
            self.asked(write)
        except FileNotFoundError as error:  # no folder can be made, as in /proc
            raise storage_error(self.uri, error) from error

    def create(self, name: str, data: bytes) -> bool:
        """Writes a file only if there is none; of several who try at once, one does.

        A reader may see it before it is complete.

        Returns:
            whether this call wrote it.

        Raises:
            NoConditionalWrites: an object store that cannot.
        """
        if not self.is_local:
            # whose answer was lost finds its own file, and waits until it is stale
            return self.asked(lambda: create_object(self.uri, name, data))

        def create() -> bool:
            path = self.path(name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            try:
                with open(path, "xb") as file:
                    file.write(data)
            except FileExistsError:
                return False
            return True

        return self.asked(create)

    def put_folder(self, local: Path, name: str) -> None:
        """Copies the files of a local folder to `name`; whoever reads it needs a marker file."""
        for file in sorted(path for path in local.rglob("*") if path.is_file()):
            self._put(f"{name}/{file.relative_to(local).as_posix()}", partial(_opened, file))

    @contextmanager
    def filled_folder(self, name: str) -> Iterator[Path]:
        """A local folder whose files are those of `name` afterwards; whoever reads them needs a
        marker file. On a local file system it is the place itself.

        Raises:
            StorageError: it cannot be written; nothing is left behind.
        """
        place = self.local_path(name)
        if place is None:
            with tempfile.TemporaryDirectory() as local:
                yield Path(local)
                self.put_folder(Path(local), name)
            return
        try:
            place.mkdir(parents=True, exist_ok=True)
            yield place
            for file in place.rglob("*"):
                if file.is_file():
                    with file.open("rb") as written:
                        os.fsync(written.fileno())
        except OSError as error:
            shutil.rmtree(place, ignore_errors=True)
            raise storage_error(self.uri, error) from error

    def download(self, name: str, to: BinaryIO) -> None:
        """Copies a file into an open local one, a piece at a time.

        Raises:
            FileNotFoundError: there is none.
        """
        stream: Any = None
        offset = 0

        def read() -> bytes:
            """The next piece; a stream that broke is opened anew, where it broke off."""
            nonlocal stream
            if stream is None:
                stream = self.fs.open_input_file(self.path(name))
                stream.seek(offset)
            try:
                return bytes(stream.read(PIECE_BYTES))
            except OSError:
                stream = None
                raise

        while piece := self.asked(read):
            to.write(piece)  # out here: a full disk is not the storage's fault
            offset += len(piece)
        stream.close()

    def get_folder(self, name: str, local: Path) -> None:
        """Copies every file under `name` into a local folder, without the subfolders' names."""
        for path in self.sizes(name):
            with (local / path.rpartition("/")[2]).open("wb") as file:
                self.download(f"{name}/{path}", file)

    def delete(self, name: str) -> None:
        """Removes a file or a folder; no error when it is not there."""

        def delete() -> None:
            kind = self.fs.get_file_info(self.path(name)).type
            if kind == pafs.FileType.Directory:
                self.fs.delete_dir(self.path(name))
            elif kind == pafs.FileType.File:
                self.fs.delete_file(self.path(name))

        with suppress(FileNotFoundError):
            self.asked(delete)

    def delete_all(self, names: Iterable[str]) -> None:
        """As `delete`, REQUESTS_AT_ONCE of them under way."""
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            for _ in pool.map(self.delete, names):
                pass

    def asked(self, request: Callable[[], T]) -> T:
        """What is asked of the storage, which is given time to recover if it is a remote one.

        Raises:
            StorageError: it cannot be read or written.
        """
        try:
            return request() if self.is_local else self._patience.ask(request)
        except FileNotFoundError:
            raise  # not a failure of the storage: the caller says what it means
        except OSError as error:
            raise storage_error(self.uri, error) from error


def half_written(name: str) -> bool:
    """Whether a file of this name is one that its writer has not finished, or left behind."""
    return name.startswith((".tmp-", ".writable"))


@cache
def _patience_of(uri: str) -> Patience:
    """One for all that a process asks of a store."""
    return Patience(masked_uri(uri).partition("?")[0])


def _opened(file: Path) -> BinaryIO:
    return file.open("rb")


def _write_local(path: str, given: BinaryIO) -> None:
    folder, name = os.path.split(path)
    os.makedirs(folder, exist_ok=True)
    aside = f"{folder}/.tmp-{name}-{uuid.uuid4().hex[:8]}"
    try:
        with open(aside, "wb") as file:
            shutil.copyfileobj(given, file, PIECE_BYTES)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        if os.path.exists(aside):
            os.unlink(aside)
        raise


@contextmanager
def storage_errors(uri: str) -> Iterator[None]:
    """What fails within, on its local folder, is one message."""
    try:
        yield
    except OSError as error:
        raise storage_error(uri, error) from error


def storage_error(uri: str, error: OSError) -> StorageError:
    """What a failed write means to the person who chose the storage root."""
    uri = masked_uri(uri)
    if error.errno == errno.ENOSPC:
        return StorageError(
            f"storage '{uri}': the disk is full. Finished shards are kept; "
            "free some space and run again to continue."
        )
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    kind = StorageSilent if isinstance(error, Silent) else StorageError
    return kind(
        f"storage '{uri}': cannot be read or written ({reason}). Check the address, the rights "
        "and, for object stores, the credentials in the environment."
    )
