"""Artifacts: published once, complete, never changed.

    <root>/<kind>/<title>-<fingerprint, 8 digits>/
        shards/00003.factors.9f3c21ab.npy   data, named by content
        shards/00003.json                   the shard's record, written after its data
        shards/ledger-5c0e9a71.jsonl        many of them together, to be read at once
        files/<digest>/model/...            whole-folder outputs, named by content
        manifest.json                       written last: without it there is no artifact
        again.json                          it is being made again (`--force`)
        manifest-d05f13b2.json              of before it was made again

The shard records are the ledger of unfinished work. Names by content make two runs that compute
the same artifact at once harmless: neither overwrites what the other's manifest points to. So with
one that is made again (`--force`): until its new manifest replaces the old one, nothing changes for
those who read it. The old manifest stays beside the new one for nodes that have begun with it, and
what only it named is left to `sentray gc`.

Eight digits are few enough to be read, and two artifacts of a kind have the same ones once in four
billion pairs. Manifests have all 64, and so have claims beside unfinished work: those of another
artifact are refused.
"""

import hashlib
import json
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from pipeline.store.artifact import Artifact, listed
from pipeline.store.copies import byte_limit
from pipeline.store.manifest import (
    NO_USAGE,
    FileRecord,
    Manifest,
    ShardRecord,
    Usage,
    read_manifest,
    read_shard,
    shard_line,
)
from stages.content import sha256_of
from stages.errors import UserError
from stages.files import Root, understood

MANIFEST, AGAIN = "manifest.json", "again.json"
# How names of artifacts' folders end: with the first digits of the fingerprint.
FINGERPRINTED = re.compile(r"-[0-9a-f]{8}$")
RECORD, SEGMENT = re.compile(r"shards/\d+\.json"), re.compile(r"shards/ledger-\w+\.jsonl")
LEDGER = re.compile(f"{RECORD.pattern}|{SEGMENT.pattern}")


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

    def _read(self, folder: str, manifest: str = MANIFEST) -> Manifest | None:
        name = f"{folder}/{manifest}"
        try:
            data = self.root.read_now(name)
        except FileNotFoundError:
            return None
        with understood(self.root.shown(name)):
            return read_manifest(data)

    def finished_shards(self, folder: str) -> dict[int, ShardRecord]:
        """The ledger: shards whose record and data are there, published or not.

        Costs a listing, a request for each segment, and one for each record that is in none.
        """
        there = self.root.names(folder)
        segments = sorted(name for name in there if SEGMENT.fullmatch(name))
        found = self._whole(self._records(folder, segments), there)
        single = (name for name in there if RECORD.fullmatch(name))
        rest = sorted(name for name in single if _number(name) not in found)
        return found | self._whole(self._records(folder, rest), there)

    @staticmethod
    def _whole(records: Iterable[ShardRecord], there: set[str]) -> dict[int, ShardRecord]:
        """By number, those whose files are there: one that was lost may have been made again."""
        return {
            record.number: record
            for record in records
            if not _gone([file.path for file in record.files.values()], there)
        }

    def recorded_shards(self, folder: str) -> set[int]:
        """Numbers of the shards in the ledger; one listing."""
        return {_number(name) for name in self.root.names(folder) if RECORD.fullmatch(name)}

    def _records(self, folder: str, names: Iterable[str]) -> Iterator[ShardRecord]:
        """What these files of the ledger hold, a record a line."""
        paths = [f"{folder}/{name}" for name in names]
        for path, data in zip(paths, self.root.read_all(paths), strict=True):
            with understood(self.root.shown(path)):
                for line in data.splitlines():
                    yield read_shard(line)

    def finished_shard(self, folder: str, number: int) -> ShardRecord | None:
        """A shard of the ledger, if its record and data are there."""
        name = _record(folder, number)
        try:
            data = self.root.read_now(name)
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

    def is_made(self, folder: str) -> bool:
        """Whether an artifact is published, and not being made again."""
        found = self.find(folder)
        return found is not None and not self.is_made_again(found[0], self.root.list(found[0]))

    def is_made_again(self, folder: str, names: Iterable[str]) -> bool:
        """Whether somebody has begun to make a published artifact again, and it is not there yet.

        Args:
            names: of what is in its folder.
        """
        note = self._again(folder) if AGAIN in names else None
        return note is not None and note["instead_of"] == self._digest(folder)

    def begin_again(self, folder: str) -> None:
        """Forgets what is finished. What is published stays until the new one takes its place."""
        digest = self._digest(folder)
        self._note(folder, digest, "forgetting")
        names = [name for name in self.root.names(folder) if LEDGER.fullmatch(name)]
        self.root.delete_all(f"{folder}/{name}" for name in names)
        self._note(folder, digest, "begun")

    def begun_again(self, folder: str) -> bool:
        """Whether a `begin_again` was killed before all was forgotten."""
        note = self._again(folder)
        return note is not None and note["state"] != "begun"

    def superseded(self, folder: str, names: Iterable[str]) -> list[str]:
        """Files of a published artifact that only its manifest of before it was made again named.

        Args:
            names: of all its files.
        """
        manifest = self._read(folder)
        if manifest is None or self.is_made_again(folder, names):
            return []
        known = {*_paths(manifest), MANIFEST, AGAIN}
        return [name for name in names if name not in known and not LEDGER.fullmatch(name)]

    def _note(self, folder: str, digest: str, state: str) -> None:
        if digest:
            note = {"instead_of": digest, "state": state}
            self.root.write(f"{folder}/{AGAIN}", json.dumps(note).encode())

    def _again(self, folder: str) -> dict[str, str] | None:
        """The note that it is made again; None where there is none, or none any more."""
        name = f"{folder}/{AGAIN}"
        try:
            data = self.root.read_now(name)
        except FileNotFoundError:
            return None
        with understood(self.root.shown(name)):
            note = json.loads(data)
            return {key: str(note[key]) for key in ("instead_of", "state")}

    def _digest(self, folder: str) -> str:
        """Of the manifest as it is; "" where there is none."""
        try:
            return hashlib.sha256(self.root.read_now(f"{folder}/{MANIFEST}")).hexdigest()
        except FileNotFoundError:
            return ""

    def damage(
        self,
        folder: str,
        manifest: Manifest,
        names: set[str],
        numbers: Iterable[int] = (),
    ) -> str | None:
        """What a published artifact lacks; no file is looked at, whoever opens one verifies it.

        Args:
            names: of all its files.
            numbers: of the shards that it should have.
        """
        lacking = sorted(set(numbers).difference(manifest.shards.number))
        if lacking:
            return f"it lacks {listed('shard', lacking)}"
        gone = _gone(_paths(manifest), names)
        if not gone:
            return None
        more = f" (and {len(gone) - 1} more)" if len(gone) > 1 else ""
        return f"{gone[0]}{more} is gone"

    def put_shard(
        self,
        folder: str,
        number: int,
        files: dict[str, bytes],
        num_rows: int,
        usage: Usage = NO_USAGE,
    ) -> ShardRecord:
        """Stores one shard: data first, then its record."""
        records = {}
        for name, data in files.items():
            stem, suffix = os.path.splitext(name)
            digest = hashlib.sha256(data).hexdigest()
            path = f"shards/{number:05d}.{stem}.{digest[:8]}{suffix}"
            self.root.write(f"{folder}/{path}", data)
            records[name] = FileRecord(path, digest, len(data))
        record = ShardRecord(number, num_rows, records, usage)
        self.root.write(_record(folder, number), shard_line(record))
        return record

    def put_segment(self, folder: str, lines: Iterable[bytes]) -> None:
        """Stores records of finished shards (`shard_line`) together, so that whoever goes on need
        not ask for each."""
        name = f"shards/ledger-{uuid.uuid4().hex[:8]}.jsonl"
        self.root.write(f"{folder}/{name}", b"\n".join(lines))

    def put_files(self, folder: str, local: Path) -> dict[str, FileRecord]:
        """Stores the files of a local folder, together, under one content-named folder."""
        names = sorted(p.relative_to(local).as_posix() for p in local.rglob("*") if p.is_file())
        digests = {name: sha256_of(local / name) for name in names}
        whole = hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:8]
        self.root.put_folder(local, f"{folder}/files/{whole}")
        return {
            name: FileRecord(f"files/{whole}/{name}", digests[name], (local / name).stat().st_size)
            for name in names
        }

    def publish(self, folder: str, manifest: Manifest, rows: Mapping[int, int]) -> None:
        """Makes the artifact exist, whole. A manifest that is already there stays, unless the
        artifact is made again.

        Args:
            rows: number of rows of every shard that it must have, by its number.

        Raises:
            UserError: a shard or a file of it is missing, or a shard has another number of rows.
        """
        names = self.root.names(folder)
        if MANIFEST in names and not self.is_made_again(folder, names):
            return
        _check_whole(folder, manifest.shards, rows)
        if damage := self.damage(folder, manifest, names):
            raise _not_whole(folder, damage)
        if MANIFEST in names:
            old = self._read(folder)
            if old is not None and _generation(old) != _generation(manifest):
                self.root.write(f"{folder}/{_former(_generation(old))}", _encoded(old))
        self.root.write(f"{folder}/{MANIFEST}", _encoded(manifest))
        self.root.delete(f"{folder}/{AGAIN}")

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

    def open(self, folder: str, node: str | None = None, generation: str = "") -> Artifact:
        """A published artifact for reading; asserts that it is published.

        Args:
            node: what the recipe at hand calls it, for messages.
            generation: as it was then, where it may have been made again since; "" as it is.

        Raises:
            UserError: that generation is gone.
        """
        found = self.find(folder)
        assert found is not None, f"{folder} is not published"
        folder, manifest = found
        if generation not in ("", _generation(manifest)):
            former = self._read(folder, _former(generation))
            if former is None:
                raise UserError(
                    f"artifact {folder} was made again (--force) while it was read, and what it "
                    "was before is gone; run again to read the new one"
                )
            manifest = former
        return Artifact(self.root, folder, manifest, node)

    def current(self, folder: str) -> tuple[str, str]:
        """Folder and generation of a published artifact as it is now."""
        found = self.find(folder)
        assert found is not None, f"{folder} is not published"
        return found[0], _generation(found[1])


def _paths(manifest: Manifest) -> list[str]:
    """Of all files that a manifest names."""
    return manifest.shards.paths + [file.path for file in manifest.files.values()]


def _generation(manifest: Manifest) -> str:
    """Names what its files hold, not when and with which `stats` they were made: one that was made
    again and came out the same is the same generation."""
    return hashlib.sha256("\n".join(sorted(_paths(manifest))).encode()).hexdigest()[:8]


def _encoded(manifest: Manifest) -> bytes:
    return json.dumps(asdict(manifest)).encode()


def _former(generation: str) -> str:
    return f"manifest-{generation}.json"


def _gone(paths: Sequence[str], names: set[str]) -> list[str]:
    """Those of files that are not there."""
    return [] if names.issuperset(paths) else [path for path in paths if path not in names]


def _record(folder: str, number: int) -> str:
    return f"{folder}/shards/{number:05d}.json"


def _number(record: str) -> int:
    return int(record[7:-5])


def _check_whole(folder: str, shards: Iterable[ShardRecord], rows: Mapping[int, int]) -> None:
    found = {shard.number: shard.num_rows for shard in shards}
    if lacking := sorted(rows.keys() - found.keys()):
        raise _not_whole(folder, f"it lacks {listed('shard', lacking)} of {len(rows)}")
    for number, count in found.items():
        if rows.get(number) != count:
            wanted = rows.get(number, "none")
            raise _not_whole(folder, f"shard {number} has {count} rows and should have {wanted}")


def _not_whole(folder: str, what: str) -> UserError:
    return UserError(
        f"artifact {folder}: not published, since {what}; another run may have made it again "
        "(--force) at the same time. What is finished is kept: run again to make the rest"
    )
