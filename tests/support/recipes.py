"""The tiny recipe: complete, over made-up sentences and tiny models."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from pipeline.recipe.document import Document
from tests.support.data import write_sts
from tests.support.models import make_sentences


def tiny(folder: Path, teacher: Path, student: Path) -> dict[str, Any]:
    """The recipe as plain data; its 300 sentences and its STS file are written into `folder`."""
    text = folder / "sentences.txt"
    if not text.exists():
        text.write_text("\n".join(make_sentences(300)) + "\n")
        write_sts(folder / "sts.tsv")
    return {
        "name": "tiny",
        "storage": str(folder / "runs"),
        "sentences": {"path": str(text), "rows_per_shard": 150},
        "teachers": [{"name": "t", "model": str(teacher), "pooling": "mean", "max_length": 32}],
        "student": {"model": str(student), "pooling": "mean", "max_length": 16},
        "train": {
            "objectives": {"infonce": {}, "consistency": {}, "listnet": {}},
            "batch_size": 16, "max_steps": 12, "learning_rate": 1e-3,
            "checkpoint_every_steps": 4, "log_every_steps": 2,
            "dev": {"sts": [{"name": "dev", "path": str(folder / "sts.tsv")}], "every_steps": 6},
        },
        "evaluate": {
            "sts": [{"name": "made-up", "path": str(folder / "sts.tsv")}],
            "num_bootstrap": 20, "max_length": 48,
        },
    }  # fmt: skip


def overridden(file: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """A recipe file as plain data, with `key.sub=value` overrides as on the command line."""
    return dict(Document(str(file), list(overrides)).raw)


def setting(key: str, value: Any) -> str:
    """The override `key=value`, for values that are easier to write in Python than in YAML."""
    return f"{key}={json.dumps(value)}"


def write_recipe(file: Path, recipe: dict[str, Any]) -> str:
    file.write_text(yaml.safe_dump(recipe))
    return str(file)
