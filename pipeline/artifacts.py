"""Artifacts: published once, complete, never changed.

    <root>/<kind>/<title>-<fingerprint, 8 digits>/
        shards/00003.factors.9f3c21ab.npy   data, named by content
        shards/00003.json                   the shard's record, written after its data
        files/<digest>/model/...            whole-folder outputs, named by content
        manifest.json                       written last: without it there is no artifact

The shard records are the ledger of unfinished work. Names by content make two runs that compute
the same artifact at once harmless: neither overwrites what the other's manifest points to.
"""

import hashlib
import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stages.content import cache_folder
from stages.errors import StorageError
from stages.files import Root

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class FileRecord:
    """One stored file: its path inside the artifact, and what it must contain."""

    path: str
    sha256: str
    num_bytes: int


@dataclass(frozen=True)
class ShardRecord:
    number: int
    num_rows: int
    files: dict[str, FileRecord]


@dataclass(frozen=True)
class Manifest:
    """Where an artifact comes from and what it holds."""

    kind: str
    title: str
    fingerprint: str
    identity: dict[str, Any]
    inputs: dict[str, str]
    shards: list[ShardRecord]
    files: dict[str, FileRecord]
    stats: dict[str, Any]
    created: str
    seconds: float
    machine: str
    recipe: str
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return sum(shard.num_rows for shard in self.shards)


class ArtifactStore:
    """The artifacts under one storage root."""

    def __init__(self, uri: str) -> None:
        self.root = Root(uri)

    def folder(self, kind: str, title: str, fingerprint: str) -> str:
        """The artifact's folder. One with this fingerprint is reused whatever its title."""
        wanted = f"{title}-{fingerprint[:8]}"
        names = self.root.list(kind)
        same = [name for name in names if name.endswith(f"-{fingerprint[:8]}")]
        published = [n for n in same if self.root.exists(f"{kind}/{n}/{MANIFEST}")]
        return f"{kind}/{wanted if wanted in published else (published or [wanted])[0]}"

    def manifest(self, folder: str) -> Manifest | None:
        """The manifest of a published artifact, or None."""
        try:
            raw = json.loads(self.root.read(f"{folder}/{MANIFEST}"))
        except FileNotFoundError:
            return None
        raw["shards"] = [_shard(shard) for shard in raw["shards"]]
        raw["files"] = {name: FileRecord(**record) for name, record in raw["files"].items()}
        return Manifest(**raw)

    def finished_shards(self, folder: str) -> dict[int, ShardRecord]:
        """The ledger: shards whose record is there, published or not."""
        found = {}
        for name in self.root.list(f"{folder}/shards"):
            if name.removesuffix(".json").isdecimal():
                record = _shard(json.loads(self.root.read(f"{folder}/shards/{name}")))
                found[record.number] = record
        return found

    def put_shard(self, folder: str, number: int, files: dict[str, bytes], num_rows: int) -> None:
        """Stores one shard: data first, then its record."""
        records = {}
        for name, data in files.items():
            stem, suffix = os.path.splitext(name)
            digest = hashlib.sha256(data).hexdigest()
            path = f"shards/{number:05d}.{stem}.{digest[:8]}{suffix}"
            self.root.write(f"{folder}/{path}", data)
            records[name] = FileRecord(path, digest, len(data))
        record = ShardRecord(number, num_rows, records)
        self.root.write(f"{folder}/shards/{number:05d}.json", json.dumps(asdict(record)).encode())

    def put_files(self, folder: str, local: Path) -> dict[str, FileRecord]:
        """Stores the files of a local folder, together, under one content-named folder."""
        names = sorted(p.relative_to(local).as_posix() for p in local.rglob("*") if p.is_file())
        digests = {name: hashlib.sha256((local / name).read_bytes()).hexdigest() for name in names}
        whole = hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:8]
        self.root.put_folder(local, f"{folder}/files/{whole}")
        return {
            name: FileRecord(f"files/{whole}/{name}", digests[name], (local / name).stat().st_size)
            for name in names
        }

    def publish(self, folder: str, manifest: Manifest) -> None:
        """Makes the artifact exist. A manifest that is already there stays."""
        if not self.root.exists(f"{folder}/{MANIFEST}"):
            text = json.dumps(asdict(manifest), indent=1)
            self.root.write(f"{folder}/{MANIFEST}", text.encode())

    def forget(self, folder: str) -> None:
        """Removes an artifact, manifest first."""
        self.root.delete(f"{folder}/{MANIFEST}")
        self.root.delete(folder)

    def check_writable(self) -> None:
        """Raises UserError early when nothing can be stored here."""
        probe = f".writable-{os.getpid()}-{time.time_ns()}"
        self.root.write(probe, b"")
        self.root.delete(probe)

    def open(self, folder: str) -> "Artifact":
        """A published artifact for reading; asserts that it is published."""
        manifest = self.manifest(folder)
        assert manifest is not None, f"{folder} is not published"
        return Artifact(self.root, folder, manifest)


class Artifact:
    """Reads a published artifact.

    Every file is checked against its checksum when a process first opens it, and again when its
    size or time has changed.
    """

    def __init__(self, root: Root, folder: str, manifest: Manifest) -> None:
        self._root = root
        self.folder = folder
        self.manifest = manifest

    def shard_paths(self, name: str) -> list[Path]:
        """Verified local paths of file `name` of every shard, in shard order."""
        return [self._verified(shard.files[name]) for shard in self.manifest.shards]

    def shard_path(self, number: int, name: str) -> Path:
        return self._verified(self.manifest.shards[number].files[name])

    def file_path(self, name: str) -> Path:
        """Verified local path of one file; a folder's files keep their places to each other."""
        return self._verified(self.manifest.files[name])

    def folder_path(self, name: str) -> Path:
        """Local folder `name` (e.g. "model") with all its files verified."""
        paths = [self.file_path(n) for n in self.manifest.files if n.startswith(f"{name}/")]
        inside = next(n for n in self.manifest.files if n.startswith(f"{name}/"))
        depth = len(Path(inside).parts) - len(Path(name).parts)
        return paths[0].parents[depth - 1]

    def _verified(self, record: FileRecord) -> Path:
        name = f"{self.folder}/{record.path}"
        local = self._root.local_path(name)
        if local is None:
            local = cache_folder() / "files" / self.manifest.fingerprint[:16] / record.path
            if not _holds(local, record):  # a damaged copy is fetched again
                try:
                    data = self._root.read(name)
                except FileNotFoundError:
                    raise self._damaged(record, "is gone") from None
                Root(str(local.parent)).write(local.name, data)
        if not local.exists():
            raise self._damaged(record, "is gone")
        if not _holds(local, record):
            raise self._damaged(record, "has changed")
        return local

    def _damaged(self, record: FileRecord, what: str) -> StorageError:
        return StorageError(
            f"artifact {self.folder}: {record.path} {what} since it was published. "
            f"Make it again with --force {self.manifest.stats['node']}"
        )


# Files that this process has read and found right, with size and time of then: a process that
# makes many trials from the same factors need not read gigabytes again for each.
_FOUND_RIGHT: set[tuple[str, str, int, int]] = set()


def _holds(file: Path, record: FileRecord) -> bool:
    if not file.exists():
        return False
    stat = file.stat()
    key = (str(file), record.sha256, stat.st_size, stat.st_mtime_ns)
    if key not in _FOUND_RIGHT:
        with file.open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != record.sha256:
                return False
        _FOUND_RIGHT.add(key)
    return True


def new_manifest(
    *,
    kind: str,
    title: str,
    fingerprint: str,
    identity: dict[str, Any],
    inputs: dict[str, str],
    shards: Sequence[ShardRecord],
    files: dict[str, FileRecord],
    stats: dict[str, Any],
    started: float,
    recipe: str,
) -> Manifest:
    """A manifest stamped with now, this machine, and the seconds since `started`."""
    from importlib.metadata import version

    return Manifest(
        kind=kind, title=title, fingerprint=fingerprint, identity=identity, inputs=inputs,
        shards=sorted(shards, key=lambda shard: shard.number), files=files, stats=stats,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        seconds=round(time.time() - started, 3),
        machine=f"{platform.machine()}, {os.cpu_count()} cores",
        recipe=recipe,
        versions={name: version(name) for name in ("sentray", "torch", "transformers", "ray")},
    )  # fmt: skip


def _shard(raw: dict[str, Any]) -> ShardRecord:
    files = {name: FileRecord(**record) for name, record in raw["files"].items()}
    return ShardRecord(raw["number"], raw["num_rows"], files)
