"""Where a schedule's runs keep what they make: a disk that can be full, or stumbling S3."""

import json
import os
import random
import re
import shutil
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stages.files import Root
from tests.support.faulty import Fault, Faulty, faulty_proxy
from tests.support.s3 import s3_server

DISK_MEGABYTES = 64
# Until whoever writes has closed its file: a journal of answers never is as long as it is used
REMOUNT_SECONDS = 10.0
# What says nothing about how far the work is
ASIDE = ("leases", "history", "work/ray", ".writable")
# But for the attempt that wrote it
CHECKPOINT = re.compile(r"(work/.*/step-\d+)-[0-9a-f]+/complete\.json$")


class Storage(ABC):
    """A storage root whose writes are counted.

    uri: for recipes and runs.
    """

    uri: str

    @property
    def root(self) -> Root:
        return Root(self.uri)

    @abstractmethod
    def begin(self, folder: Path) -> None:
        """A new root with the files of `folder`; counts from 0."""

    @abstractmethod
    def heal(self) -> None:
        """Ends every fault."""

    @property
    @abstractmethod
    def written(self) -> list[str]:
        """Paths of files written since `begin`, one for each time that they were."""

    def num_writes(self) -> int:
        return len([path for path in self.written if not path.startswith(ASIDE)])

    def written_again(self) -> tuple[int, int]:
        """Records of shards, and checkpoints of a step, that were stored although the same was
        stored before."""
        records = [p for p in self.written if "/shards/" in p and p.endswith(".json")]
        steps = [found[1] for p in self.written if (found := CHECKPOINT.match(p))]
        return len(records) - len(set(records)), len(steps) - len(set(steps))

    def answers(self) -> int:
        """Answers of endpoints that have been written down."""
        found = 0
        for folder in ("answers", "embeddings"):
            for name in self.root.list(folder):
                found += self.root.read(f"{folder}/{name}").count(b'"key"')
        return found


class Disk(Storage):
    """A folder on a file system of its own. Writes are seen by looking, every few milliseconds."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self.uri = str(place / "runs")
        place.mkdir()
        size = f"size={DISK_MEGABYTES}m"
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", size, "tmpfs", place], capture_output=True, text=True
        )
        self.why_not = mounted.stderr.strip()
        self._known: set[tuple[str, int]] = set()
        self._seen: dict[tuple[str, int], None] = {}
        self._looks, self._end = threading.Lock(), threading.Event()
        self._looking = threading.Thread(target=self._look, daemon=True)
        self._looking.start()

    def stop(self) -> None:
        self._end.set()
        self._looking.join()
        if not self.why_not:
            subprocess.run(["umount", "--lazy", self._place], check=True)

    def begin(self, folder: Path) -> None:
        self.heal()
        shutil.rmtree(self.uri, ignore_errors=True)
        shutil.copytree(folder, self.uri)
        with self._looks:  # else a look that began before would take what was copied for written
            self._known = set(self._files())
            self._seen.clear()

    def heal(self) -> None:
        assert self.why_not or self._remount("rw")
        (self._place / "filler").unlink(missing_ok=True)

    def fill(self) -> None:
        """Leaves no byte of the disk."""
        with open(self._place / "filler", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"\0" * (1 << 20))
            except OSError:
                pass

    def make_read_only(self) -> bool:
        """As soon as no file is open for writing, which the system wants; whether that was so."""
        end = time.monotonic() + REMOUNT_SECONDS
        while not self._remount("ro"):
            if time.monotonic() > end:
                return False
            time.sleep(0.1)
        return True

    def _remount(self, how: str) -> bool:
        command = ["mount", "-o", f"remount,{how}", str(self._place)]
        return not subprocess.run(command, capture_output=True).returncode

    @property
    def written(self) -> list[str]:
        self._look_once()
        return [path for path, _ in list(self._seen)]

    def _files(self) -> Iterator[tuple[str, int]]:
        for folder, _, names in os.walk(self.uri):
            for name in names:
                file = Path(folder, name)
                try:
                    if ".tmp-" not in name:
                        yield str(file.relative_to(self.uri)), file.stat().st_mtime_ns
                except OSError:  # it was there
                    continue

    def _look_once(self) -> None:
        with self._looks:
            self._seen |= dict.fromkeys(one for one in self._files() if one not in self._known)

    def _look(self) -> None:
        while not self._end.wait(0.02):
            self._look_once()


class Bucket(Storage):
    """A folder in a bucket, behind a proxy that fails as it is told."""

    def __init__(self, proxy: Faulty, direct: str) -> None:
        self._proxy, self._direct = proxy, direct
        self._number = 0
        self._paths: list[str] = []
        self.num_failed = 0  # requests, by the last fault
        self.uri = ""

    @property
    def root(self) -> Root:
        return Root(self._direct.format(f"runs-{self._number}"))

    def begin(self, folder: Path) -> None:
        self._number += 1
        self.uri = self._proxy.root.format(f"runs-{self._number}")
        self._paths.clear()
        root = self.root
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            root.write(file.relative_to(folder).as_posix(), file.read_bytes())
        self.heal()

    def heal(self) -> None:
        self._proxy.fault = self._counted(lambda method, path: None)

    def stumble(self, seconds: float, share: float, seed: int) -> None:
        """For some seconds that share of all requests fails, in one way or another."""
        draws, end = random.Random(seed), time.monotonic() + seconds
        self.num_failed = 0
        kinds: list[Fault] = ["slow_down", "error", "drop", "cut", "slow"]

        def fault(method: str, path: str) -> Fault | None:
            if time.monotonic() > end or draws.random() > share:
                return None
            self.num_failed += 1
            return draws.choice(kinds)

        self._proxy.fault = self._counted(fault)

    def _counted(self, fault):  # type: ignore[no-untyped-def]
        def decide(number: int, method: str, path: str) -> Fault | None:
            found: Fault | None = fault(method, path)
            name = path.partition(f"runs-{self._number}/")[2].partition("?")[0]
            if method == "PUT" and name and found in (None, "slow", "cut"):
                self._paths.append(name)
            return found

        return decide

    @property
    def written(self) -> list[str]:
        return list(self._paths)


@contextmanager
def storages(folder: Path) -> Iterator[dict[str, Storage]]:
    """One of each kind."""
    disk = Disk(folder / "disk")
    with s3_server("127.0.0.1") as root, faulty_proxy(root) as proxy:
        try:
            yield {"disk": disk, "s3": Bucket(proxy, root)}
        finally:
            disk.stop()


def manifests(root: Root) -> dict[str, dict[str, object]]:
    """Every published artifact's manifest, by folder."""
    found = {}
    for path in root.sizes(""):
        folder, _, name = path.rpartition("/")
        if name == "manifest.json" and folder.count("/") == 1:
            found[folder] = json.loads(root.read(path))
    return found
