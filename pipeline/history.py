"""The record of a recipe's runs: `history/<recipe>/<time>/`, newest last.

`recipe.yaml` (resolved; `recipe.<name>.yaml` for each it builds on) and `run.json` (artifacts and
their settings) are written when a run starts, `results.json` and `report.html` when it ends.
"""

import json
import time
from typing import Any

from pipeline.graph import Node
from pipeline.recipe import Recipe, dump_recipe
from stages.files import Root


def start_record(root: Root, recipe: Recipe, nodes: list[Node], folders: dict[str, str]) -> str:
    """Writes the record of a starting run, ${VARIABLES} by name; returns its folder."""
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime()) + f"{time.time_ns() // 1000 % 10**6:06d}"
    folder = f"history/{recipe.name}/{stamp}"
    root.write(f"{folder}/recipe.yaml", dump_recipe(recipe).encode())
    for other in {node.recipe.name: node.recipe for node in nodes}.values():
        if other.name != recipe.name:
            root.write(f"{folder}/recipe.{other.name}.yaml", dump_recipe(other).encode())
    record = {
        node.name: {
            "folder": folders[node.name],
            "settings": node.recipe.unexpanded(node.settings),
        }
        for node in nodes
    }
    root.write(f"{folder}/run.json", json.dumps(record, indent=1).encode())
    return folder


def newest_record(
    root: Root, recipe_name: str, artifacts: dict[str, str] | None = None
) -> str | None:
    """Folder of a recipe's newest run, or None.

    Args:
        artifacts: if given, only a run that ended with results made of exactly these.
    """
    for stamp in reversed(root.list(f"history/{recipe_name}")):
        folder = f"history/{recipe_name}/{stamp}"
        if artifacts is None:
            if root.exists(f"{folder}/run.json"):
                return folder
        elif root.exists(f"{folder}/results.json"):
            results = json.loads(root.read(f"{folder}/results.json"))
            if results["artifacts"] == artifacts:
                return folder
    return None


def artifacts_in_history(root: Root, known: dict[str, set[str]]) -> set[str]:
    """Folders of all artifacts that runs of recipes use or have used.

    Args:
        known: what was read before, by run; what is new is added.
    """
    for name in root.list("history"):
        for stamp in root.list(f"history/{name}"):
            run = f"history/{name}/{stamp}"
            if run not in known and root.exists(f"{run}/run.json"):
                record = json.loads(root.read(f"{run}/run.json"))
                known[run] = {entry["folder"] for entry in record.values()}
    return set().union(*known.values())


def last_settings(root: Root, recipe_name: str) -> dict[str, Any]:
    """Settings by node of the newest run; empty when there was none."""
    folder = newest_record(root, recipe_name)
    if folder is None:
        return {}
    record = json.loads(root.read(f"{folder}/run.json"))
    return {name: entry["settings"] for name, entry in record.items()}
