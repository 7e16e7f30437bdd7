"""What decides the fingerprints of all shipped recipes, as one file.

    python -m tests.golden.fingerprints          writes tests/golden/fingerprints.json

Contents of files, models and packages are replaced by their names, so the file is the same on every
machine. Write it anew only after reading what tests/golden/test_fingerprints.py says has changed.
"""

import inspect
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pipeline.plan.graph import build_graph
from pipeline.recipe.read import load_recipe
from stages.builtin import BUILTIN
from stages.settings import Settings

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
GOLDEN = HERE / "fingerprints.json"
# Fingerprints of the code of commit 33aa4ba (0.1), by recipe and node; made once, never changed.
FIRST = HERE / "fingerprints-0.1.json"


@contextmanager
def contents_by_name() -> Iterator[None]:
    """Stands in for everything that a fingerprint reads from this machine."""

    def model(settings: Any) -> dict[str, Any]:
        name = settings.model
        if name.startswith("package:"):
            return {"package": name.removeprefix("package:"), "version": "stub"}
        if name.startswith(("/", ".", "~")):
            return {"content": Path(name).name}
        return {"hub": name, "revision": settings.revision}

    places = {"SENTRAY_DATA": "/data", "SENTEVAL_DATA": "/senteval"}
    with (
        patch.dict(os.environ, places),
        patch("stages.content.describe_path", lambda path, where, *_: {"content": Path(path).name}),
        patch("stages.content.describe_packages",
              lambda names: {"packages": dict.fromkeys(names or [], "stub"), "python": "stub"}),
        patch("stages.encoder.settings.describe_model", model),
        patch("stages.tokens.negation.parser_versions", lambda: {"parser": "stub"}),
    ):  # fmt: skip
        yield


def fingerprints() -> dict[str, dict[str, str]]:
    """Of every node of every shipped recipe."""
    found = {}
    with contents_by_name():
        for file in sorted((REPOSITORY / "recipes").glob("*.yaml")):
            if not file.stem.endswith("-search"):
                nodes = build_graph(load_recipe(str(file))).nodes
                found[file.stem] = {name: node.fingerprint for name, node in nodes.items()}
    return found


def identity_defaults() -> dict[str, dict[str, Any]]:
    """Defaults of all identity settings, by settings class and field; `added` ones too."""
    found: dict[str, dict[str, Any]] = {}
    waiting = [Settings]
    while waiting:
        one = waiting.pop()
        waiting += one.__subclasses__()
        if one.__module__.split(".")[0] != "stages":  # tests and plug-ins have their own
            continue
        fields: dict[str, Any] = {}
        for name, field in one.model_fields.items():
            extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
            if extra.get("execution"):
                continue
            required = field.is_required()
            fields[name] = None if required else field.get_default(call_default_factory=True)
        found[f"{one.__module__}.{one.__name__}"] = fields
    text = json.dumps(dict(sorted(found.items())), default=lambda settings: settings.model_dump())
    return dict(json.loads(text))


def added_fields() -> set[tuple[str, str]]:
    """Settings declared with `added(...)`."""
    found = set()
    waiting = [Settings]
    while waiting:
        one = waiting.pop()
        waiting += one.__subclasses__()
        for name, field in one.model_fields.items():
            extra = field.json_schema_extra
            if isinstance(extra, dict) and extra.get("added"):
                found.add((f"{one.__module__}.{one.__name__}", name))
    return found


def versions() -> dict[str, int]:
    """Of every stage, by kind."""
    return {stage.kind: stage.version for stage in BUILTIN.stages if not inspect.isabstract(stage)}


def state() -> dict[str, Any]:
    return {
        "versions": versions(),
        "defaults": identity_defaults(),
        "fingerprints": fingerprints(),
    }


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(state(), indent=1, sort_keys=True) + "\n")
