"""KubeRay: one run (RayJob), a run on a schedule (RayCronJob), a cluster that stays (RayCluster).

A RayJob and a RayCronJob bring their own machines, which are gone when the run has ended. The
recipe goes along as a ConfigMap, which is mounted read-only on all machines. It is immutable and
named by its content, so a run never sees the recipe change.

KubeRay puts the entrypoint through two shells, so it holds nothing of anybody's: arguments are in
the package (cluster/start.py).
"""

import base64
import hashlib
from importlib import metadata
from typing import Any

from cluster.manifests.folder import Manifests, as_documents
from cluster.manifests.names import check_labels, kubernetes_name, node_labels
from cluster.manifests.pods import PACKAGE, SCRATCH, SECURITY, Pods
from cluster.manifests.settings import KubeRaySettings, RedisSettings
from cluster.package import Package
from cluster.settings import ClusterSettings
from stages.errors import UserError

# What Kubernetes takes as one ConfigMap.
LARGEST_BYTES = 1024 * 1024
# A run that is started again goes on where it stopped.
RETRIES = 3
# How long the machines of a run that has ended stay, for who wants to look at their logs.
KEEP_SECONDS = 600
# How long a machine is idle before the autoscaler gives it back.
IDLE_SECONDS = 300


def kuberay(
    package: Package, cluster: ClusterSettings, settings: KubeRaySettings, cluster_name: str
) -> Manifests:
    """The manifests of a recipe, and of the cluster itself.

    Args:
        package: without Sentray, which the image has.
        cluster_name: of the cluster that stays.

    Raises:
        UserError: what Kubernetes does not take (a name, a label, a size), or a setting that is
            missing.
    """
    name = kubernetes_name(
        package.name, "name:", "give the recipe another, as in --set name=my-recipe"
    )
    stays = kubernetes_name(cluster_name, "the cluster", "rename its file")
    recipe, volume = _config_map(package, name, settings.namespace)
    job = {
        # as `sentray submit` writes it down; values meet a shell too, and need no quoting
        "metadata": {
            "sentray": package.arguments[0], "recipe": package.name, "user": "kubernetes",
        },
        "entrypoint": f"python {PACKAGE}/start.py",
        "submissionMode": "K8sJobMode",
        "backoffLimit": RETRIES,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": KEEP_SECONDS,
        "rayClusterSpec": _cluster_spec(cluster, settings, Pods(cluster, settings, volume)),
        "submitterPodTemplate": Pods(cluster, settings).submitter(),
    }  # fmt: skip
    found = Manifests()

    def add(file: str, kind: str, called: str, spec: dict[str, Any], about: str) -> None:
        about_it = _metadata(called, settings.namespace)
        document = {"apiVersion": "ray.io/v1", "kind": kind, "metadata": about_it, "spec": spec}
        found.add(file, as_documents(document), f"{kind} {called}: {about}")

    found.add("recipe.yaml", as_documents(recipe), f"ConfigMap {recipe['metadata']['name']}")
    add("job.yaml", "RayJob", name, job, "one run")
    if settings.schedule is not None:
        cron: dict[str, Any] = {"schedule": settings.schedule, "jobTemplate": job}
        if settings.time_zone is not None:
            cron["timeZone"] = settings.time_zone
        add("cron.yaml", "RayCronJob", name, cron, f"a run at {settings.schedule}")
    spec = _cluster_spec(cluster, settings, Pods(cluster, settings))
    if settings.redis is not None:
        # a run's own cluster does without: its command is on the head, and ends with it
        spec["gcsFaultToleranceOptions"] = _fault_tolerance(settings.redis)
    add("cluster.yaml", "RayCluster", stays, spec, "a cluster that stays")
    found.steps = _steps(settings, name, stays)
    return found


def _steps(settings: KubeRaySettings, name: str, stays: str) -> list[tuple[str, str]]:
    space = f"--namespace {settings.namespace}"
    apply = "kubectl apply --server-side --filename {folder}"
    steps = []
    if settings.secrets:
        why = "Once, each from a file of NAME=VALUE lines that is in no repository"
        commands = [
            f"kubectl create secret generic {secret} {space} --from-env-file FILE  "
            f"# {', '.join(names)}"
            for secret, names in settings.secrets.items()
        ]
        steps.append((why, "\n".join(commands)))
    steps.append(
        (
            "Run it now, follow it, end it (also before it is run again)",
            f"{apply}/recipe.yaml --filename {{folder}}/job.yaml\n"
            f"kubectl logs {space} --follow --selector job-name={name}\n"
            f"kubectl delete {space} rayjob/{name}",
        )
    )
    if settings.schedule is not None:
        why = f"Run it at {settings.schedule}"
        steps.append((why, f"{apply}/recipe.yaml --filename {{folder}}/cron.yaml"))
    steps.append(
        (
            "Or a cluster that stays, and gets its runs by `sentray submit`",
            f"{apply}/cluster.yaml\n"
            f"export RAY_AUTH_TOKEN=$(kubectl get secret {settings.token_secret or stays} {space} "
            "--output jsonpath={.data.auth_token} | base64 --decode)\n"
            f"kubectl port-forward {space} service/{stays}-head-svc 8265  # in another terminal",
        )
    )
    return steps


def _metadata(name: str, namespace: str) -> dict[str, Any]:
    labels = {"app.kubernetes.io/part-of": "sentray"}
    return {"name": name, "namespace": namespace, "labels": labels}


def _config_map(
    package: Package, name: str, namespace: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The package as a ConfigMap, and the volume that puts its files in their places."""
    contents = package.contents()
    size = sum(len(place) + len(content) for place, content in contents.items())
    if size > LARGEST_BYTES:
        largest = sorted(contents, key=lambda place: -len(contents[place]))[:3]
        raise UserError(
            f"the recipe and what it names have {size / 1e6:,.1f} MB, and a ConfigMap takes "
            f"{LARGEST_BYTES / 1e6:,.1f} MB: "
            + ", ".join(f"{place} {len(contents[place]) / 1e6:,.1f} MB" for place in largest)
            + ". Put large files on a volume (manifest.kuberay.volumes) and name that path; if it "
            "is the same here, list its folder under `shared` in the cluster's file, else name it "
            "by one of the cluster's `variables`"
        )
    data: dict[str, str] = {}
    binary: dict[str, str] = {}
    items = []
    for number, (place, content) in enumerate(contents.items()):
        key = str(number)  # places have characters that keys may not have
        items.append({"key": key, "path": place})
        try:
            data[key] = content.decode()
        except UnicodeDecodeError:
            binary[key] = base64.b64encode(content).decode()
    digest = hashlib.sha256(repr(sorted(contents.items())).encode()).hexdigest()[:8]
    found: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(f"{name}-{digest}", namespace),
        "immutable": True,
        "data": data,
    }
    if binary:
        found["binaryData"] = binary
    return found, {"configMap": {"name": f"{name}-{digest}", "items": items}}


def _cluster_spec(
    cluster: ClusterSettings, settings: KubeRaySettings, pods: Pods
) -> dict[str, Any]:
    autoscaled = any(fewest < most for fewest, most in (p.nodes for p in cluster.pools.values()))
    token: dict[str, Any] = {"mode": "token"}
    if settings.token_secret is not None:
        token["secretName"] = settings.token_secret
    spec: dict[str, Any] = {
        "rayVersion": metadata.version("ray"),
        "authOptions": token,
        "headGroupSpec": {
            # no stage runs on the head, so none can starve the command that is there
            "rayStartParams": {"dashboard-host": "0.0.0.0", "num-cpus": "0"},
            "template": pods.head(autoscaled),
        },
        "workerGroupSpecs": _groups(cluster, settings, pods),
    }
    if autoscaled:
        spec["enableInTreeAutoscaling"] = True
        spec["autoscalerOptions"] = {
            "version": "v2",
            "idleTimeoutSeconds": IDLE_SECONDS,
            "resources": {
                "requests": {"cpu": "500m", "memory": "1G"},
                "limits": {"cpu": "500m", "memory": "1G"},
            },
            "securityContext": SECURITY,
            "env": [{"name": "HOME", "value": "/tmp"}],
            "volumeMounts": [SCRATCH],
        }
    if settings.tls:
        spec["tlsOptions"] = {"enabled": True}
    if settings.network_policy:
        spec["networkPolicy"] = {"mode": "DenyAllIngress"}
    return spec


def _groups(
    cluster: ClusterSettings, settings: KubeRaySettings, pods: Pods
) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = []
    for name, selector in settings.node_selectors.items():
        if name not in cluster.pools:
            raise UserError(
                f"manifest.kuberay.node_selectors: there is no pool '{name}'; there are "
                f"{', '.join(cluster.pools)}"
            )
        check_labels(selector, f"manifest.kuberay.node_selectors.{name}")
    for name, pool in cluster.pools.items():
        group = kubernetes_name(name, "pools:", "rename the pool")
        if group in [other["groupName"] for other in groups]:
            raise UserError(f"pools: two of them are '{group}' in Kubernetes; rename one")
        fewest, most = pool.nodes
        groups.append(
            {
                "groupName": group,
                "replicas": fewest,
                "minReplicas": fewest,
                "maxReplicas": most,
                "labels": node_labels(name, pool),
                "rayStartParams": {},
                "template": pods.worker(name, pool),
            }
        )
    return groups


def _fault_tolerance(redis: RedisSettings) -> dict[str, Any]:
    found: dict[str, Any] = {"redisAddress": redis.address}
    if redis.secret is not None:
        secret = {"name": redis.secret, "key": "password"}
        found["redisPassword"] = {"valueFrom": {"secretKeyRef": secret}}
    return found
