"""Pools: which machines of a cluster make which stages, and what one process of a stage takes.

A pool is a kind of machine. Its Ray nodes carry labels (`ray start --labels=sentray-pool=gpu`), and
processes of its stages run on nodes with these labels only. `nodes: [0, 4]` says how many there may
be, so work is spread over machines that an autoscaler has not started yet.
"""

from pydantic import Field, field_validator, model_validator

from pipeline.recipe.document import Document
from stages.settings import Settings

LABEL = "sentray-pool"
MOST_MEMORY = 1e6  # a petabyte, in 10^9 bytes


class ProcessSettings(Settings):
    cpus: float | None = Field(
        None, gt=0, description="Cores of one process; null: as the stage asks for."
    )
    gpus: float | None = Field(
        None,
        ge=0,
        description="GPUs of one process: a share (0.25 lets four small encoders share one), or "
        "whole ones; null: one where the stage computes on a GPU and the pool has any.",
    )

    @field_validator("gpus")
    @classmethod
    def _is_a_share_or_whole(cls, gpus: float | None) -> float | None:
        if gpus is not None and gpus > 1 and gpus != int(gpus):
            raise ValueError(f"{gpus} is neither a share of one GPU nor a whole number")
        return gpus


class PoolSettings(Settings):
    cpus: int = Field(ge=1, description="Cores of one machine.")
    gpus: int = Field(0, ge=0, description="GPUs of one machine.")
    memory_gb: float | None = Field(
        None, gt=0, le=MOST_MEMORY, description="Memory of one machine, in 10^9 bytes."
    )
    nodes: list[int] = Field(
        [1, 1], min_length=2, max_length=2, description="Fewest and most machines."
    )
    labels: dict[str, str] = Field(
        {}, description=f"Labels of its Ray nodes; none: {LABEL}: NAME of the pool."
    )
    stages: dict[str, ProcessSettings] = Field(
        {}, description="Stages that run here, by kind (embed, train, ...), and their processes."
    )

    def node_labels(self, name: str) -> dict[str, str]:
        """Labels of its Ray nodes.

        Args:
            name: the pool's.
        """
        return self.labels or {LABEL: name}

    @model_validator(mode="after")
    def _fits(self) -> "PoolSettings":
        fewest, most = self.nodes
        if not 0 <= fewest <= most or most == 0:
            raise ValueError(f"nodes {self.nodes} is not [fewest, most] with at least one machine")
        for stage, process in self.stages.items():
            if (process.cpus or 0) > self.cpus or (process.gpus or 0) > self.gpus:
                raise ValueError(
                    f"a process of '{stage}' takes more than one machine of the pool has "
                    f"({self.cpus} cores, {self.gpus} GPUs)"
                )
        return self


class PoolsFile(Settings):
    """A file with nothing but pools, by name: `sentray run ... --pools FILE`."""

    pools: dict[str, PoolSettings] = Field({}, description="Kinds of machines, by name.")

    @field_validator("pools")
    @classmethod
    def _one_pool_for_a_stage(cls, pools: dict[str, PoolSettings]) -> dict[str, PoolSettings]:
        return checked_pools(pools)


def checked_pools(pools: dict[str, PoolSettings]) -> dict[str, PoolSettings]:
    """Raises ValueError where two pools want the same stage."""
    owners: dict[str, str] = {}
    for name, pool in pools.items():
        for stage in pool.stages:
            if stage in owners:
                raise ValueError(f"'{stage}' is in two pools, {owners[stage]} and {name}")
            owners[stage] = name
    return pools


def read_pools(file: str | None) -> dict[str, PoolSettings]:
    """The pools of a file, or none; raises UserError as recipes do."""
    return Document(file, what="pools").read(PoolsFile).pools if file is not None else {}
