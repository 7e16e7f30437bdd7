"""Where nodes run on Ray: row-wise ones in Ray Data's actor pools over shard numbers, trainings of
several workers under Ray Train, everything else in Ray tasks.

Nothing home-made schedules, retries or moves data. What is ours is the ledger of shards and the
checkpoints, so a worker that dies costs its open shard, or the steps since its last checkpoint.
"""

import errno
import os
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.run.board import LEAVING, begin, poster, stop_of, tell_stumbles, wait_until_told
from pipeline.run.losses import LOST, too_many
from pipeline.run.meter import Meter
from pipeline.run.placement import (
    Place,
    assigned_cores,
    place_of,
    room_for,
    use_assigned_cores,
)
from pipeline.run.progress import NodeProgress
from pipeline.run.rows import make_rows
from pipeline.run.work import NodeWork
from pipeline.store.copies import used_meanwhile
from stages.contract import RowWise, Say, Workers
from stages.errors import Stopped, StorageSilent, UserError
from stages.plugins import plugin_version

# How often a training's driver looks whether its workers have room; Ray takes up to half a minute
# to notice that a machine is gone.
SECONDS_BETWEEN_LOOKS_FOR_ROOM = 10.0


def make_nodes(
    works: Sequence[NodeWork], board: Any, progress: Callable[[str], NodeProgress]
) -> None:
    """Makes nodes that share what they load (mostly: one node); returns when all are published.

    Args:
        progress: for a node's name, what takes progress in the driver.

    Raises:
        UserError: as the stage raised it, without Ray's wrapping.
    """
    first = works[0]
    stage, resources = first.node.stage, first.node.stage.resources()
    secrets = {name: _secret(name, first.name) for name in resources.secrets}
    works = [replace(work, secrets=secrets) for work in works]
    if isinstance(stage, RowWise):
        for work in works:
            with _watched_room(work, 1, progress(work.name)):
                make_rows(work, stage, progress(work.name), board)
            stage.finish(replace(work, tell=progress(work.name)))
    elif resources.in_driver:
        _make_here([replace(work, tell=progress(work.name)) for work in works])
    elif resources.workers is not None:
        for work in works:
            make_on_workers(work, resources.workers, board, _make_alone, progress(work.name))
    else:

        def make() -> None:
            with _watched_room(first, 1, progress(first.name)):
                _task(_make_there, _options(first, place_of(first)), works, board)

        _also_elsewhere(make, first.name, board, progress(first.name))


def _secret(variable: str, node: str) -> str:
    if variable not in os.environ:
        raise UserError(f"{node}: the environment variable {variable} is not set")
    return os.environ[variable]


def check_plugins(plugins: Sequence[str]) -> None:
    """Looks for plug-ins on every machine of the cluster.

    Raises:
        UserError: a machine lacks one that the driver has, or has another version.
    """
    if not plugins:
        return
    wanted = {name: plugin_version(name) for name in plugins}
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    look = ray.remote(num_cpus=0)(_plugin_versions)
    asked = [
        look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
            list(plugins)
        )
        for node in nodes
    ]
    for node, found in zip(nodes, ray.get(asked), strict=True):
        for name, version in wanted.items():
            if found[name] != version:
                has = f"has {found[name]}" if found[name] else "lacks it"
                raise UserError(
                    f"plugins: '{name}' {version} is installed here, but machine {node[:8]} of the "
                    f"cluster {has}; install the same version everywhere"
                )


def _plugin_versions(plugins: Sequence[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in plugins:
        try:
            found[name] = plugin_version(name)
        except UserError:
            found[name] = None
    return found


def _make_here(
    works: Sequence[NodeWork], turn_to: Callable[[NodeWork], object] = lambda work: None
) -> None:
    """Makes nodes in turn; one that fails keeps no other from being made.

    Args:
        turn_to: is told which one is made now.

    Raises:
        Exception: the first failure, with the others as notes (`NAME: reason`).
    """
    loaded, errors = works[0].node.stage.load(works[0]), list[Exception]()
    for work in works:
        turn_to(work)
        try:
            work.node.stage.make(work, loaded)
        except (Stopped, StorageSilent):  # which are no fault of this node
            raise
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # they hold what it computed with
            errors.append(error)
            if len(errors) > 1:
                errors[0].add_note(f"{work.name}: {type(error).__name__}: {error}")
    if errors:
        raise errors[0]


def _make_there(works: Sequence[NodeWork], board: Any) -> None:
    use_assigned_cores()
    with used_meanwhile():  # the process goes on to other nodes
        meter = Meter(assigned_cores())  # of nodes made in turn: each gets what it took
        connected = [_connected(work, board, meter) for work in works]
        _make_here(connected, lambda work: tell_stumbles(work.name, board))
    wait_until_told(board)


def _connected(work: NodeWork, board: Any, meter: Meter) -> NodeWork:
    """The work in a worker's process: it tells the board that it is there, and hears from it.

    Raises:
        Stopped: all have been asked to end.
    """
    begin(work.name, board)
    tell_stumbles(work.name, board)  # while what they share is loaded, of the last
    return replace(
        work,
        tell=poster(work.name, board),
        stopping=stop_of(board),
        is_ours=work.watched(),
        meter=meter,
    )


def _make_alone(work: NodeWork) -> None:
    _make_here([work])


def _options(work: NodeWork, where: Place) -> dict[str, Any]:
    """Options of a Ray task that makes a node."""
    return {
        "num_cpus": where.cpus,
        "num_gpus": where.gpus,
        "label_selector": where.labels,
        "max_retries": work.node.retries,
    }


def _task(
    function: Callable[..., None], options: dict[str, Any], works: Sequence[NodeWork], *more: Any
) -> None:
    remote = ray.remote(**options)(function)
    try:
        ray.get(remote.remote(works, *more))
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, UserError):
            raise cause from None
        if isinstance(cause, OSError) and cause.errno == errno.ENOSPC:
            raise UserError(
                f"{works[0].name}: the disk of the temporary folder is full. Free some space or "
                "set TMPDIR to a larger place, and run again to continue."
            ) from None
        raise
    except LOST as error:
        raise too_many(works[0].name, error) from error


def make_on_workers(
    work: NodeWork, workers: Workers, board: Any, make: Callable[[NodeWork], None], say: Say
) -> None:
    """Runs `make` on every training worker; grouped ones find each other through Ray Train.

    When machines leave with notice, or are lost, it goes on from the checkpoint; where there is no
    room without them, it waits for others and says so.

    Raises:
        Stopped: the board asked for it.
    """
    where = place_of(work)

    def make_once() -> None:
        with _watched_room(work, workers.count, say):
            if workers.grouped:
                with tempfile.TemporaryDirectory(prefix="sentray-train-") as scratch:
                    _group(work, where, workers, board, make, scratch)
            else:
                _task(_make_there, _options(work, where), [work], board)

    _also_elsewhere(make_once, work.name, board, say)


def _also_elsewhere(make: Callable[[], None], node: str, board: Any, say: Say) -> None:
    """Makes it again, from what is finished, when it stopped since its machine leaves."""
    while True:
        try:
            return make()
        except Stopped:
            if ray.get(board.asked_to_stop.remote()):
                raise
            ray.get(board.forget.remote(node))
            say(LEAVING, important=True)


@contextmanager
def _watched_room(work: NodeWork, num_workers: int, say: Say) -> Iterator[None]:
    """Says it when so many workers do not fit on the machines that are there: Ray waits without a
    word, for as long as it takes."""
    over, where = threading.Event(), place_of(work)
    fewer = "; with fewer, too: end this run and start it again with another train.num_workers"

    def watch() -> None:
        told = False
        while not over.wait(SECONDS_BETWEEN_LOOKS_FOR_ROOM):
            try:
                room = room_for(work, where)
            except ray.exceptions.RayError:  # Ray itself is gone, which the training notices too
                return
            if room >= num_workers:
                told = False
            elif not told:
                told = True
                say(
                    f"waits for machines: there is room for {room} of {num_workers} workers of "
                    f"{where.cpus:g} core(s) and {where.gpus:g} GPU(s); it goes on from what is "
                    f"finished{fewer if num_workers > 1 else ''}",
                    important=True,
                )

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()


def _group(
    work: NodeWork,
    where: Place,
    workers: Workers,
    board: Any,
    make: Callable[[NodeWork], None],
    scratch: str,
) -> None:
    """Under Ray Train. Its own record of the run is `scratch`, on this machine as its controller
    is, and read by nobody else; checkpoints are ours (stages/train/checkpoint.py)."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchConfig, TorchTrainer

    cores, gpus = max(1, int(where.cpus)), where.gpus  # of threads: a share of a core may be asked
    trainer = TorchTrainer(
        _make_in_group,
        train_loop_config={
            "work": work,
            "board": board,
            "make": make,
            "cores": cores,
            "workers": workers.count,
        },
        torch_config=TorchConfig(backend="nccl" if gpus else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=workers.count,
            use_gpu=gpus > 0,
            resources_per_worker={"CPU": where.cpus} | ({"GPU": gpus} if gpus else {}),
            label_selector=where.labels or None,  # type: ignore[call-arg]  # of Train's version 2
        ),
        run_config=RunConfig(
            name="train",
            storage_path=scratch,
            failure_config=FailureConfig(max_failures=work.node.retries),
        ),
    )
    try:
        trainer.fit()
    except TrainingFailedError as failed:
        if ray.get(board.error.remote(work.name)) is None:
            for one in getattr(failed, "worker_failures", {}).values():
                if isinstance(one, LOST):  # what others say then comes of it
                    raise too_many(work.name, one) from failed
            raise
    error = ray.get(board.error.remote(work.name))
    if error is not None:
        raise error


def _make_in_group(config: dict[str, Any]) -> None:
    import torch

    work, board = config["work"], config["board"]
    if ray.get(board.error.remote(work.name)) is not None:
        return  # a restart cannot mend what the user must: the driver raises it
    if not ray.get_gpu_ids():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(config["cores"])
    try:
        meter = Meter(config["cores"], processes=config["workers"])
        config["make"](_connected(work, board, meter))
        wait_until_told(board)
    except UserError as error:
        ray.get(board.post_error.remote(work.name, error))
        if not isinstance(error, Stopped):  # all workers stop together, nothing has failed
            raise  # so that Ray Train ends the other workers, which may wait for this one
