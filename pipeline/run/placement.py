"""Which machines make a stage, what one process takes there, and how many of them fit at once."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.run.pools import PoolSettings, ProcessSettings
from pipeline.run.work import NodeWork
from stages.contract import Stage, Workers
from stages.errors import UserError

# As many processes as fit where they take nothing.
MANY = 10**6


@dataclass(frozen=True)
class Place:
    """What one process takes, the labels of the machines it may run on, and how many fit."""

    cpus: float
    gpus: float
    labels: dict[str, str]
    slots: int


@dataclass(frozen=True)
class Machines:
    """Machines that may make a stage: cores and GPUs of each, those to be started included."""

    where: str
    sizes: list[tuple[float, float]]
    labels: dict[str, str]
    process: ProcessSettings

    @property
    def has_gpus(self) -> bool:
        return any(gpus for _, gpus in self.sizes)

    def fitting(self, cpus: float, gpus: float) -> int:
        """How many processes of that size fit at once."""

        def times(has: float, takes: float) -> int:
            return int(has / takes + 1e-9) if takes else MANY  # 1e-9: ten times 0.1

        return sum(min(times(cores, cpus), times(own, gpus)) for cores, own in self.sizes)

    def __str__(self) -> str:
        cores, gpus = (sum(size[place] for size in self.sizes) for place in (0, 1))
        return f"{self.where} ({len(self.sizes)} machines: {cores:g} cores, {gpus:g} GPUs)"


def place(stage: Stage, name: str, pools: Mapping[str, PoolSettings]) -> Place:
    """Where the processes of a node run.

    Args:
        name: the node's, for messages.

    Raises:
        UserError: not one process can ever run there.
    """
    resources = stage.resources()
    machines = machines_for(stage, name, pools)
    if resources.workers is not None:
        return _training_place(resources.workers, name, machines)
    wants_gpu = resources.gpu and machines.has_gpus
    process = machines.process
    cpus = process.cpus or resources.cpus
    gpus = process.gpus if process.gpus is not None else float(wants_gpu)
    slots = machines.fitting(cpus, gpus)
    if slots < 1:
        raise UserError(
            f"{name}: a process with {cpus:g} core(s) and {gpus:g} GPU(s) fits on no machine of "
            f"{machines}; give it less under `pools`, or add machines"
        )
    return Place(cpus, gpus, machines.labels, slots)


def _training_place(workers: Workers, name: str, machines: Machines) -> Place:
    process, count = machines.process, workers.count
    gpus = process.gpus if process.gpus is not None else workers.gpus
    if gpus is None:
        gpus = float(sum(has for _, has in machines.sizes) >= count)
    sizes = [int(cores) for cores, _ in machines.sizes]
    cpus = process.cpus or workers.cpus or max(1, min(max(sizes), sum(sizes) // count))
    if not (process.cpus or workers.cpus):
        while cpus > 1 and machines.fitting(cpus, 0) < count:  # workers do not span machines
            cpus -= 1
    slots = machines.fitting(cpus, gpus)
    if slots < count:
        raise UserError(
            f"{name}: {count} worker(s) with {cpus:g} core(s) and {gpus:g} GPU(s) each do not fit "
            f"into {machines}; lower train.num_workers, cpus_per_worker or gpus_per_worker"
        )
    return Place(cpus, gpus, machines.labels, slots)


def machines_for(stage: Stage, name: str, pools: Mapping[str, PoolSettings]) -> Machines:
    """Those that are there now, and those that an autoscaler may start; arguments as `place`.

    Raises:
        UserError: there is none.
    """
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    for title, pool in pools.items():
        if stage.kind not in pool.stages:
            continue
        labels = pool.node_labels(title)
        alive = [node for node in alive if labels.items() <= (node.get("Labels") or {}).items()]
        fewest, most = pool.nodes
        to_start = max(0, most - len(alive)) if fewest < most else 0
        sizes = [_size(node) for node in alive] + [(pool.cpus, pool.gpus)] * to_start
        if not sizes:
            shown = ",".join(f"{key}={value}" for key, value in labels.items())
            raise UserError(
                f"{name}: its pool '{title}' has no machine: none carries the labels {shown}; "
                f"start some with `ray start --labels={shown}`, or take '{stage.kind}' out of it"
            )
        return Machines(f"pool '{title}'", sizes, labels, pool.stages[stage.kind])
    return Machines("this cluster", [_size(node) for node in alive], {}, ProcessSettings())


def _size(node: Mapping[str, Mapping[str, float]]) -> tuple[float, float]:
    return node["Resources"].get("CPU", 0.0), node["Resources"].get("GPU", 0.0)


def place_of(work: NodeWork) -> Place:
    """Where the work's processes run.

    Raises:
        UserError: not one can, and not one could when the run began.
    """
    try:
        return place(work.node.stage, work.name, work.pools)
    except UserError:
        if work.at_start is None:
            raise
        return work.at_start


def room_for(work: NodeWork, where: Place) -> int:
    """How many processes of that size fit on the machines that are there, or may be started."""
    try:
        return machines_for(work.node.stage, work.name, work.pools).fitting(where.cpus, where.gpus)
    except UserError:  # its pool has none
        return 0


def use_assigned_cores() -> None:
    """As many torch threads as Ray gave this process cores, and no GPU that it did not give."""
    import ray

    if not ray.get_gpu_ids():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # read when torch first asks for a GPU
    import torch

    torch.set_num_threads(max(1, int(assigned_cores())))


def assigned_cores() -> float:
    """Cores that Ray gave this process."""
    import ray

    return float(ray.get_runtime_context().get_assigned_resources().get("CPU", 1))
