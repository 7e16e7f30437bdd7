"""A published artifact as it is read: every file is verified when it is first opened."""

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from pipeline.store.copies import local_copy
from pipeline.store.manifest import FileRecord, Manifest, ShardRecord
from stages.content import sha256_of
from stages.errors import StorageError
from stages.files import Root


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
            raise self._damaged(f"it lacks {listed('shard', lacking)}")
        return [self._shards[number] for number in numbers]

    def shard_paths(self, name: str) -> list[Path]:
        """Verified local paths of file `name` of every shard, that of shard i at place i."""
        return [self._verified(shard.files[name]) for shard in self.shards]

    def shard_path(self, number: int, name: str) -> Path:
        """Verified local path of file `name` of the shard with this number."""
        if number not in self._shards:
            raise self._damaged(f"it lacks {listed('shard', [number])}")
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
            f"Make it again: sentray run RECIPE --force {self._node}"
            if self._node is not None
            else f"To make it again, delete {self._root.shown(self.folder)} and run its recipe"
        )
        return StorageError(f"artifact {self.folder}: {what}. {mend}")


def listed(what: str, numbers: Sequence[int]) -> str:
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
    return sha256_of(Path(file))
