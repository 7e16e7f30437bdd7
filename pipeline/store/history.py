"""The record of a recipe's runs: `history/<recipe>/<time>/`, newest last.

`recipe.yaml` (resolved; `recipe.<name>.yaml` for each it builds on) and `run.json` (artifacts and
their settings) are written when a run starts, `results.json`, `report.html` and `student.json`
(where the student lies, and its model card) when it ends.
"""

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from stages.files import Root, understood

STAMP = re.compile(r"\d{8}T\d{12}")


def start_record(
    root: Root,
    name: str,
    recipes: Mapping[str, str],
    folders: Mapping[str, str],
    identities: Mapping[str, dict[str, Any]],
) -> str:
    """Writes the record of a starting run; returns its folder.

    Args:
        name: of the recipe that runs.
        recipes: resolved, as YAML, by name: that one, and those that it builds on.
        folders, identities: of all nodes, by node.
    """
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")  # one look: of two, a second may pass
    folder = f"history/{name}/{stamp}"
    for other, text in recipes.items():
        file = "recipe.yaml" if other == name else f"recipe.{other}.yaml"
        root.write(f"{folder}/{file}", text.encode())
    record = {
        node: {"folder": place, "settings": identities[node]} for node, place in folders.items()
    }
    root.write(f"{folder}/run.json", json.dumps(record, indent=1).encode())
    return folder


def stamps(root: Root, recipe_name: str) -> list[str]:
    """When a recipe's runs began, as their folders are called; nothing else that lies there."""
    return [one for one in root.list(f"history/{recipe_name}") if STAMP.fullmatch(one)]


def newest_record(
    root: Root,
    recipe_name: str,
    artifacts: dict[str, str] | None = None,
    with_results: bool = False,
) -> str | None:
    """Folder of a recipe's newest run, or None.

    Args:
        artifacts: if given, only a run that ended with results made of exactly these.
        with_results: only a run that ended with results.
    """
    wanted = "results" if with_results or artifacts is not None else "run"
    for stamp in reversed(stamps(root, recipe_name)):
        folder = f"history/{recipe_name}/{stamp}"
        if not root.exists(f"{folder}/{wanted}.json"):
            continue
        if artifacts is None:
            return folder
        name = f"{folder}/results.json"
        with understood(root.shown(name)):
            if json.loads(root.read(name))["artifacts"] == artifacts:
                return folder
    return None


def artifacts_in_history(root: Root, known: dict[str, set[str]]) -> set[str]:
    """Folders of all artifacts that runs of recipes use or have used.

    Args:
        known: what was read before, by run; what is new is added.
    """
    for name in root.list("history"):
        for stamp in stamps(root, name):
            run = f"history/{name}/{stamp}"
            if run not in known and root.exists(f"{run}/run.json"):
                known[run] = set(folders_of(root, run).values())
    return set().union(*known.values())


def last_settings(root: Root, recipe_name: str) -> dict[str, Any]:
    """Settings by node of the newest run; empty when there was none."""
    folder = newest_record(root, recipe_name)
    if folder is None:
        return {}
    name = f"{folder}/run.json"
    with understood(root.shown(name)):
        return {node: one["settings"] for node, one in json.loads(root.read(name)).items()}


def folders_of(root: Root, record: str) -> dict[str, str]:
    """A run's artifacts by node."""
    name = f"{record}/run.json"
    with understood(root.shown(name)):
        return {node: str(one["folder"]) for node, one in json.loads(root.read(name)).items()}
