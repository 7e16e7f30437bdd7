"""One node to be made: its opened inputs, where its result goes, how it is published.

This is the `Work` that stages are handed (stages/contract.py). It is small and picklable: it
travels to the process that does the work.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pipeline.plan.graph import Node
from pipeline.run.meter import Meter
from pipeline.run.pools import PoolSettings
from pipeline.store.artifacts import Artifact, ArtifactStore
from pipeline.store.leases import Watch
from pipeline.store.manifest import NO_USAGE, ShardRecord, Usage, new_manifest, shard_line
from stages.contract import NO_FIGURES, Say, Shard
from stages.errors import Stopped, UserError
from stages.files import Root, half_written

if TYPE_CHECKING:
    from pipeline.run.placement import Place


def silent(text: str, important: bool = False, figures: Mapping[str, float] = NO_FIGURES) -> None:
    """Tells nobody."""


def never() -> bool:
    """Nobody asks it to end."""
    return False


def always() -> bool:
    """Nobody can take it over."""
    return True


# A file of some 300 kB. Fewer are soon asked for, each for itself.
SHARDS_IN_SEGMENT, FEWEST_IN_SEGMENT = 1000, 100


@dataclass(frozen=True)
class NodeWork:
    """A node on its way.

    inputs: folders of the artifacts it reads, by what its stage calls them. generations: what these
        were when it began (see `begun`).
    tell: takes progress. stopping: whether the run is to end.
    secrets: values of the environment variables that its stage names.
    pools: where stages run (pipeline/run/placement.py).
    at_start: where it could run when the run began: a machine that is lost since may come again,
        so it waits instead of being refused.
    meter: of the process that works; None: what it takes is not measured.
    attempt: eight digits that no other attempt to make it has; "" where nobody else can.
    stale_seconds: after which another run takes over; 0: none does. is_ours: whether none has.
    noted: records of finished shards that are in no segment of the ledger yet.
    """

    node: Node
    storage: str
    folder: str
    inputs: dict[str, str]
    generations: Mapping[str, str] = field(default_factory=dict)
    started: float = field(default_factory=time.time)
    tell: Say = silent
    stopping: Callable[[], bool] = never
    attempt: str = ""
    stale_seconds: float = 0.0
    is_ours: Callable[[], bool] = always
    pools: Mapping[str, PoolSettings] = field(default_factory=dict)
    meter: Meter | None = None
    at_start: "Place | None" = None
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    noted: list[bytes] = field(default_factory=list, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        # whoever unpickles it says how progress is told, and how it hears of the end
        return vars(self) | {
            "tell": silent, "stopping": never, "is_ours": always, "meter": None, "noted": [],
        }  # fmt: skip

    @property
    def store(self) -> ArtifactStore:
        return ArtifactStore(self.storage)

    @property
    def root(self) -> Root:
        return self.store.root

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def scratch(self) -> str:
        return f"work/{self.folder}"

    @property
    def lease(self) -> str:
        """What is leased to make it, whatever its title."""
        return f"{self.node.kind}/{self.node.fingerprint[:8]}"

    @property
    def owner(self) -> str:
        return self.node.fingerprint[:16]

    @property
    def input_names(self) -> list[str]:
        return list(self.inputs)

    def input(self, name: str) -> Artifact:
        generation = self.generations.get(name, "")
        return self.store.open(self.inputs[name], self.node.inputs.get(name), generation)

    def secret(self, variable: str) -> str:
        return self.secrets[variable]

    def say(
        self, text: str, important: bool = False, figures: Mapping[str, float] = NO_FIGURES
    ) -> None:
        self.tell(text, important, figures)

    def may_pay(self) -> bool:
        if self.stopping():
            raise Stopped
        return self.is_ours()

    def watched(self) -> Callable[[], bool]:
        """Looks whether the run that makes this is still heard, from wherever the work is done."""
        if not self.stale_seconds:
            return always
        return Watch(self.root, self.lease, self.attempt, self.stale_seconds)

    def count_tokens(self, tokens: int, positions: int) -> None:
        if self.meter is not None:
            self.meter.count_tokens(tokens, positions)

    def expected_rows(self) -> dict[int, int]:
        """Rows that every shard must have, by its number; none of nodes that are not row-wise."""
        if not self.node.stage.row_wise:
            return {}
        return self.node.stage.expected_rows(self.input(self.input_names[0]))

    def missing_shards(self) -> list[int]:
        """Shard numbers that a row-wise node still lacks."""
        rows = self.expected_rows()
        finished = self.store.finished_shards(self.folder)
        found = {number: shard.num_rows for number, shard in finished.items()}
        return [number for number in sorted(rows) if found.get(number) != rows[number]]

    def finished_shard(self, number: int) -> ShardRecord | None:
        return self.store.finished_shard(self.folder, number)

    def whole_shards(self) -> list[ShardRecord]:
        """Finished shards of a row-wise node; raises UserError unless all of them are there."""
        return self.store.whole_shards(self.folder, self.expected_rows())

    def put_shard(self, number: int, shard: Shard) -> None:
        self.note_finished(self.store_shard(number, shard, NO_USAGE))

    def store_shard(self, number: int, shard: Shard, usage: Usage) -> bytes:
        """Stores a finished shard; returns its record, for `note_finished` somewhere."""
        record = self.store.put_shard(self.folder, number, shard.files, shard.num_rows, usage)
        return shard_line(record)

    def note_finished(self, record: bytes) -> None:
        """Stores the records of finished shards a second time, many in a file, for whoever reads
        the ledger: a store answers some thousand requests a minute."""
        self.noted.append(record)
        if len(self.noted) == SHARDS_IN_SEGMENT:
            self.finish_segments()

    def finish_segments(self) -> None:
        """Stores what is noted, if it is much."""
        if len(self.noted) >= FEWEST_IN_SEGMENT:
            self.store.put_segment(self.folder, self.noted)
            self.noted.clear()

    def read_shard_file(self, name: str) -> Iterator[bytes]:
        """File `name` of every shard, in shard order; the node need not be published."""
        for shard in self.whole_shards():
            yield self.root.read(f"{self.folder}/{shard.files[name].path}")

    def publish(
        self,
        stats: dict[str, Any],
        folder: Path | None = None,
        rows: Mapping[int, int] | None = None,
    ) -> None:
        """Publishes the shards of the ledger and the files of a local folder: all, or nothing.

        Args:
            rows: number of rows of every shard that was made, by its number; None: those of the
                source of a row-wise node, no shards of others.

        Raises:
            UserError: a shard is missing, or has another number of rows; or a file that it read is
                not what it was when the run was planned.
        """
        store, node = self.store, self.node
        self._check_reads()
        rows = self.expected_rows() if rows is None else rows
        self.finish_segments()
        shards = store.whole_shards(self.folder, rows)
        usage = sum((shard.usage for shard in shards), self.meter.lap() if self.meter else NO_USAGE)
        manifest = new_manifest(
            node,
            recipe=node.recipe,
            inputs=self.inputs,
            shards=shards,
            files=store.put_files(self.folder, folder) if folder else {},
            stats=stats | {"node": node.name},
            started=self.started,
            usage=usage,
            packages=node.stage.packages,
        )
        store.publish(self.folder, manifest, rows)
        store.root.delete(self.scratch)

    def _check_reads(self) -> None:
        if self.node.stage.resources().workers:
            return  # a training reads its files when it begins, and hours are not thrown away
        try:
            for one in self.node.reads:
                one.check()
        except UserError:
            self.begin_again()
            raise

    def begin_again(self) -> None:
        self.noted.clear()
        self.store.begin_again(self.folder)

    def claim(self, say: Say) -> None:
        """Notes whose unfinished work this is (names of folders have eight of 64 digits), and of
        which generations of its inputs.

        Rows of two generations do not go together, so with another one a row-wise node begins
        again. A training goes on, and says so.

        Raises:
            UserError: it is of another fingerprint.
        """
        row_wise = self.node.stage.row_wise
        if not (row_wise or self.node.stage.resources().workers):
            return  # it leaves nothing unfinished that another could take for its own
        file, mine = f"{self.scratch}/fingerprint", self.node.fingerprint
        whole = self.root.read(file).decode() if self.root.exists(file) else ""
        found, _, of = whole.partition("\n")
        if found not in ("", mine):
            raise UserError(
                f"{self.name}: {self.root.shown(self.folder)} has unfinished work of another "
                f"fingerprint with the same first digits ({found}); finish that first, or choose "
                "another `storage` for one of the two"
            )
        now = json.dumps(dict(self.generations), sort_keys=True)
        if of not in ("", now):
            again = "what it reads was made again since it was begun, and differs"
            if row_wise:
                say(f"{again}: begins again", important=True)
                self.begin_again()
                self.root.delete(self.scratch)  # last, as that is what tells that it is another
            else:
                say(f"WARNING: {again}: goes on from its checkpoint with that", important=True)
        if of != now:
            self.root.write(file, f"{mine}\n{now}".encode())

    def clear_dead(self) -> None:
        """Removes what attempts that died have left half-written; for whoever holds the lease,
        before anybody works."""
        self.root.delete_all(
            f"{self.folder}/{path}"
            for path in self.root.names(self.folder)
            if half_written(path.rpartition("/")[2])
        )


def works_of(
    nodes: Sequence[Node],
    storage: str,
    folders: Mapping[str, str],
    pools: Mapping[str, PoolSettings] = MappingProxyType({}),
) -> dict[str, NodeWork]:
    """The work of each node, by name.

    Args:
        folders: of all nodes' artifacts, by node.
    """
    return {
        node.name: NodeWork(
            node,
            storage,
            folders[node.name],
            {own: folders[name] for own, name in node.inputs.items()},
            pools=dict(pools),  # a proxy cannot travel
        )
        for node in nodes
    }


def begun(works: Sequence[NodeWork]) -> list[NodeWork]:
    """Works that read their inputs as they are now, in all their processes, also those that come
    late and find that something has been made again (`--force`)."""

    @cache  # works that are begun together mostly read the same
    def current(storage: str, folder: str) -> tuple[str, str]:
        return ArtifactStore(storage).current(folder)

    found = []
    for work in works:
        now = {name: current(work.storage, folder) for name, folder in work.inputs.items()}
        folders = {name: folder for name, (folder, _) in now.items()}
        generations = {name: generation for name, (_, generation) in now.items()}
        found.append(replace(work, inputs=folders, generations=generations))
    return found
