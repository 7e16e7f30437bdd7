"""The replay cache: every answer of an endpoint, kept as it arrives, found again by its request.

    FOLDER/<random>.jsonl             local: one line an answer, written before the answer is used
    FOLDER/<random>-000012.jsonl      object store: whole segments, at most a second of answers
                                      each; until then they are on this machine's disk (spool.py)

The key is a digest of the request's body. Where it was sent and with which key is no part of it:
the model's name says what answers. Whoever opens the journal reads all files, other recipes' too.
A line without a key is of a request whose answer is of no further use, or that has none, and what
it has or may have cost.

Locally a journal holds some of the disk from the first request on, and gives it back when the disk
is full: answers on their way then are paid for, and have their place, unless others take it. It
holds 8 MiB, or twice what as many answers take as are under way, by the longest so far.

Memory: about 230 bytes an answer (digest, file, place); the answers stay on disk, those of an
object store once they are asked for again (TMPDIR). What a killed
process wrote last may be torn, and is skipped. A machine that loses power may lose what its file
system had not written yet.
"""

import errno
import hashlib
import io
import json
import math
import os
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import IO, Any, Generic, Protocol, TypeVar

from stages.endpoint.spool import Spool
from stages.files import Root, storage_error, storage_errors

SECONDS_IN_SEGMENT = 1.0
# Of the disk, at least: before the first answer nobody knows how long they are
BYTES_RESERVED = 8 << 20
SEGMENTS_READ = 64  # in memory when a journal is opened


class Paid(Protocol):
    """What was paid for: a request, or a share of one. Tokens as the endpoint counts them."""

    @property
    def requests(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def answer_tokens(self) -> int: ...


@dataclass
class Spent:
    """What one artifact has paid for; unanswered: of the requests, those that may have cost."""

    requests: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    unanswered: int = 0

    def add(self, answer: Paid) -> None:
        self.requests += answer.requests
        self.prompt_tokens += answer.prompt_tokens
        self.answer_tokens += answer.answer_tokens
        if isinstance(answer, Spent):
            self.unanswered += answer.unanswered


def request_key(body: dict[str, Any]) -> bytes:
    """16 bytes that name a request's body."""
    text = json.dumps(body, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


A = TypeVar("A", bound=Paid)


class Journal(Generic[A]):
    """Reads what is there, and adds to it.

    Args:
        owner: short name of the artifact that pays for what is added.
        answer: the dataclass that an answer is; its fields are plain data.
    """

    def __init__(self, root: Root, folder: str, owner: str, answer: Callable[..., A]) -> None:
        self._answer = answer
        self._root, self._folder, self._owner = root, folder, owner
        self._name = uuid.uuid4().hex
        self._place: dict[bytes, tuple[str, int, int]] = {}
        self._spent: dict[str, Spent] = defaultdict(Spent)
        self._file: io.FileIO | None = None
        self._reserve: IO[bytes] | None = None
        self._longest = 0  # bytes of what was added at once
        self._segment, self._num_segments, self._segment_since = bytearray(), 0, 0.0
        self._copies: IO[bytes] | None = None
        self._place_of_copy: dict[str, int] = {}
        self._spool = Spool(root, folder)
        if not root.is_local:
            self._spool.take(lambda name, lines: root.write(f"{folder}/{name}", lines))
        names = [name for name in root.list(folder) if name.endswith(".jsonl")]
        if root.is_local:
            for name in names:
                with open(root.path(f"{folder}/{name}"), "rb") as file:
                    self._read(name, file)
            return
        while some := names[:SEGMENTS_READ]:
            names = names[SEGMENTS_READ:]
            contents = root.read_all(f"{folder}/{name}" for name in some)
            for name, content in zip(some, contents, strict=True):
                self._read(name, io.BytesIO(content))

    def _read(self, name: str, lines: Iterable[bytes]) -> None:
        offset = 0
        for line in lines:
            try:
                row = json.loads(line)
                if "paid" in row:
                    self._spent[row["owner"]].add(Spent(**row["paid"]))
                elif "unanswered" in row:  # of an older version, which did not count them here
                    lost = Spent(**row["unanswered"])
                    self._spent[row["owner"]].add(replace(lost, unanswered=lost.requests))
                else:
                    key, answer = bytes.fromhex(row["key"]), self._answer(**row["answer"])
                    self._place[key] = (name, offset, len(line))
                    self._spent[row["owner"]].add(answer)
            except (ValueError, KeyError, TypeError):
                pass  # torn by a kill
            offset += len(line)

    def spent(self) -> Spent:
        """What this journal's owner has paid for, in all its runs."""
        return self._spent[self._owner]

    def get(self, key: bytes) -> A | None:
        """The answer to a request, if there has been one."""
        if key not in self._place:
            return None
        name, offset, length = self._place[key]
        if self._segment and name == self._segment_name:
            line = bytes(self._segment[offset : offset + length])
        elif self._root.is_local:
            with open(self._root.path(f"{self._folder}/{name}"), "rb") as file:
                file.seek(offset)
                line = file.read(length)
        else:
            line = self._copied(name, offset, length)
        return self._answer(**json.loads(line)["answer"])

    def _copied(self, name: str, offset: int, length: int) -> bytes:
        """A part of a segment on an object store. A segment is fetched once, in whatever order
        answers are asked for, and kept on this machine's disk.

        Raises:
            StorageError: the store does not give it, or there is no room.
        """
        if name not in self._place_of_copy:
            content = self._root.read(f"{self._folder}/{name}")
            with storage_errors(tempfile.gettempdir()):
                if self._copies is None:
                    # a file without a name: whoever is killed leaves nothing
                    self._copies = tempfile.TemporaryFile()  # noqa: SIM115
                place = self._copies.seek(0, os.SEEK_END)
                self._copies.write(content)
                self._copies.flush()
            self._place_of_copy[name] = place
        assert self._copies is not None
        self._copies.seek(self._place_of_copy[name] + offset)
        return self._copies.read(length)

    def add(self, answers: Iterable[tuple[bytes, A]]) -> None:
        """Keeps answers. Locally they are on their way to the disk when this returns.

        Raises:
            StorageError: they are not kept; or the disk is full, and they are.
        """
        given = list(answers)
        lines = [self._line(key, answer) for key, answer in given]
        name, offset, full = self._append(b"".join(lines))
        for (key, answer), line in zip(given, lines, strict=True):
            self._spent[self._owner].add(answer)
            self._place[key] = (name, offset, len(line))
            offset += len(line)
        self._kept(full)

    def charge(self, cost: Spent) -> None:
        """Keeps what a request has or may have cost whose answer is not kept, for the budget.

        Raises:
            StorageError: as `add`.
        """
        row = {"owner": self._owner, "paid": vars(cost)}
        *_, full = self._append(json.dumps(row).encode() + b"\n")
        self._spent[self._owner].add(cost)
        self._kept(full)

    def _append(self, lines: bytes) -> tuple[str, int, OSError | None]:
        """File and offset of what was added; why what was held had to be given back."""
        if not self._root.is_local:
            self._segment_since = self._segment_since if self._segment else time.monotonic()
            offset = len(self._segment)
            self._segment += lines
            self.ready()
            self._spool.add(lines)
            return self._segment_name, offset, None
        if self._file is None:
            self.ready()
        assert self._file is not None
        offset = self._file.tell()
        full = self._write(lines, offset)
        self._longest = max(self._longest, len(lines))
        return f"{self._name}.jsonl", offset, full

    def _kept(self, full: OSError | None) -> None:
        if full is not None:
            raise storage_error(self._root.uri, full)
        self.flush(SECONDS_IN_SEGMENT)

    def _write(self, data: bytes, start: int) -> OSError | None:
        """Writes all or, with an error, nothing; returns why what was held had to be given back."""
        assert self._file is not None
        left, full = memoryview(data), None
        while left:
            try:
                left = left[self._file.write(left) :]
            except OSError as error:
                if self._reserve is None or error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    self._file.truncate(start)  # half a line would spoil the next one
                    self._file.seek(start)
                    raise storage_error(self._root.uri, error) from None
                self._reserve.truncate(0)
                self._reserve.close()
                self._reserve, full = None, error
        return full

    def _line(self, key: bytes, answer: A) -> bytes:
        row = {"key": key.hex(), "owner": self._owner, "answer": vars(answer)}
        return json.dumps(row).encode() + b"\n"

    def ready(self, under_way: int = 1) -> None:
        """Before anything is paid for: makes the file, and locally holds room for so many answers.

        Raises:
            StorageError: it cannot be written, or there is no room.
        """
        if not self._root.is_local:
            self._spool.begin(self._segment_name)
            return
        folder = self._root.path(self._folder)
        with storage_errors(self._root.uri):
            if self._reserve is None:
                os.makedirs(folder, exist_ok=True)
                # a file without a name: whoever is killed leaves nothing
                self._reserve = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
            wanted = max(BYTES_RESERVED, 2 * under_way * self._longest)
            while (lacking := wanted - self._reserve.tell()) > 0:
                # some file systems keep zeros in no room
                self._reserve.write(os.urandom(min(lacking, BYTES_RESERVED)))
            if self._file is None:
                self._file = open(f"{folder}/{self._name}.jsonl", "ab", buffering=0)  # noqa: SIM115

    def flush(self, older_than: float = 0.0) -> None:
        """Writes what is held for an object store, if it has been held that many seconds.

        Raises:
            StorageError: the store does not take it; it is tried again at the end only, as a store
                that does not answer is waited for each time.
        """
        if self._segment and (
            not older_than or time.monotonic() - self._segment_since >= older_than
        ):
            self._segment_since = math.inf
            self._root.write(f"{self._folder}/{self._segment_name}", bytes(self._segment))
            self._spool.stored()
            self._segment.clear()
            self._num_segments += 1

    def close(self) -> None:
        """Once nothing is added any more. What an object store does not take is left to the next
        journal on this machine.

        Raises:
            StorageError: the store does not take it.
        """
        try:
            self.flush()
        finally:
            self._spool.let_go()

    @property
    def _segment_name(self) -> str:
        return f"{self._name}-{self._num_segments:06d}.jsonl"
