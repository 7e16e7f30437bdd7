"""Who makes what: leases, so that two runs at once do not make the same artifact twice.

    leases/<kind>/<8 digits>/000001.json    who, since when, how far; a count that grows

The file with the highest number is the lease; its writer holds it, and rewrites it every few
seconds. Numbers are taken by creating a file that nobody has created before, which file systems and
object stores decide for one of several who try at once. Whoever finds a lease waits, and takes over
with the next number when the file has not changed for a while by *its own* clock: clocks of
machines are never compared. A holder on the same machine whose process is gone is not waited for.

A holder that was frozen finds a higher number when it wakes: its lease is lost. What it still
writes harms nothing: artifacts are published once, shards are named by content, and checkpoints
carry the attempt that wrote them. So in the worst case work is done twice.
"""

import json
import math
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter

from stages.contract import Say
from stages.errors import Stopped, StorageError
from stages.files import Root
from stages.object_store import NoConditionalWrites
from stages.text import user_name

BEAT_SECONDS = 5.0
# Six beats: a storage that stumbles for some seconds costs nobody its work.
STALE_SECONDS = 30.0
# Beyond any stumbling storage and any two clocks that are set by the network.
FORGOTTEN_SECONDS = 300.0
LEASE_FILE = re.compile(r"(\d{6,})\.json")
# Between two lines about the same wait.
TELL_SECONDS = 30.0


@dataclass(frozen=True)
class Holder:
    """What a lease's file says.

    id: of the attempt. who: for people. process: tells on its own machine whether it lives.
    beat: grows while it lives. said: how far it is.
    """

    id: str
    who: str
    since: str
    process: tuple[str, int, str]
    beat: int = 0
    said: str = ""


class Watch:
    """Looks from another process, or machine, whether the holder of a lease still holds it.

    What must not be done twice, since it costs money, is done only while its beat is heard: whoever
    takes over waits twice as long. A holder may be frozen, or cut off, while its workers go on.

    Args:
        id: of the holder's attempt. stale_seconds: after which others take over.
    """

    def __init__(self, root: Root, folder: str, id: str, stale_seconds: float) -> None:
        self._root, self._folder, self._id = root, folder, id
        self._patience = stale_seconds / 2
        self._looked, self._changed, self._raw = -math.inf, now_awake(), b""

    def __call__(self) -> bool:
        """Whether the holder is heard; asks the storage every tenth of the time or so.

        Raises:
            StorageError: another has taken over, and may have ended since.
        """
        if now_awake() - self._looked > self._patience / 5:
            before = now_awake()  # an answer is as old as its question
            number, raw = _newest(self._root, self._folder)
            if number == 0:  # given back: by us with our last worker gone, so by another
                raise StorageError(f"another run had taken over {self._folder}, and has ended")
            holder = _read(raw)
            if holder is not None and holder.id != self._id:
                raise StorageError(f"{holder.who} has taken over {self._folder}")
            if raw != self._raw:
                self._raw, self._changed = raw, before
            self._looked = before
        return now_awake() - self._changed < self._patience


def now_awake() -> float:
    """Seconds that also pass while this machine sleeps, where it has such a clock."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


@dataclass(frozen=True)
class Seen:
    """A lease as somebody else sees it.

    age: seconds since the holder last wrote it, by the storage's clock and ours; below 0 where
    these differ.
    """

    folder: str
    holder: Holder
    age: float

    @property
    def alive(self) -> bool:
        """Whether the holder is at work, as far as can be known without waiting: surely where it
        was on this machine, else by its age. Nothing is taken over on this ground."""
        return not _is_gone(self.holder) and abs(self.age) < FORGOTTEN_SECONDS


@dataclass
class Lease:
    """A lease that is held. `lost` is set when another has taken it over."""

    folder: str
    number: int
    holder: Holder
    said: Callable[[], str]
    lost: threading.Event = field(default_factory=threading.Event)

    @property
    def file(self) -> str:
        return _file(self.folder, self.number)


class Leases:
    """The leases of one run on a storage root; leaving its context gives all of them back.

    Args:
        warn: is told once where the storage cannot have leases; nothing is waited for then.
    """

    def __init__(
        self,
        root: Root,
        warn: Callable[[str], None],
        beat_seconds: float = BEAT_SECONDS,
        stale_seconds: float = STALE_SECONDS,
    ) -> None:
        self._root = root
        self._warn = warn
        self._beat_seconds, self._stale_seconds = beat_seconds, stale_seconds
        self._held: dict[str, Lease] = {}
        # others' leases by folder, as they were first seen, and when: also by who does not wait
        self._first_seen: dict[str, tuple[bytes, float]] = {}
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._stop = threading.Event()
        self._without = False
        self._now = time.monotonic

    def __enter__(self) -> "Leases":
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop_waiting()
        self._end.set()
        for lease in list(self._held.values()):
            self.release(lease)

    @property
    def stale_seconds(self) -> float:
        """After which others take over; 0 where nobody can, as the storage has no leases."""
        return 0.0 if self._without else self._stale_seconds

    def stop_waiting(self) -> None:
        """Whoever waits in `take` gets `Stopped`; what is held stays held."""
        self._stop.set()

    def take(
        self,
        folder: str,
        is_made: Callable[[], bool],
        wait: Say,
        said: Callable[[], str],
        waits: bool = True,
    ) -> Lease | None:
        """Waits until the lease of an artifact is ours, or somebody else has made it.

        Args:
            wait: is told who is waited for. said: how far we are, for those who wait for us.
            waits: False: not for anybody who may be at work.

        Returns:
            None: it is made, or not waited for.

        Raises:
            Stopped: the run ends.
        """
        told = -math.inf
        while True:
            asked = self._now()
            if is_made():
                return None
            if self._stop.is_set():
                raise Stopped
            number, raw = self._newest(folder)
            now = self._now()
            # while the storage was silent for us, its holder may not have been heard there either
            unheard = now - asked > self._stale_seconds / 2
            seen = self._first_seen.get(folder)
            if seen is None or seen[0] != raw or unheard:
                seen = self._first_seen[folder] = raw, now
            holder = _read(raw)
            gone = number == 0 or (holder is not None and _is_gone(holder))
            if gone or now - seen[1] > self._stale_seconds:
                if number:
                    who = holder.who if holder else "a lease that cannot be read"
                    wait(f"takes over from {who}, which is gone", important=True)
                lease = self._create(folder, number + 1, said)
                if lease is not None and is_made():
                    self.release(lease)
                elif lease is not None:
                    return lease
                continue
            if not waits:
                return None
            if now - told > TELL_SECONDS and (holder is not None or now > seen[1]):
                wait(f"waits for {_shown(holder, _file(folder, number))}", important=True)
                told = now
            self._stop.wait(min(1.0, self._beat_seconds / 2))

    def hold(self, folder: str, said: Callable[[], str]) -> Lease | None:
        """A lease that nobody waits for, which tells others that we are at work."""
        return self._create(folder, 1, said)

    def release(self, lease: Lease) -> None:
        """Gives a lease back; where the storage fails it becomes stale instead."""
        with self._lock, suppress(StorageError):
            self._held.pop(lease.folder, None)
            if not self.is_lost(lease):
                self._root.delete(lease.file)

    def _create(self, folder: str, number: int, said: Callable[[], str]) -> Lease | None:
        since = time.strftime("%H:%M:%S")
        who = f"{user_name()}@{socket.gethostname()} (process {os.getpid()})"
        holder = Holder(uuid.uuid4().hex[:8], who, since, _process(), said=said())
        lease = Lease(folder, number, holder, said)
        try:
            if not self._without and not self._root.create(lease.file, _write(holder)):
                return None
        except NoConditionalWrites as error:
            self._without = True
            self._warn(
                f"warning: this storage cannot tell two runs apart ({error}); what two runs need "
                "at once is made twice"
            )
        with self._lock:
            self._held[folder] = lease
            for file in self._root.list(f"leases/{folder}") if number > 1 else []:
                if 0 < _number(file) < number:  # of those who are gone
                    self._root.delete(f"leases/{folder}/{file}")
        return lease

    def _newest(self, folder: str) -> tuple[int, bytes]:
        """Number and content of a lease; 0 where nobody holds it."""
        return (0, b"") if self._without else _newest(self._root, folder)

    def is_lost(self, lease: Lease) -> bool:
        """Whether another has taken it over."""
        if self._without:
            return False
        number, raw = self._newest(lease.folder)
        holder = _read(raw)
        if number != lease.number or holder is None or holder.id != lease.holder.id:
            lease.lost.set()
        return lease.lost.is_set()

    def _beat(self) -> None:
        beat = 0
        while not self._end.wait(self._beat_seconds):
            beat += 1
            for lease in list(self._held.values()):
                with self._lock, suppress(StorageError):  # the next beat may get through
                    if lease.folder in self._held and not self._without:
                        self._renew(lease, beat)

    def _renew(self, lease: Lease, beat: int) -> None:
        if not lease.lost.is_set() and not self.is_lost(lease):
            now = Holder(**asdict(lease.holder) | {"beat": beat, "said": lease.said()})
            self._root.write(lease.file, _write(now))


def run_lease(record: str) -> str:
    """What a run holds while it makes anything: `runs/<recipe>/<time>`.

    Args:
        record: its folder in the history, or a search's.
    """
    return f"runs/{record.removeprefix('history/')}"


def seen_leases(root: Root) -> list[Seen]:
    """All leases of a root, of those who are gone too."""
    newest: dict[str, int] = {}
    for path in root.sizes("leases"):
        folder, _, name = path.rpartition("/")
        newest[folder] = max(newest.get(folder, 0), _number(name))
    found = []
    for folder, number in newest.items():
        file = _file(folder, number)
        with suppress(FileNotFoundError):  # given back in between
            holder = _read(root.read_now(file))
            if holder is not None:
                found.append(Seen(folder, holder, root.age(file)))
    return found


def _newest(root: Root, folder: str) -> tuple[int, bytes]:
    number = max(map(_number, root.list(f"leases/{folder}")), default=0)
    if not number:
        return 0, b""
    try:
        return number, root.read_now(_file(folder, number))
    except FileNotFoundError:  # given back in between
        return 0, b""


def _number(name: str) -> int:
    """Of a lease's file; 0 for what is none."""
    found = LEASE_FILE.fullmatch(name)
    return int(found[1]) if found else 0


def _file(folder: str, number: int) -> str:
    return f"leases/{folder}/{number:06d}.json"


def _write(holder: Holder) -> bytes:
    return json.dumps(asdict(holder)).encode()


def _read(raw: bytes) -> Holder | None:
    """None: nothing, a file that is being created, or one that means nothing to this version."""
    try:
        return _HOLDER.validate_json(raw, strict=True)
    except ValueError:
        return None


# What a later version says beside it is left out
_HOLDER = TypeAdapter(Holder)


def _shown(holder: Holder | None, file: str) -> str:
    """Who is waited for, in words."""
    if holder is None:
        return f"{file}, which cannot be read; of another version of Sentray, while it changes"
    so_far = f": {holder.said}" if holder.said else ""
    return f"{holder.who}, at it since {holder.since}{so_far}"


def _process() -> tuple[str, int, str]:
    """This process: its machine since that was started, its number there, when it began."""
    return _machine(), os.getpid(), _began(os.getpid())


@cache
def boot_id() -> str:
    """Of this machine since it was started; "" where the system has none (no Linux)."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


@cache
def _machine() -> str:
    if boot := boot_id():
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    return uuid.uuid4().hex  # nobody is known to be gone, so one waits


def _began(pid: int) -> str:
    """When a process of this machine began, in clock ticks; "" where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _is_gone(holder: Holder) -> bool:
    machine, pid, began = holder.process
    return bool(machine == _machine() and began != _began(pid))
