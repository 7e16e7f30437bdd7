"""What a manifest says of an artifact, and the records of its shards and files."""

import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol, overload

from pydantic import ConfigDict, GetCoreSchemaHandler, TypeAdapter
from pydantic_core import CoreSchema, core_schema

from stages.encoder.hub import models_in, named, settled
from stages.errors import UserError
from stages.text import clock

# A field that is not known here is of a later version, which may mean more than can be read
ONLY_KNOWN = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class FileRecord:
    """One stored file: its path inside the artifact, and what it must contain."""

    __pydantic_config__ = ONLY_KNOWN

    path: str
    sha256: str
    num_bytes: int


@dataclass(frozen=True)
class Usage:
    """What making took, summed over processes.

    seconds: of processes. core_seconds: of the cores that they were given; cpu_seconds: in which
    these computed. tokens, positions: what models were fed, without padding and with it.
    """

    seconds: float = 0.0
    core_seconds: float = 0.0
    cpu_seconds: float = 0.0
    tokens: int = 0
    positions: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __str__(self) -> str:
        """In words; "" where too little is known."""
        found = []
        if self.core_seconds and self.seconds >= 1:
            found += [f"{clock(self.seconds)} of processes"]
            found += [f"cores {100 * self.cpu_seconds / self.core_seconds:.0f}% busy"]
        if self.positions:
            found += [f"padding {100 * self.padding_share:.1f}%"]
        return ", ".join(found)

    @property
    def padding_share(self) -> float:
        return 1 - self.tokens / self.positions if self.positions else 0.0


NO_USAGE = Usage()


@dataclass(frozen=True)
class ShardRecord:
    __pydantic_config__ = ONLY_KNOWN

    number: int
    num_rows: int
    files: dict[str, FileRecord]
    usage: Usage = NO_USAGE


@dataclass(frozen=True)
class FileColumns:
    """Records of one file of every shard; no path ("") where a shard has no such file."""

    __pydantic_config__ = ONLY_KNOWN

    path: list[str]
    sha256: list[str]
    num_bytes: list[int]


@dataclass(frozen=True)
class Shards(Sequence[ShardRecord]):
    """The shards of a manifest, by column; without what each took, which the ledger knows.

    A manifest with 33,334 shards of two files is read in 0.05 s; as a list of their records, which
    earlier versions wrote, in 0.4 s and more (two cores of an Intel Xeon).
    """

    __pydantic_config__ = ONLY_KNOWN

    number: list[int]
    num_rows: list[int]
    files: dict[str, FileColumns]

    @classmethod
    def of(cls, records: Sequence[ShardRecord]) -> "Shards":
        none = FileRecord("", "", 0)
        files = {}
        for name in dict.fromkeys(name for record in records for name in record.files):
            rows = [record.files.get(name, none) for record in records]
            files[name] = FileColumns(
                [row.path for row in rows],
                [row.sha256 for row in rows],
                [row.num_bytes for row in rows],
            )
        return cls([one.number for one in records], [one.num_rows for one in records], files)

    def __post_init__(self) -> None:
        lengths = {len(self.number), len(self.num_rows)}
        for file in self.files.values():
            lengths |= {len(file.path), len(file.sha256), len(file.num_bytes)}
        if len(lengths) > 1:
            raise ValueError("columns of shards of different length")

    def __len__(self) -> int:
        return len(self.number)

    @overload
    def __getitem__(self, place: int) -> ShardRecord: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[ShardRecord]: ...
    def __getitem__(self, place: int | slice) -> ShardRecord | Sequence[ShardRecord]:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        files = {
            name: FileRecord(file.path[place], file.sha256[place], file.num_bytes[place])
            for name, file in self.files.items()
            if file.path[place]
        }
        return ShardRecord(self.number[place], self.num_rows[place], files)

    @property
    def paths(self) -> list[str]:
        """Of all files."""
        return [path for file in self.files.values() for path in file.path if path]

    @property
    def num_bytes(self) -> int:
        return sum(sum(file.num_bytes) for file in self.files.values())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        records = handler.generate_schema(list[ShardRecord])
        before = core_schema.no_info_after_validator_function(cls.of, records)
        return core_schema.union_schema([handler(source), before])


@dataclass(frozen=True)
class Manifest:
    """Where an artifact comes from and what it holds."""

    __pydantic_config__ = ONLY_KNOWN

    kind: str
    title: str
    fingerprint: str
    identity: dict[str, Any]
    inputs: dict[str, str]
    shards: Shards
    files: dict[str, FileRecord]
    stats: dict[str, Any]
    created: str
    seconds: float
    machine: str
    recipe: str
    versions: dict[str, str] = field(default_factory=dict)
    usage: Usage = NO_USAGE

    @property
    def num_rows(self) -> int:
        return sum(self.shards.num_rows)


PACKAGES = ("sentray", "torch", "transformers", "tokenizers", "numpy", "ray")


class Described(Protocol):
    """What a manifest says of the node that was made."""

    @property
    def kind(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def identity(self) -> dict[str, Any]: ...


def new_manifest(
    node: Described,
    *,
    recipe: str,
    inputs: dict[str, str],
    shards: Sequence[ShardRecord],
    files: dict[str, FileRecord],
    stats: dict[str, Any],
    started: float,
    usage: Usage = NO_USAGE,
    packages: Sequence[str] = (),
) -> Manifest:
    """A manifest stamped with now, this machine, and the seconds since `started`.

    Args:
        packages: that decide what this node is, beside `PACKAGES`.
    """
    return Manifest(
        kind=node.kind, title=node.title, fingerprint=node.fingerprint, identity=node.identity,
        inputs=inputs,
        shards=Shards.of(sorted(shards, key=lambda shard: shard.number)), files=files, stats=stats,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        seconds=round(time.time() - started, 3),
        machine=f"{platform.machine()}, {os.cpu_count()} cores",
        recipe=recipe,
        usage=usage,
        versions=versions_here(*packages) | _commits(node.identity),
    )  # fmt: skip


def versions_here(*more: str) -> dict[str, str]:
    """Of the packages that decide what is computed, as this process has them.

    Args:
        more: left out where they are not installed, or under another name (onnxruntime-gpu).

    Raises:
        UserError: one is not installed, as in a folder of sources that was only copied.
    """
    others = {name: found for name in more if (found := version_here(name))}
    try:
        return {name: version(name) for name in PACKAGES} | others
    except PackageNotFoundError as error:
        raise UserError(
            f"{error.name} is not installed in {sys.prefix}: install Sentray there, by "
            "`pip install .` in the folder of its sources"
        ) from None


def version_here(package: str) -> str | None:
    """None where it is not installed."""
    with suppress(PackageNotFoundError):
        return version(package)
    return None


def _commits(identity: dict[str, Any]) -> dict[str, str]:
    """Of the hub's models, as this process reads them."""
    read, wanted = settled(), {named(*model) for model in models_in(identity)}
    return {name: read[name] for name in sorted(wanted & read.keys())}


def read_manifest(data: bytes) -> Manifest:
    """A manifest from its JSON; ValueError where it is none."""
    return _MANIFEST.validate_json(data, strict=True)


def shard_line(record: ShardRecord) -> bytes:
    """A shard's record as JSON in one line, as `read_shard` reads it."""
    return json.dumps(asdict(record)).encode()


def read_shard(data: bytes) -> ShardRecord:
    """A shard's record from its JSON; ValueError where it is none."""
    return _SHARD.validate_json(data, strict=True)


_MANIFEST, _SHARD = TypeAdapter(Manifest), TypeAdapter(ShardRecord)
