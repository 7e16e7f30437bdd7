"""What is wrong with a cluster, judged from what its machines have told (cluster/probe.py)."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cluster.settings import ClusterSettings

# Clocks further apart than this confuse who reads logs; object stores refuse 15 minutes.
SKEW_SECONDS = 2.0
# Below this a shard, a checkpoint or a package may not fit.
LEAST_DISK_BYTES = 5_000_000_000
# Ray's objects and DeepSpeed's buffers live there.
LEAST_SHM_BYTES = 1_000_000_000


@dataclass(frozen=True)
class Finding:
    """Something wrong: where, what, and how to mend it. `must`: runs will fail until then."""

    where: str
    what: str
    mend: str
    must: bool = True

    def __str__(self) -> str:
        return f"{'PROBLEM' if self.must else 'note   '}  {self.where}: {self.what}; {self.mend}"


def findings(facts: dict[str, Any], cluster: ClusterSettings) -> list[Finding]:
    """Everything wrong, worst first."""
    nodes = facts["nodes"]
    found = [
        *_storage(nodes),
        *(finding for node in nodes for finding in _machine(node, facts)),
        *_versions(nodes),
        *_pools(nodes, cluster),
    ]
    return sorted(found, key=lambda finding: not finding.must)


def _storage(nodes: list[dict[str, Any]]) -> Iterator[Finding]:
    for node in nodes:
        if not node["storage"].get("written"):
            why = node["storage"].get("why") or node["storage"].get("error", "")
            yield Finding(
                node["address"], f"cannot write the storage ({why})",
                "give this machine the rights and the credentials, or mount it there",
            )  # fmt: skip
    apart = [node["address"] for node in nodes if node["storage"].get("unread")]
    if apart:
        yield Finding(
            ", ".join(apart), "do not see in the storage what other machines have written there",
            "`storage` must be the same place for all: an object store, or one network folder "
            "mounted everywhere",
        )  # fmt: skip


def _machine(node: dict[str, Any], facts: dict[str, Any]) -> Iterator[Finding]:
    where = node["address"]
    if "error" in node:
        yield Finding(
            where,
            f"started no task ({node['error']})",
            "look at its raylet and dashboard agent logs",
        )
        return
    promised = int(node["resources"].get("GPU", 0))
    if promised > node["gpus"]:
        yield Finding(
            where, f"Ray has {promised} GPU(s) there, torch sees {node['gpus']}",
            "check driver, container runtime and that torch is a CUDA build, or correct --num-gpus",
        )  # fmt: skip
    elif node["gpus"] > promised:
        yield Finding(
            where, f"has {node['gpus']} GPU(s), Ray knows of {promised}",
            f"start its Ray node with --num-gpus={node['gpus']}", must=False,
        )  # fmt: skip
    for path in node["missing"]:
        yield Finding(where, f"has no {path}", "mount or copy it there, or name another path")
    for place, free in node["disks"].items():
        if free < LEAST_DISK_BYTES:
            yield Finding(
                where, f"{place} has {free / 1e9:.1f} GB free",
                "free some space, or set TMPDIR and XDG_CACHE_HOME to a larger disk",
                must=free < LEAST_DISK_BYTES / 10,
            )  # fmt: skip
    if node["shm"] < LEAST_SHM_BYTES:
        yield Finding(
            where, f"/dev/shm has {node['shm'] / 1e9:.2f} GB",
            "give the container more shared memory (an emptyDir of medium Memory, --shm-size)",
            must=False,
        )  # fmt: skip
    now = node["clock"].get("time", facts["begun"])
    skew = max(facts["begun"] - now, now - facts["ended"])
    if skew > SKEW_SECONDS:
        yield Finding(
            where, f"its clock is {skew:.0f} s off the head's", "let it follow a time server",
            must=skew > 600,
        )  # fmt: skip


def _versions(nodes: list[dict[str, Any]]) -> Iterator[Finding]:
    """Machines whose software is not that of most."""
    answered = [node for node in nodes if "error" not in node]
    for name in ["python", *(answered[0]["versions"] if answered else ())]:
        of = {
            node["address"]: node["python"] if name == "python" else node["versions"][name]
            for node in answered
        }
        usual, _ = Counter(of.values()).most_common(1)[0]
        for where, version in of.items():
            if version != usual:
                yield Finding(
                    where, f"{name} is {version or 'missing'}, elsewhere {usual or 'missing'}",
                    "use one image for all machines",
                )  # fmt: skip
        if usual is None:
            yield Finding("all machines", f"{name} is missing", f"install {name} in the image")


def _pools(nodes: list[dict[str, Any]], cluster: ClusterSettings) -> Iterator[Finding]:
    for name, pool in cluster.pools.items():
        labels = pool.node_labels(name)
        shown = ",".join(f"{key}={value}" for key, value in labels.items())
        members = [node for node in nodes if labels.items() <= node["labels"].items()]
        fewest, most = pool.nodes
        if len(members) < fewest:
            yield Finding(
                f"pool {name}", f"{len(members)} machine(s) with the labels {shown}, and at least "
                f"{fewest} are promised",
                f"start them with `ray start --labels={shown}`, or lower nodes[0]",
            )  # fmt: skip
        if len(members) > most:
            yield Finding(
                f"pool {name}", f"{len(members)} machines, and {most} are promised",
                "raise nodes[1], or some are left idle", must=False,
            )  # fmt: skip
        for node in members:
            for resource, wanted in (("CPU", pool.cpus), ("GPU", pool.gpus)):
                has = int(node["resources"].get(resource, 0))
                if has < wanted:
                    yield Finding(
                        node["address"], f"has {has} {resource} of the {wanted} that pool {name} "
                        "promises",
                        "correct the pool in the cluster's file, or the machine",
                    )  # fmt: skip
