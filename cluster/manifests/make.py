"""From the command line to the files of one place."""

import argparse
from collections.abc import Callable
from pathlib import Path

from cluster.manifests.cron import checked_schedule
from cluster.manifests.folder import Manifests
from cluster.manifests.kuberay import RETRIES, kuberay
from cluster.manifests.ray_up import ray_up
from cluster.manifests.settings import KubeRaySettings, RayUpSettings, SlurmSettings
from cluster.manifests.slurm import slurm
from cluster.package import pack
from cluster.settings import ClusterSettings, load_cluster
from stages.errors import UserError


def make_manifests(
    given: argparse.Namespace, chosen: list[str], out: Callable[[str], None]
) -> tuple[str, Manifests]:
    """The recipe's name, and what was made of it.

    Args:
        given: recipe, what, set, cluster, place, schedule. chosen: options of `run`.
        out: is told what is taken to be on the cluster.

    Raises:
        UserError: anything wrong in recipe or cluster, or what that place cannot do.
    """
    cluster = _with_schedule(load_cluster(given.cluster), given)
    section = given.place.replace("-", "_")
    settings: KubeRaySettings | SlurmSettings | RayUpSettings | None = getattr(
        cluster.manifest, section
    )
    if settings is None:
        raise UserError(
            f"cluster {given.cluster}: there is no section `manifest.{section}` in its file; "
            "docs/cluster.md has one to copy"
        )
    if not cluster.pools:
        raise UserError(
            f"cluster {given.cluster}: there are no `pools` in its file; name at least one kind of "
            "machine, as in `pools: {cpu: {cpus: 8, memory_gb: 32}}`"
        )
    again = [option for option in chosen if option.startswith(("--from=", "--force="))]
    if again and section == "slurm":
        raise UserError(
            f"manifest: {again[0]}: SLURM starts the same line again when its time is up, and each "
            "start would make that stage again from nothing. Leave it out, and make the stage "
            "again with `sentray run` or `sentray submit`"
        )
    if again and section == "kuberay":
        out(f"warning: each start after a failure, {RETRIES} at most, begins {again[0]} again")
    if section == "kuberay":  # a ConfigMap has no room for Sentray; the image has it
        cluster = cluster.model_copy(update={"sentray": "installed"})
    package = pack(given.what, given.recipe, given.set, chosen, cluster)
    for setting in package.elsewhere:
        out(f"on the cluster: {setting}")
    title = Path(given.cluster).stem
    if isinstance(settings, KubeRaySettings):
        return package.name, kuberay(package, cluster, settings, title)
    if isinstance(settings, SlurmSettings):
        return package.name, slurm(package, cluster, settings)
    submit = ["sentray", "submit", given.recipe, "--cluster", given.cluster, given.what, *chosen]
    submit += [f"--set={override}" for override in given.set]
    return package.name, ray_up(cluster, settings, title, submit)


def _with_schedule(cluster: ClusterSettings, given: argparse.Namespace) -> ClusterSettings:
    """The cluster with the schedule of the command line, where there is one."""
    if given.schedule is None:
        return cluster
    if given.place != "kuberay" or cluster.manifest.kuberay is None:
        raise UserError(
            "--schedule goes with `--for kuberay`; elsewhere a cron job may call `sbatch` or "
            "`sentray submit`"
        )
    try:
        schedule = checked_schedule(given.schedule)
    except ValueError as error:
        raise UserError(f"--schedule {error}") from None
    changed = cluster.manifest.kuberay.model_copy(update={"schedule": schedule})
    manifest = cluster.manifest.model_copy(update={"kuberay": changed})
    return cluster.model_copy(update={"manifest": manifest})
