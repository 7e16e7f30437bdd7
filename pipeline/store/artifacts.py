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
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

from pipeline.store.copies import byte_limit, local_copy
from pipeline.store.manifest import (
    NO_USAGE,
    FileRecord,
    Manifest,
    ShardRecord,
    Usage,
    read_manifest,
    read_shard,
)
from stages.errors import StorageError, UserError
from stages.files import Root, understood

MANIFEST = "manifest.json"
# How names of artifacts' folders end: with the first digits of the fingerprint.
FINGERPRINTED = re.compile(r"-[0-9a-f]{8}$")


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
        """The manifest of a published artifact, or None; as `find`."""
        found = self.find(folder)
        return found[1] if found else None

    def find(self, folder: str) -> tuple[str, Manifest] | None:
        """A published artifact: its folder and manifest; None where there is none.

        It may have been made meanwhile under another title, by another recipe that needs it too.
        """
        kind, _, name = folder.rpartition("/")
        manifest = self._read(folder)
        if manifest is not None or not FINGERPRINTED.search(name):
            return (folder, manifest) if manifest else None
        for other in self.root.list(kind):
            if other != name and other.endswith(name[-9:]):
                manifest = self._read(f"{kind}/{other}")
                if manifest is not None:
                    return f"{kind}/{other}", manifest
        return None

    def _read(self, folder: str) -> Manifest | None:
        name = f"{folder}/{MANIFEST}"
        try:
            data = self.root.read(name)
        except FileNotFoundError:
            return None
        with understood(self.root.shown(name)):
            return read_manifest(data)

    def finished_shards(self, folder: str) -> dict[int, ShardRecord]:
        """The ledger: shards whose record and data are there, published or not."""
        found = {}
        sizes = self.root.sizes(folder)
        names = [
            f"{folder}/{name}"
            for name in sizes
            if name.startswith("shards/") and name[7:].removesuffix(".json").isdecimal()
        ]
        for name, data in zip(names, self.root.read_all(names), strict=True):
            with understood(self.root.shown(name)):
                record = read_shard(data)
            if not _gone(record.files.values(), sizes):
                found[record.number] = record
        return found

    def finished_shard(self, folder: str, number: int) -> ShardRecord | None:
        """A shard of the ledger, if its record and data are there."""
        name = _record(folder, number)
        try:
            data = self.root.read(name)
        except FileNotFoundError:
            return None
        with understood(self.root.shown(name)):
            record = read_shard(data)
        files = record.files.values()
        return record if all(self.root.exists(f"{folder}/{one.path}") for one in files) else None

    def whole_shards(self, folder: str, rows: Mapping[int, int]) -> list[ShardRecord]:
        """The ledger's shards where it has all of them.

        Args:
            rows: number of rows of every shard, by its number.

        Raises:
            UserError: a shard is missing, or has another number of rows.
        """
        finished = self.finished_shards(folder)
        shards = [finished[number] for number in sorted(rows) if number in finished]
        _check_whole(folder, shards, rows)
        return shards

    def damage(self, folder: str, manifest: Manifest, numbers: Iterable[int] = ()) -> str | None:
        """What a published artifact lacks, by one listing of its folder; no file is read.

        Args:
            numbers: of the shards that it should have.
        """
        lacking = sorted(set(numbers) - {shard.number for shard in manifest.shards})
        if lacking:
            return f"it lacks {_listed('shard', lacking)}"
        records = [file for shard in manifest.shards for file in shard.files.values()]
        gone = _gone([*records, *manifest.files.values()], self.root.sizes(folder))
        if not gone:
            return None
        more = f" (and {len(gone) - 1} more)" if len(gone) > 1 else ""
        return f"{gone[0]}{more} is gone or has another size"

    def put_shard(
        self,
        folder: str,
        number: int,
        files: dict[str, bytes],
        num_rows: int,
        usage: Usage = NO_USAGE,
    ) -> None:
        """Stores one shard: data first, then its record."""
        records = {}
        for name, data in files.items():
            stem, suffix = os.path.splitext(name)
            digest = hashlib.sha256(data).hexdigest()
            path = f"shards/{number:05d}.{stem}.{digest[:8]}{suffix}"
            self.root.write(f"{folder}/{path}", data)
            records[name] = FileRecord(path, digest, len(data))
        record = ShardRecord(number, num_rows, records, usage)
        self.root.write(_record(folder, number), json.dumps(asdict(record)).encode())

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

    def publish(self, folder: str, manifest: Manifest, rows: Mapping[int, int]) -> None:
        """Makes the artifact exist, whole. A manifest that is already there stays.

        Args:
            rows: number of rows of every shard that it must have, by its number.

        Raises:
            UserError: a shard or a file of it is missing, or a shard has another number of rows.
        """
        if self.root.exists(f"{folder}/{MANIFEST}"):
            return
        _check_whole(folder, manifest.shards, rows)
        if damage := self.damage(folder, manifest):
            raise _not_whole(folder, damage)
        text = json.dumps(asdict(manifest), indent=1)
        self.root.write(f"{folder}/{MANIFEST}", text.encode())

    def remove(self, folder: str) -> None:
        """Removes an artifact, manifest first."""
        self.root.delete(f"{folder}/{MANIFEST}")
        self.root.delete(folder)

    def check_writable(self) -> None:
        """Raises UserError early when nothing can be stored here, or read from here."""
        byte_limit()
        probe = f".writable-{os.getpid()}-{time.time_ns()}"
        self.root.write(probe, b"")
        self.root.delete(probe)

    def open(self, folder: str, node: str | None = None) -> "Artifact":
        """A published artifact for reading; asserts that it is published.

        Args:
            node: what the recipe at hand calls it, for messages.
        """
        found = self.find(folder)
        assert found is not None, f"{folder} is not published"
        return Artifact(self.root, *found, node)


class Artifact:
    """Reads a published artifact.

    Every file is checked against its checksum when a process first opens it, and again when its
    size or time has changed.
    """

    def __init__(
        self, root: Root, folder: str, manifest: Manifest, node: str | None = None
    ) -> None:
        self._root = root
        self.folder = folder
        self.manifest = manifest
        self._node = node
        self._shards = {shard.number: shard for shard in manifest.shards}

    @property
    def stats(self) -> dict[str, Any]:
        return self.manifest.stats

    @property
    def num_rows(self) -> int:
        return self.manifest.num_rows

    @property
    def files(self) -> list[str]:
        return list(self.manifest.files)

    @property
    def shard_numbers(self) -> list[int]:
        return [shard.number for shard in self.shards]

    def shard_rows(self, number: int) -> int:
        return self._shards[number].num_rows

    @property
    def shards(self) -> list[ShardRecord]:
        """All shards: number i at place i.

        Raises:
            StorageError: there is a gap, so that a place would not be a number.
        """
        numbers = range(max(self._shards, default=-1) + 1)
        if lacking := [number for number in numbers if number not in self._shards]:
            raise self._damaged(f"it lacks {_listed('shard', lacking)}")
        return [self._shards[number] for number in numbers]

    def shard_paths(self, name: str) -> list[Path]:
        """Verified local paths of file `name` of every shard, that of shard i at place i."""
        return [self._verified(shard.files[name]) for shard in self.shards]

    def shard_path(self, number: int, name: str) -> Path:
        """Verified local path of file `name` of the shard with this number."""
        if number not in self._shards:
            raise self._damaged(f"it lacks {_listed('shard', [number])}")
        return self._verified(self._shards[number].files[name])

    def file_path(self, name: str) -> Path:
        """Verified local path of one file; a folder's files keep their places to each other."""
        return self._verified(self.manifest.files[name])

    def local_path(self, name: str) -> Path | None:
        """Where one file lies on a local storage, not verified."""
        place = self._root.local_path(f"{self.folder}/{self.manifest.files[name].path}")
        return place.resolve() if place else None

    def folder_path(self, name: str) -> Path:
        """Local folder `name` (e.g. "model") with all its files verified."""
        paths = [self.file_path(n) for n in self.manifest.files if n.startswith(f"{name}/")]
        inside = next(n for n in self.manifest.files if n.startswith(f"{name}/"))
        depth = len(Path(inside).parts) - len(Path(name).parts)
        return paths[0].parents[depth - 1]

    def _verified(self, record: FileRecord) -> Path:
        name = f"{self.folder}/{record.path}"
        local = self._root.local_path(name)
        try:
            if local is None:
                local = local_copy(
                    f"{self.manifest.fingerprint[:16]}/{record.path}",
                    record.num_bytes,
                    partial(_holds, record),
                    partial(self._root.download, name),
                )
            elif not _holds(record, local):
                local.stat()  # raises where there is none
                local = None
        except FileNotFoundError:
            raise self._damaged(f"{record.path} is gone") from None
        if local is None:
            raise self._damaged(f"{record.path} has changed since it was published")
        return local

    def _damaged(self, what: str) -> StorageError:
        # what its maker called it may be another node, or none, in the recipe at hand
        mend = (
            f"Make it again with --force {self._node}"
            if self._node is not None
            else f"To make it again, delete {self._root.path(self.folder)} and run its recipe"
        )
        return StorageError(f"artifact {self.folder}: {what}. {mend}")


def _gone(records: Iterable[FileRecord], sizes: Mapping[str, int]) -> list[str]:
    """Paths of files that are not there, or with another size."""
    return [record.path for record in records if sizes.get(record.path) != record.num_bytes]


def _record(folder: str, number: int) -> str:
    return f"{folder}/shards/{number:05d}.json"


def _check_whole(folder: str, shards: Iterable[ShardRecord], rows: Mapping[int, int]) -> None:
    found = {shard.number: shard.num_rows for shard in shards}
    if lacking := sorted(rows.keys() - found.keys()):
        raise _not_whole(folder, f"it lacks {_listed('shard', lacking)} of {len(rows)}")
    for number, count in found.items():
        if rows.get(number) != count:
            wanted = rows.get(number, "none")
            raise _not_whole(folder, f"shard {number} has {count} rows and should have {wanted}")


def _not_whole(folder: str, what: str) -> UserError:
    return UserError(
        f"artifact {folder}: not published, since {what}; another run may have made it again "
        "(--force) at the same time. What is finished is kept: run again to make the rest"
    )


def _listed(what: str, numbers: Sequence[int]) -> str:
    """`shard 3`, or `shards 0, 1, ...` with at most ten numbers."""
    shown = ", ".join(map(str, numbers[:10])) + (", ..." if len(numbers) > 10 else "")
    return f"{what}{'s' if len(numbers) > 1 else ''} {shown}"


def _holds(record: FileRecord, file: Path) -> bool:
    if not file.exists():
        return False
    stat = file.stat()
    return _sha256(str(file), stat.st_size, stat.st_mtime_ns) == record.sha256


@cache
def _sha256(file: str, num_bytes: int, mtime_ns: int) -> str:
    """Digest of a file as it is now, kept by size and time: a process that makes many trials from
    the same factors need not read gigabytes again for each."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
