"""What `sentray doctor` runs on a cluster: looks around on every machine, prints what it found.

Nothing is judged here (cluster/findings.py does): the last line is `FACTS {...}`, JSON.
"""

import json
import os
import platform
import shutil
import sys
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from pipeline.run.session import ray_session
from stages.content import cache_folder
from stages.errors import UserError
from stages.files import Root

MARK = "FACTS "
HEAD = "node:__internal_head__"  # what Ray calls a resource of its head
PACKAGES = ("ray", "sentray", "torch", "transformers", "pyarrow")
# A machine that has not answered by then is a finding of its own. Ray may unpack the job's package
# and start a worker there first.
ANSWER_SECONDS = 60.0


def main(arguments: list[str]) -> int:
    """Args:
    arguments: one, JSON: `storage`, and `paths` that recipes name.
    """
    asked = json.loads(arguments[0])
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    with ray_session(None):
        alive = {node["NodeID"]: node for node in sorted(ray.nodes(), key=_place) if node["Alive"]}
        folder = f"doctor/{time.time_ns()}"

        def ask(function: Any, *more: Any) -> dict[str, Any]:
            """What each machine answers, by node id; machines that fail answer {"error": ...}."""
            remote = ray.remote(num_cpus=0, max_retries=0)(function)
            begun = time.time()
            asked_nodes = {
                node: remote.options(
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
                ).remote(node, *more)
                for node in alive
            }
            ray.wait(
                list(asked_nodes.values()), num_returns=len(asked_nodes), timeout=ANSWER_SECONDS
            )
            answers = {}
            for node, reference in asked_nodes.items():
                try:
                    answers[node] = ray.get(reference, timeout=0.1)
                except ray.exceptions.GetTimeoutError:
                    answers[node] = {"error": f"no answer within {ANSWER_SECONDS:.0f} s"}
                except ray.exceptions.RayError as error:
                    lines = str(error).strip().splitlines() or [type(error).__name__]
                    answers[node] = {"error": lines[-1]}
            return {"begun": begun, "ended": time.time(), "by_node": answers}

        ask(_nothing)  # so that no worker is started while clocks are compared
        clocks = ask(_now)
        facts = ask(look_around, asked["paths"])
        written = ask(write_token, asked["storage"], folder)
        tokens = [node for node, answer in written["by_node"].items() if answer.get("written")]
        read = ask(read_tokens, asked["storage"], folder, tokens)
        with suppress(UserError):  # what is wrong with it has been found
            Root(asked["storage"]).delete(folder)
    nodes = []
    for node, about in alive.items():
        seen = facts["by_node"][node] | {
            "address": about["NodeManagerAddress"],
            "labels": about.get("Labels") or {},
            "resources": about["Resources"],
            "storage": written["by_node"][node] | read["by_node"][node],
            "clock": clocks["by_node"][node],
        }
        nodes.append(seen)
    whole = {"nodes": nodes, "begun": clocks["begun"], "ended": clocks["ended"]}
    print(MARK + json.dumps(whole), flush=True)
    return 0


def _place(node: dict[str, Any]) -> tuple[bool, str]:
    """The head first: where as many machines have another version, these are the odd ones."""
    return HEAD not in node["Resources"], node["NodeManagerAddress"]


def _nothing(node: str) -> dict[str, Any]:
    return {}


def _now(node: str) -> dict[str, Any]:
    return {"time": time.time()}


def look_around(node: str, paths: list[str]) -> dict[str, Any]:
    """What there is on this machine."""
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "gpus": _count_gpus(),
        "disks": {
            str(place): shutil.disk_usage(_existing(place)).free
            for place in (Path(os.environ.get("TMPDIR", "/tmp")), cache_folder())
        },
        "shm": shm.total if shm else 0,
        "missing": [path for path in paths if not os.access(path, os.R_OK)],
    }


def write_token(node: str, storage: str, folder: str) -> dict[str, Any]:
    """Writes this machine's token into the storage."""
    try:
        Root(storage).write(f"{folder}/{node}", node.encode())
    except UserError as error:
        return {"written": False, "why": str(error)}
    return {"written": True}


def read_tokens(node: str, storage: str, folder: str, nodes: list[str]) -> dict[str, Any]:
    """Reads the tokens of all machines; says whose are not there."""
    unread = []
    for other in nodes:
        try:
            found = Root(storage).read(f"{folder}/{other}")
        except (FileNotFoundError, UserError):
            found = b""
        if found != other.encode():
            unread.append(other)
    return {"unread": unread}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _count_gpus() -> int:
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray hides them from a task that asked for none
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count()


def _existing(place: Path) -> Path:
    """The nearest folder above that is there."""
    return place if place.exists() else _existing(place.parent)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
