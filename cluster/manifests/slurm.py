"""SLURM: a batch script that starts Ray on the nodes of its allocation, and the recipe on Ray.

`ray symmetric-run` starts Ray. Nodes are taken whole (--exclusive): it starts no second Ray on a
node, and `ray stop`, with which it ends, ends every Ray there. Ray's token is made for each start.

The package of the job lies beside the script, under a name from its content: a script that waits in
the queue finds what it was made with. What differs between scripts is at their beginning; the rest
is slurm.sh.
"""

import hashlib
import io
import math
import shlex
from pathlib import Path

from cluster.manifests.folder import MARK, Manifests
from cluster.manifests.names import node_labels
from cluster.manifests.settings import SlurmSettings
from cluster.package import Package
from cluster.settings import ClusterSettings
from stages.errors import UserError

# Between the end of a job's patience and the end of its time.
MORE_SECONDS = 60


def slurm(package: Package, cluster: ClusterSettings, settings: SlurmSettings) -> Manifests:
    """The script and the package of a recipe.

    Raises:
        UserError: the pools do not fit one script.
    """
    found = Manifests()
    content = io.BytesIO()
    package.write(content)
    name = f"package-{hashlib.sha256(content.getvalue()).hexdigest()[:8]}.zip"
    found.add("job.sh", _script(package, cluster, settings, name).encode(), "the batch script")
    found.add(name, content.getvalue(), f"{len(content.getvalue()) / 1e6:,.1f} MB, what it runs")
    found.steps.append(
        (
            "On a disk that all nodes share",
            "cd {folder}\nsbatch job.sh\n"
            "scancel --batch --signal=TERM JOB   # ends it; its work is put away first",
        )
    )
    return found


def _script(package: Package, cluster: ClusterSettings, settings: SlurmSettings, name: str) -> str:
    if len(cluster.pools) != 1:
        raise UserError(
            f"pools: {', '.join(cluster.pools)}: SLURM gives a script nodes of one kind; write a "
            "cluster's file for each kind, with one pool"
        )
    ((pool_name, pool),) = cluster.pools.items()
    fewest, most = pool.nodes
    fewest = max(fewest, 1)
    directives = [
        f"--job-name={package.name}",
        "--output=%x-%j.log",
        "--open-mode=append",
        f"--nodes={fewest}" if fewest == most else f"--nodes={fewest}-{most}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={pool.cpus}",
        "--exclusive",
        "--requeue",
        f"--signal=B:USR1@{cluster.stop_seconds + MORE_SECONDS}",
    ]
    options = [f"--num-cpus={pool.cpus}", f"--num-gpus={pool.gpus}"]
    if pool.gpus:
        directives.append(f"--gpus-per-node={pool.gpus}")
    if pool.memory_gb is not None:
        directives.append(f"--mem={math.floor(pool.memory_gb * 1e9 / 2**20)}M")
    for option, value in (
        ("partition", settings.partition), ("account", settings.account), ("time", settings.time),
    ):  # fmt: skip
        if value is not None:
            directives.append(f"--{option}={value}")
    labels = node_labels(pool_name, pool)
    options.append("--labels=" + ",".join(f"{key}={value}" for key, value in labels.items()))
    lines = [
        "#!/bin/bash",
        f"{MARK}; changes to it are lost the next time.",
        *(f"#SBATCH {directive}" for directive in directives),
        "# values are what they are written as, and traps call functions:",
        "# shellcheck disable=SC2016,SC2317",
        "set -eo pipefail",
        f"package='{name}'",
        f"venv={shlex.quote(settings.venv or '')}",
        f"modules=({shlex.join(settings.modules)})",
        f"passed=({shlex.join(cluster.pass_variables)})",
        f"ray_options=({shlex.join(options)})",
        "set_variables() {",
        "    :",
        *(f"    export {name}={shlex.quote(value)}" for name, value in cluster.variables.items()),
        "}",
    ]
    return "\n".join(lines) + "\n" + Path(__file__).with_name("slurm.sh").read_text()
