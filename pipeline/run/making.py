"""Nodes of a plan made within a Ray session: each once, whoever else is at work on the storage.

Every node is made under a lease (pipeline/store/leases.py). Where another run holds it, this one
waits, says for whom and how far that one is, and uses what it made, or takes over when it is gone.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from pipeline.plan.graph import Node, rows_root
from pipeline.plan.plan import Plan
from pipeline.run.log import RunLog
from pipeline.run.metrics import RunMetrics
from pipeline.run.placement import Place, place
from pipeline.run.pools import PoolSettings
from pipeline.run.progress import Progress
from pipeline.run.scheduler import run_ready
from pipeline.run.stopping import asked_by_signals
from pipeline.run.work import NodeWork, begun, works_of
from pipeline.store.copies import used_meanwhile
from pipeline.store.leases import Lease, Leases, run_lease
from stages.builtin import BUILTIN
from stages.errors import Stopped, StorageSilent
from stages.plugins import load_extensions


def make(
    plan: Plan,
    wanted: list[Node],
    again: set[str],
    out: Callable[[str], None],
    pools: Mapping[str, PoolSettings],
    record: str,
    log: RunLog,
) -> None:
    """Makes nodes of a plan, within a Ray session.

    Args:
        again: those that are forgotten first. pools: where stages run. record: folder of what is
            kept of the run, which names its lease.

    Raises:
        UserError: as the stages do, and for a node that can never be placed, before any is made.
    """
    import ray

    from pipeline.run.board import start_board
    from pipeline.run.hosts import check_plugins

    check_plugins(list(dict.fromkeys(p for one in plan.recipes.values() for p in one.plugins)))
    known = {stage.kind for stage in load_extensions(BUILTIN, plan.recipe.plugins).stages}
    for unknown in sorted({kind for pool in pools.values() for kind in pool.stages} - known):
        out(f"warning: pools: no stage is called '{unknown}'; there are {', '.join(sorted(known))}")
    places = {
        node.name: place(node.stage, node.name, pools)
        for node in wanted
        if not node.stage.resources().in_driver
    }
    board, asked = start_board(), threading.Event()
    with Leases(plan.store.root, out) as leases, asked_by_signals(asked, out):
        progress = Progress(out, log, RunMetrics(plan.recipe.name))
        leases.hold(run_lease(record), progress.said_last)
        making = _Making(plan, wanted, again, pools, places, board, progress, leases)

        def ask() -> set[str]:
            leases.stop_waiting()
            begun: set[str] = ray.get(board.stop.remote())
            return begun

        def failed(batch: list[Node], error: Exception) -> list[str]:
            unmade = [n.name for n in batch if not plan.store.is_made(plan.folders[n.name])]
            notes = getattr(error, "__notes__", [])
            for name in unmade:
                own = (note for note in notes if note.startswith(f"{name}: "))
                reason = next(own, f"{type(error).__name__}: {error}")
                progress.of(name).failed(reason.removeprefix(f"{name}: "))
            return unmade

        run_ready(wanted, making.make_batch, lambda: progress.relay(board), asked, ask, failed)


class _Making:
    def __init__(
        self,
        plan: Plan,
        wanted: list[Node],
        again: set[str],
        pools: Mapping[str, PoolSettings],
        places: Mapping[str, Place],
        board: Any,
        progress: Progress,
        leases: Leases,
    ) -> None:
        self._plan, self._again, self._pools, self._places = plan, set(again), pools, places
        self._board, self._progress, self._leases = board, progress, leases
        self._roots = {node.name: (node, rows_root(node, plan.graph)) for node in wanted}
        for root in {root for _, root in self._roots.values()} - self._roots.keys():
            self._check_rows(root)

    def make_batch(self, batch: list[Node]) -> None:
        """Makes nodes that share what they load, or waits until another run has.

        Storage that does not answer, however patient its users were, counts as a lost worker does:
        what is lacking is begun again, `train.max_failures` times.
        """
        failures, most = 0, max(node.retries for node in batch)
        while True:
            try:
                if self._attempt(batch):
                    break
            except StorageSilent as error:
                failures += 1
                if failures > most:
                    raise
                for node in batch:
                    text = f"{error} Begins again with what is lacking ({failures} of {most})."
                    self._progress.of(node.name)(text, important=True)
        for node in batch:
            if not node.inputs:
                self._check_rows(node.name)

    def _attempt(self, batch: list[Node]) -> bool:
        """Whether all are made; False: another run thought that this one was dead."""
        held: dict[str, Lease] = {}
        try:
            works = self._take(batch, held)
            if works:
                self._make(works)
        except Stopped:
            raise
        except Exception:
            if not any(self._leases.is_lost(lease) for lease in held.values()):
                raise
            return False  # the other one has cleared away what this one worked with
        finally:
            for lease in held.values():
                self._leases.release(lease)
        return True

    def _take(self, batch: list[Node], held: dict[str, Lease]) -> list[NodeWork]:
        """The nodes that are ours to make, once nobody else makes any of them.

        Args:
            held: gets their leases, by node.
        """
        plan, progress = self._plan, self._progress
        works = works_of(batch, plan.recipe.storage, plan.folders, self._pools)
        # all runs take them in one order, or two could wait for each other
        for name, work in sorted(works.items(), key=lambda one: one[1].lease):
            say, said = progress.of(name), partial(progress.said, name)
            twin = next((one for one in held if works[one].lease == work.lease), None)
            if twin is not None:  # as of a teacher that is named twice
                say(f"is the same as {twin}", important=True)
                continue
            lease = self._leases.take(work.lease, partial(self._is_made, work), say, said)
            if lease is None:
                made = work.store.open(work.folder).folder
                say(f"made by another run -> {made}", important=True)
            else:
                held[name] = lease
        return [
            replace(
                work,
                attempt=held[work.name].holder.id,
                stale_seconds=self._leases.stale_seconds,
                started=time.time(),
                at_start=self._places.get(work.name),
            )
            for work in begun([works[name] for name in works if name in held])
        ]

    def _is_made(self, work: NodeWork) -> bool:
        return work.name not in self._again and work.store.is_made(work.folder)

    def _make(self, works: list[NodeWork]) -> None:
        from pipeline.run.hosts import make_nodes

        progress = self._progress
        for work in works:
            progress.of(work.name).started()
            work.clear_dead()
            # not before: what goes wrong earlier must lose nothing
            if work.name in self._again or work.store.begun_again(work.folder):
                work.root.delete(work.scratch)
                work.begin_again()
                self._again.discard(work.name)  # whoever tries again goes on with it
            work.claim(progress.of(work.name))
        try:
            with used_meanwhile():
                make_nodes(works, self._board, progress.of)
        except (Stopped, StorageSilent):
            raise
        except Exception:  # of one of them: the others are made
            self._tell_made(works)
            raise
        self._tell_made(works)

    def _tell_made(self, works: list[NodeWork]) -> None:
        self._progress.relay(self._board)  # what its workers said last, before "done"
        for work in works:
            manifest = work.store.manifest(work.folder)
            if manifest is None or not work.store.is_made(work.folder):
                continue
            told = self._progress.of(work.name)
            if not work.node.stage.row_wise:  # else each shard was counted when it was made
                told.made(manifest.num_rows, len(manifest.shards), manifest.usage)
            told.done(time.time() - work.started, work.folder, manifest.usage)

    def _check_rows(self, root: str) -> None:
        """Looks at the number of rows that a node gave, for all nodes that read them."""
        manifest = self._plan.store.manifest(self._plan.folders[root])
        if manifest is None:  # gone; it was looked at when what these read was made of it
            return
        for node, its_root in self._roots.values():
            if its_root == root:
                node.stage.check_rows(manifest.num_rows)
