"""The section `manifest` of a cluster's file: what generated files say beyond pools and storage.

Secrets are named, never given: by the Kubernetes Secret that holds them, or as variables that are
set where `sbatch` is called.
"""

from typing import Any

from pydantic import Field, field_validator

from cluster.manifests.cron import checked_schedule
from cluster.manifests.names import checked_object_name, checked_variable
from pipeline.run.pools import MOST_MEMORY
from stages.credentials import clear_credential
from stages.settings import Settings

# Where machines have something else.
TAKEN = ("", "/tmp", "/dev", "/dev/shm", "/sentray")
# One word that needs no quoting, as in `#SBATCH --partition=gpu`.
WORD = r"^[A-Za-z0-9_.,:@%+/=-]+$"


class HeadSettings(Settings):
    cpus: int = Field(2, ge=1, description="Cores of the head. It runs the command, and no stage.")
    memory_gb: float = Field(
        8, gt=0, le=MOST_MEMORY, description="Memory of the head, in 10^9 bytes."
    )


class RedisSettings(Settings):
    address: str = Field(pattern=WORD, description="HOST:PORT of a Redis that outlives the head.")
    secret: str | None = Field(
        None, description="Kubernetes Secret with its password, under the key `password`."
    )

    @field_validator("secret")
    @classmethod
    def _is_a_name(cls, name: str | None) -> str | None:
        return None if name is None else checked_object_name(name)


class KubeRaySettings(Settings):
    image: str = Field(pattern=WORD, description="Image with Sentray, as cluster/images makes one.")
    pull_secrets: list[str] = Field([], description="Secrets to pull it with.")
    namespace: str = Field(
        "default",
        pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$",
        description="Where all of it is created.",
    )
    service_account: str | None = Field(
        None, description="Service account of the machines, e.g. one with rights on the storage."
    )
    head: HeadSettings = HeadSettings()
    secrets: dict[str, list[str]] = Field(
        {},
        description="Environment variables that Kubernetes Secrets hold, by name of the Secret; "
        "the variable's name is its key there.",
    )
    token_secret: str | None = Field(
        None,
        description="Secret with Ray's token under the key `auth_token`; null: KubeRay makes one.",
    )
    volumes: dict[str, str] = Field(
        {}, description="PersistentVolumeClaims that all machines mount, by absolute path there."
    )
    node_selectors: dict[str, dict[str, str]] = Field(
        {}, description="Labels of the Kubernetes nodes that a pool runs on, by pool."
    )
    scratch_gb: int = Field(
        50, ge=1, description="Disk of a machine for temporary files and caches (/tmp), 10^9 bytes."
    )
    schedule: str | None = Field(
        None, description="When a RayCronJob runs: minute, hour, day, month, day of the week."
    )
    time_zone: str | None = Field(
        None,
        pattern=WORD,
        description="Time zone of the schedule (Europe/Berlin); null: the operator's, "
        "which is UTC as a rule.",
    )
    redis: RedisSettings | None = Field(
        None, description="Keeps what the head of a cluster that stays knows; null: nothing does."
    )
    tls: bool = Field(
        False,
        description="Encrypt and authenticate Ray's own traffic. Needs cert-manager and KubeRay's "
        "feature gate RayClusterMTLS.",
    )
    network_policy: bool = Field(
        False,
        description="Let only the cluster's machines and KubeRay in. Needs KubeRay's feature gate "
        "RayClusterNetworkPolicy.",
    )

    @field_validator("schedule")
    @classmethod
    def _is_a_schedule(cls, schedule: str | None) -> str | None:
        return None if schedule is None else checked_schedule(schedule)

    @field_validator("service_account", "token_secret")
    @classmethod
    def _is_a_name(cls, name: str | None) -> str | None:
        return None if name is None else checked_object_name(name)

    @field_validator("pull_secrets")
    @classmethod
    def _are_names(cls, names: list[str]) -> list[str]:
        return [checked_object_name(name) for name in names]

    @field_validator("secrets")
    @classmethod
    def _name_variables(cls, secrets: dict[str, list[str]]) -> dict[str, list[str]]:
        owners: dict[str, str] = {}
        for secret, names in secrets.items():
            checked_object_name(secret)
            for name in names:
                checked_variable(name, f" (in {secret}); values belong into the Secret itself")
                if name in owners:
                    raise ValueError(f"{name} is in two Secrets, {owners[name]} and {secret}")
                owners[name] = secret
        return secrets

    @field_validator("volumes")
    @classmethod
    def _are_mounts(cls, volumes: dict[str, str]) -> dict[str, str]:
        for path, claim in volumes.items():
            if not path.startswith("/") or ":" in path or path.rstrip("/") in TAKEN:
                raise ValueError(f"'{path}' is not an absolute path where a volume can be mounted")
            checked_object_name(claim)
        return volumes


class SlurmSettings(Settings):
    partition: str | None = Field(None, pattern=WORD, description="null: SLURM's default.")
    account: str | None = Field(None, pattern=WORD, description="Who pays; null: SLURM's default.")
    time: str | None = Field(
        None,
        pattern=r"^(\d+-)?\d+(:\d\d){0,2}$",
        description="Longest time of one start: 24:00:00, 2-12:00:00; null: the partition's.",
    )
    modules: list[str] = Field([], description="What `module load` loads.")
    venv: str | None = Field(
        None, pattern="^/", description="Virtual environment on the shared disk; null: PATH's."
    )

    @field_validator("time", mode="before")
    @classmethod
    def _is_text(cls, time: Any) -> Any:
        if isinstance(time, int):  # YAML reads 24:00:00 as 86400, and SLURM that as minutes
            raise ValueError("write it in quotes, as in '24:00:00'")
        return time


class SshSettings(Settings):
    ssh_user: str = Field("ubuntu", pattern=WORD, description="User on the machines.")
    ssh_private_key: str | None = Field(
        None,
        pattern=r"^[~/][^\n]*$",
        description="File with the key, here; null: Ray makes one, with the provider.",
    )


class RayUpSettings(Settings):
    provider: dict[str, Any] = Field(description="Ray's `provider`: type, region, and the like.")
    auth: SshSettings = SshSettings()
    image: str | None = Field(
        None, pattern=WORD, description="Image with Sentray; null: none, Ray runs on the machine."
    )
    setup: list[str] = Field([], description="Commands that install what the image does not have.")
    head: dict[str, Any] = Field(description="Ray's `node_config` of the head: InstanceType, ...")
    machines: dict[str, dict[str, Any]] = Field(
        description="Ray's `node_config` of the machines of a pool, by pool."
    )

    @field_validator("provider", "head", "machines")
    @classmethod
    def _has_no_secret(cls, given: dict[str, Any]) -> dict[str, Any]:
        found = clear_credential(given)
        if found:
            raise ValueError(
                f"{found} looks like a secret, and this file is no place for one: give the rights "
                "to whoever calls `ray up`, and to the machines by their role"
            )
        return given


class ManifestSettings(Settings):
    kuberay: KubeRaySettings | None = None
    slurm: SlurmSettings | None = None
    ray_up: RayUpSettings | None = None
