"""A cluster's file: `clusters/NAME.yaml`, owned by whoever runs the cluster.

It says where the cluster is, where it stores, and what a job is given. A recipe never names a
cluster, so the same recipe runs on a laptop and on any of them.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from cluster.manifests.names import checked_variable
from cluster.manifests.settings import ManifestSettings
from pipeline.recipe.document import Document
from pipeline.run.pools import PoolSettings, checked_pools
from stages.credentials import clear_credential
from stages.errors import UserError
from stages.fields import named
from stages.files import masked_uri
from stages.settings import Settings

FOLDER = "clusters"


class ClusterSettings(Settings):
    address: str = Field(
        "",
        description="The head's dashboard: http://HOST:8265, or https://...; empty: there is none "
        "yet, only manifests are made.",
    )
    storage: str = Field(
        description="Storage root that all machines share: s3://..., gs://..., or an absolute path."
    )
    token_variable: str | None = Field(
        None,
        description="Environment variable that holds Ray's token for this cluster; null: "
        "RAY_AUTH_TOKEN, the file RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token, where there is one.",
    )
    ca_file: str | None = Field(
        None, description="Certificates to trust for https://; null: those of the system."
    )
    sentray: str = Field(
        "sent",
        pattern="^(sent|installed)$",
        description="sent: the Sentray of whoever submits goes along, as source; installed: the "
        "one in the cluster's image, which must have the same version.",
    )
    python: str = Field(
        "python", pattern=r"^\S[^\n]*$", description="Python on the head, which runs the job."
    )
    pass_variables: list[str] = Field(
        [],
        description="Environment variables whose values a job gets from whoever submits it.",
    )
    variables: dict[str, str] = Field(
        {}, description="Environment variables of every job, with values; nothing secret."
    )
    shared: list[str] = Field(
        [],
        description="Folders that are the same here and on all machines; nothing below them is "
        "sent.",
    )
    pools: dict[str, PoolSettings] = Field(
        {}, description="Kinds of machines, by name (pipeline/run/pools.py)."
    )
    upload_limit_mb: int = Field(
        50, ge=1, le=100, description="Largest package of a job. Ray itself takes 100 MiB."
    )
    stop_seconds: int = Field(
        120, ge=3, description="How long a job that is stopped may take to end by itself."
    )
    manifest: ManifestSettings = Field(
        ManifestSettings(), description="What generated files say (cluster/manifests/settings.py)."
    )

    @field_validator("address")
    @classmethod
    def _is_http(cls, address: str) -> str:
        return checked_address(address)

    @field_validator("storage")
    @classmethod
    def _is_shared(cls, storage: str) -> str:
        return checked_storage(storage)

    @field_validator("pools")
    @classmethod
    def _one_pool_for_a_stage(cls, pools: dict[str, PoolSettings]) -> dict[str, PoolSettings]:
        return checked_pools(pools)

    @field_validator("shared")
    @classmethod
    def _are_absolute(cls, folders: list[str]) -> list[str]:
        for folder in folders:
            if not folder.startswith("/"):
                raise ValueError(f"'{folder}' is not an absolute path")
        return folders

    @field_validator("token_variable")
    @classmethod
    def _is_a_name(cls, name: str | None) -> str | None:
        return None if name is None else checked_variable(name, "; the token itself is its value")

    @field_validator("pass_variables")
    @classmethod
    def _are_names(cls, names: list[str]) -> list[str]:
        return [checked_variable(name) for name in names]

    @field_validator("variables")
    @classmethod
    def _are_not_secret(cls, variables: dict[str, str]) -> dict[str, str]:
        for name, value in variables.items():
            checked_variable(name)
            if "\0" in value:
                raise ValueError(f"{name}: no variable can have a zero byte in its value")
            if clear_credential({name: value}):
                raise ValueError(
                    f"{name} looks like a secret, and this file is no place for one: set it in the "
                    "environment of whoever submits and name it under pass_variables, or give it "
                    "to the machines themselves"
                )
        return variables

    @contextmanager
    def variables_set(self) -> Iterator[None]:
        """Environment variables mean here what they mean in a job."""
        before = {name: os.environ.get(name) for name in self.variables}
        os.environ.update(self.variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def is_shared(self, path: Path) -> bool:
        """Whether the machines have this path too, with the same content."""
        return any(path.is_relative_to(folder) for folder in self.shared)


def checked_address(address: str) -> str:
    """The address of a dashboard, without a slash at its end.

    Raises:
        ValueError: it is none.
    """
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            f"'{masked_uri(address)}' is not the address of a dashboard; write http://HOST:8265 "
            "(the dashboard's port, not Ray's 6379 or 10001)"
        )
    try:
        parts.port  # noqa: B018 - raises where it is no number, or too large
    except ValueError:
        raise ValueError(f"'{masked_uri(address)}': its port is not one") from None
    if parts.username or parts.password or parts.query:
        raise ValueError("credentials do not belong into the address; see token_variable")
    return address.rstrip("/")


def checked_storage(storage: str) -> str:
    """A storage root that may be the same on all machines.

    Raises:
        ValueError: it cannot.
    """
    if masked_uri(storage) != storage:
        raise ValueError(
            f"'{masked_uri(storage)}': credentials do not belong into the address; name their "
            "variables under pass_variables"
        )
    if "://" not in storage and not storage.startswith("/"):
        raise ValueError(
            f"'{storage}' is a folder of this machine; give s3://..., gs://..., or an absolute "
            "path that is the same folder on all machines of the cluster"
        )
    return named(storage)


def load_cluster(name: str) -> ClusterSettings:
    """The cluster called `name`, or that of a file given by its path.

    Raises:
        UserError: there is no such file, or something in it is wrong.
    """
    is_path = "/" in name or name.endswith((".yaml", ".yml"))
    file = Path(name) if is_path else Path(FOLDER) / f"{name}.yaml"
    if not is_path and not file.is_file():
        known = ", ".join(sorted(other.stem for other in Path(FOLDER).glob("*.yaml")))
        raise UserError(
            f"cluster '{name}': there is no file {file}; "
            + (f"there are {known}" if known else "write one (docs/cluster.md), or give --address")
        )
    return Document(str(file), what="cluster").read(ClusterSettings)


def unprepared(address: str, storage: str) -> ClusterSettings:
    """A cluster that has no file.

    Raises:
        UserError: not a dashboard's address, or not a storage that machines can share.
    """
    for option, value, check in (
        ("--address", address, checked_address), ("--storage", storage, checked_storage),
    ):  # fmt: skip
        try:
            check(value)
        except ValueError as error:
            raise UserError(f"{option} {error}") from None
    return ClusterSettings(address=address.rstrip("/"), storage=storage)
