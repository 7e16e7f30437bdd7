"""What a trial reserves on the cluster, and how many trials run at once."""

from collections.abc import Callable

import ray

from pipeline.run.hosts import placement
from pipeline.run.work import NodeWork
from stages.contract import Workers
from stages.errors import UserError
from tune.settings import SearchSettings


def trial_resources(
    settings: SearchSettings, work: NodeWork, out: Callable[[str], None]
) -> tuple[dict[str, float], int]:
    """What Tune reserves for a trial, and how many trials run at once: as many as fit, or fewer.

    Raises:
        UserError: not one trial fits into this cluster.
    """
    workers = work.node.stage.resources().workers
    assert workers is not None
    if workers.grouped:
        resources, fits = _grouped(workers, work.name)
    else:
        resources, fits = _one_device(settings, workers)
    asked = settings.concurrency
    if asked is not None and asked > fits:
        out(f"warning: search.concurrency is {asked}, but only {fits} trials fit; {fits} at once")
    return resources, min(asked or fits, fits)


def _grouped(workers: Workers, name: str) -> tuple[dict[str, float], int]:
    """A trial with several workers reserves nothing itself: its workers' cores are taken all at
    once, or not at all, by Ray Train, so trials cannot wait for each other for ever."""
    have = ray.cluster_resources()
    cores, gpus = placement(workers, name)
    fits = int(have["CPU"] // (cores * workers.count))
    if gpus:
        fits = min(fits, int(have["GPU"] // (gpus * workers.count)))
    # one byte of memory, since Tune takes no trial that needs nothing
    return {"CPU": 0, "memory": 1}, max(1, fits)


def _one_device(settings: SearchSettings, workers: Workers) -> tuple[dict[str, float], int]:
    num_gpus = ray.cluster_resources().get("GPU", 0)
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cores = settings.cpus_per_trial or workers.cpus or 1
    share = settings.gpus_per_trial
    if share is None:
        share = float(workers.gpus or 0) or (1.0 if num_gpus else 0.0)
    fits = sum(
        int(min(node.get("CPU", 0) / cores, node.get("GPU", 0) / share + 1e-9 if share else 1e9))
        for node in alive
    )
    if fits < 1:
        most = max(node.get("CPU", 0) for node in alive)
        raise UserError(
            f"search: a trial with {cores} core(s) and {share:g} GPU(s) fits on no machine of this "
            f"cluster (the largest has {most:g} cores; {num_gpus:g} GPUs in all); lower "
            "search.cpus_per_trial or gpus_per_trial"
        )
    return {"CPU": cores, "GPU": share}, fits
