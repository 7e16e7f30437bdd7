"""Pods of a Ray cluster on Kubernetes: what their containers may, have, see and keep.

No root, no way to become it, a root file system that cannot be written: what is written goes to
/tmp, a volume of the pod. Memory is requested as it is limited, so a pod is not evicted for using
what it was promised. Secrets are references; Kubernetes fills them in.
"""

from pathlib import PurePosixPath
from typing import Any

from cluster.manifests.settings import KubeRaySettings
from cluster.settings import ClusterSettings
from pipeline.run.pools import PoolSettings
from pipeline.store.copies import LIMIT
from stages.errors import UserError

# User of the images in cluster/images.
USER = 1000
# Where a job's package is mounted.
PACKAGE = "/sentray"
# Share of the memory that Ray's object store may take as files; Ray itself takes 0.3.
SHARED_MEMORY = 0.4
# Between the end of a job's patience and the end of its pods.
MORE_SECONDS = 30

SECURITY = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "runAsUser": USER,
    "seccompProfile": {"type": "RuntimeDefault"},
}
SCRATCH = {"name": "scratch", "mountPath": "/tmp"}


class Pods:
    """Makes the pods of one cluster.

    Args:
        package: volume with the package of a job that runs there; None: jobs bring their own.

    Raises:
        UserError: storage or a shared folder that pods do not see, or a variable without a Secret.
    """

    def __init__(
        self,
        cluster: ClusterSettings,
        settings: KubeRaySettings,
        package: dict[str, Any] | None = None,
    ) -> None:
        self._cluster = cluster
        self._settings = settings
        self._package = package
        _check_folders(cluster, settings)
        _check_variables(cluster, settings)

    def head(self, autoscaled: bool) -> dict[str, Any]:
        head = self._settings.head
        resources = _resources(head.cpus, head.memory_gb, 0)
        pod = self._pod("ray-head", resources, head.memory_gb)
        # Ray's autoscaler beside the head asks Kubernetes for pods; nothing else talks to it
        pod["spec"]["automountServiceAccountToken"] = autoscaled
        return pod

    def worker(self, name: str, pool: PoolSettings) -> dict[str, Any]:
        """A pod of a pool.

        Raises:
            UserError: the pool does not say how much memory a machine has.
        """
        if pool.memory_gb is None:
            raise UserError(
                f"pools.{name}.memory_gb: this setting is missing; Kubernetes has to know how much "
                "memory a pod takes"
            )
        resources = _resources(pool.cpus, pool.memory_gb, pool.gpus)
        pod = self._pod("ray-worker", resources, pool.memory_gb)
        if name in self._settings.node_selectors:
            pod["spec"]["nodeSelector"] = self._settings.node_selectors[name]
        if pool.gpus:  # machines with GPUs are kept free of pods that want none
            pod["spec"]["tolerations"] = [
                {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
            ]
        return pod

    def submitter(self) -> dict[str, Any]:
        """The pod that hands the job to the head and prints what it says."""
        container = {
            "name": "ray-job-submitter",
            "image": self._settings.image,
            "env": _variables({"HOME": "/tmp"}),
            "resources": _resources(1, 1, 0),
            "securityContext": SECURITY,
            "volumeMounts": [SCRATCH],
        }
        volumes = [{"name": "scratch", "emptyDir": {"sizeLimit": "1G"}}]
        return self._template(container, volumes)

    def _pod(self, name: str, resources: dict[str, Any], memory_gb: float) -> dict[str, Any]:
        claims = self._settings.volumes
        volumes: list[dict[str, Any]] = [
            {"name": "scratch", "emptyDir": {"sizeLimit": f"{self._settings.scratch_gb}G"}},
            {
                "name": "shared-memory",
                "emptyDir": {"medium": "Memory", "sizeLimit": _bytes(memory_gb * SHARED_MEMORY)},
            },
        ]
        mounts: list[dict[str, Any]] = [SCRATCH, {"name": "shared-memory", "mountPath": "/dev/shm"}]
        for number, (path, claim) in enumerate(claims.items(), start=1):
            volumes.append(
                {"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}}
            )
            mounts.append({"name": f"volume-{number}", "mountPath": path})
        if self._package is not None:
            volumes.append({"name": "package"} | self._package)
            mounts.append({"name": "package", "mountPath": PACKAGE, "readOnly": True})
        container = {
            "name": name,
            "image": self._settings.image,
            "env": self._environment(),
            "resources": resources,
            "securityContext": SECURITY,
            "volumeMounts": mounts,
            # jobs put their work away before the machines go (cluster/drain.py)
            "lifecycle": {
                "preStop": {"exec": {"command": ["python", "-m", "cluster.drain", name]}}
            },
        }
        template = self._template(container, volumes)
        template["spec"]["terminationGracePeriodSeconds"] = (
            self._cluster.stop_seconds + MORE_SECONDS
        )
        return template

    def _template(self, container: dict[str, Any], volumes: list[dict[str, Any]]) -> dict[str, Any]:
        spec: dict[str, Any] = {"restartPolicy": "Never", "automountServiceAccountToken": False}
        if self._settings.service_account is not None:
            spec["serviceAccountName"] = self._settings.service_account
        if self._settings.pull_secrets:
            spec["imagePullSecrets"] = [{"name": name} for name in self._settings.pull_secrets]
        return {"spec": spec | {"containers": [container], "volumes": volumes}}

    def _environment(self) -> list[dict[str, Any]]:
        plain = {
            "HOME": "/tmp",
            "XDG_CACHE_HOME": "/tmp/cache",
            # by itself it would look at the free disk of the machine, and the pod be evicted
            LIMIT: f"{self._settings.scratch_gb / 2:g}",
            "RAY_JOB_STOP_WAIT_TIME_S": str(self._cluster.stop_seconds),
        }
        plain |= self._cluster.variables
        if self._package is not None:  # plug-ins, in every process
            plain["PYTHONPATH"] = f"{PACKAGE}:{plain.get('PYTHONPATH', '')}".rstrip(":")
        return _variables(plain) + [
            {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": name}}}
            for secret, names in self._settings.secrets.items()
            for name in names
        ]


def _variables(values: dict[str, str]) -> list[dict[str, Any]]:
    # Kubernetes fills in $(NAME), and reads $$ as $
    return [{"name": name, "value": value.replace("$", "$$")} for name, value in values.items()]


def _resources(cpus: int, memory_gb: float, gpus: int) -> dict[str, Any]:
    """The same for requests and limits: what is there is had, and nothing of others is taken."""
    whole: dict[str, Any] = {"cpu": str(cpus), "memory": _bytes(memory_gb)}
    if gpus:
        whole["nvidia.com/gpu"] = str(gpus)
    return {"requests": whole, "limits": whole}


def _bytes(gb: float) -> str:
    return f"{round(gb * 1000)}M"  # 10^6 bytes, as everywhere in Sentray


def _check_folders(cluster: ClusterSettings, settings: KubeRaySettings) -> None:
    """Folders that are named as being on all machines have to be mounted there."""
    named = [("storage", cluster.storage)] if cluster.storage.startswith("/") else []
    for setting, folder in [*named, *(("shared", folder) for folder in cluster.shared)]:
        place = PurePosixPath(folder)
        if not any(place.is_relative_to(path) for path in settings.volumes):
            raise UserError(
                f"{setting}: a pod does not see the folder {folder}; name the claim of its volume, "
                f"as in `manifest.kuberay.volumes: {{{folder}: CLAIM}}`, or use s3://... or gs://..."
            )


def _check_variables(cluster: ClusterSettings, settings: KubeRaySettings) -> None:
    held = {name for names in settings.secrets.values() for name in names}
    if twice := held & cluster.variables.keys():
        raise UserError(
            f"variables: {', '.join(sorted(twice))} comes from a Secret too "
            "(manifest.kuberay.secrets); take it off one of the two"
        )
    missing = [name for name in cluster.pass_variables if name not in held]
    if missing:
        raise UserError(
            f"pass_variables: nobody passes {', '.join(missing)} to a job that Kubernetes starts; "
            "name the Secret that holds them, as in `manifest.kuberay.secrets: {SECRET: "
            f"[{', '.join(missing)}]}}`"
        )
