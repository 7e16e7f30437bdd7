"""Ray's own launcher: machines of a cloud by `ray up`, more or fewer of them by its autoscaler.

The recipe gets there by `sentray submit`, through the tunnel that `ray dashboard` opens. Ray's
token is the file ~/.ray/auth_token of whoever calls `ray up`; the machines get a copy of it.
"""

import shlex
from typing import Any

from cluster.manifests.folder import Manifests, as_documents
from cluster.manifests.names import kubernetes_name, node_labels
from cluster.manifests.settings import RayUpSettings
from cluster.settings import ClusterSettings
from stages.errors import UserError

HEAD = "head"
IDLE_MINUTES = 5
TOKEN_FILE = "~/.ray/auth_token"


def ray_up(
    cluster: ClusterSettings, settings: RayUpSettings, cluster_name: str, submit: list[str]
) -> Manifests:
    """The autoscaler's file.

    Args:
        submit: words of the command that submits the recipe.

    Raises:
        UserError: pools and `manifest.ray_up.machines` do not name the same.
    """
    if HEAD in cluster.pools:
        raise UserError(f"pools.{HEAD}: Ray's head is called that; rename the pool")
    if set(settings.machines) != set(cluster.pools):
        raise UserError(
            "manifest.ray_up.machines: names "
            f"{', '.join(settings.machines) or 'nothing'}, and the pools are "
            f"{', '.join(cluster.pools)}; give the machines of each pool"
        )
    kinds: dict[str, Any] = {
        HEAD: {"resources": {"CPU": 0}, "node_config": settings.head, "max_workers": 0}
    }
    for name, pool in cluster.pools.items():
        fewest, most = pool.nodes
        kinds[name] = {
            "resources": {"CPU": pool.cpus} | ({"GPU": pool.gpus} if pool.gpus else {}),
            "labels": node_labels(name, pool),
            "min_workers": fewest,
            "max_workers": most,
            "node_config": settings.machines[name],
        }
    variables = {
        "RAY_AUTH_MODE": "token",
        "RAY_JOB_STOP_WAIT_TIME_S": str(cluster.stop_seconds),
    }
    start = "ulimit -n 65536; export " + " ".join(
        f"{name}={shlex.quote(value)}" for name, value in variables.items()
    )
    document: dict[str, Any] = {
        "cluster_name": kubernetes_name(cluster_name, "the cluster", "rename its file"),
        "max_workers": sum(pool.nodes[1] for pool in cluster.pools.values()),
        "idle_timeout_minutes": IDLE_MINUTES,
        "provider": settings.provider,
        "auth": settings.auth.model_dump(exclude_none=True),
        "file_mounts": {TOKEN_FILE: TOKEN_FILE},
        "setup_commands": settings.setup,
        "available_node_types": kinds,
        "head_node_type": HEAD,
        "head_start_ray_commands": [
            "ray stop",
            f"{start}; ray start --head --port=6379 --dashboard-host=127.0.0.1 "
            "--autoscaling-config=~/ray_bootstrap_config.yaml",
        ],
        "worker_start_ray_commands": [
            "ray stop",
            f"{start}; ray start --address=$RAY_HEAD_IP:6379",
        ],
    }
    if settings.image is not None:
        document["docker"] = {"image": settings.image, "container_name": "sentray"}
    found = Manifests()
    found.add("ray-up.yaml", as_documents(document), "Ray's autoscaler file")
    found.steps = [
        ("Once: the token that lets you in", "ray get-auth-token --generate"),
        (
            "Start the machines; the second command goes on in another terminal",
            "ray up {folder}/ray-up.yaml\nray dashboard {folder}/ray-up.yaml",
        ),
        (f"Run it ({cluster.address or 'address: http://localhost:8265'})", shlex.join(submit)),
        ("End the machines", "ray down {folder}/ray-up.yaml"),
    ]
    return found
