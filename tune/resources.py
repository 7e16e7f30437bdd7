"""What a trial reserves on the cluster, and how many trials run at once."""

from collections.abc import Callable
from dataclasses import dataclass

from pipeline.run.placement import machines_for, place
from pipeline.run.work import NodeWork
from stages.contract import Workers
from stages.errors import UserError
from tune.settings import SearchSettings


@dataclass(frozen=True)
class Reservation:
    """What Tune reserves for a trial, on machines with these labels; how many run at once."""

    resources: dict[str, float]
    labels: dict[str, str]
    at_once: int


def trial_resources(
    settings: SearchSettings, work: NodeWork, out: Callable[[str], None]
) -> Reservation:
    """As many trials run at once as fit, or fewer.

    Raises:
        UserError: not one trial fits into this cluster.
    """
    workers = work.node.stage.resources().workers
    assert workers is not None
    if workers.grouped:
        # It reserves nothing itself: its workers' cores are taken all at once, or not at all, by
        # Ray Train, so trials cannot wait for each other for ever. One byte of memory, since Tune
        # takes no trial that needs nothing.
        fits = place(work.node.stage, work.name, work.pools).slots // workers.count
        found = Reservation({"CPU": 0, "memory": 1}, {}, fits)
    else:
        found = _one_device(settings, workers, work)
    asked, fits = settings.concurrency, found.at_once
    if asked is not None and asked > fits:
        out(f"warning: search.concurrency is {asked}, but only {fits} trials fit; {fits} at once")
    return Reservation(found.resources, found.labels, min(asked or fits, fits))


def _one_device(settings: SearchSettings, workers: Workers, work: NodeWork) -> Reservation:
    machines = machines_for(work.node.stage, work.name, work.pools)
    process = machines.process
    cores = settings.cpus_per_trial or process.cpus or workers.cpus or 1
    share = settings.gpus_per_trial if settings.gpus_per_trial is not None else process.gpus
    if share is None:
        share = float(machines.has_gpus if workers.gpus is None else workers.gpus)
    fits = machines.fitting(cores, share)
    if fits < 1:
        raise UserError(
            f"search: a trial with {cores:g} core(s) and {share:g} GPU(s) fits on no machine of "
            f"{machines}; lower search.cpus_per_trial or gpus_per_trial"
        )
    return Reservation({"CPU": cores, "GPU": share}, machines.labels, fits)
