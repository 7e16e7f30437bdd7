"""Field types that say what a string names: a file, a model, a data set, another recipe.

Because of their type they are made absolute when a recipe is read (Ray's workers do not run in the
folder of the command line), checked, and counted by content in fingerprints; nowhere by the name of
a key. And one that is a number. Imports nothing heavy.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationInfo

from stages import content

RECIPE_PREFIX = "recipe:"

# What every random generator here takes.
Seed = Annotated[int, Field(ge=0, lt=2**63)]


def _absolute_path(value: str) -> str:
    return str(Path(value).expanduser().absolute()) if value and "://" not in value else value


def _absolute_if_local(value: str) -> str:
    """Ids of a hub stay; what looks like a path, or is a folder here, is one."""
    local = value and (value[0] in ".~" or Path(value).expanduser().is_dir())
    return _absolute_path(value) if local else value


def _absolute_model(value: str, info: ValidationInfo) -> str:
    """As `_absolute_if_local`; other recipes are looked up from the folder of this one."""
    if not value.startswith(RECIPE_PREFIX):
        return _absolute_if_local(value)
    here = (info.context or {}).get("folder", Path.cwd())
    file = Path(value.removeprefix(RECIPE_PREFIX)).expanduser()
    return RECIPE_PREFIX + os.path.normpath(here / file)


@dataclass(frozen=True)
class _FileContent:
    def describe(self, value: str, where: str) -> Any:
        return content.describe_path(value, where)


@dataclass(frozen=True)
class _DatasetContent:
    def describe(self, value: str, where: str) -> Any:
        return content.describe_path(value, where) if Path(value).is_dir() else value


@dataclass(frozen=True)
class _Described:
    """A model: what it is depends on its revision too, so its settings describe it."""

    def describe(self, value: str, where: str) -> Any:
        return value


InputPath = Annotated[str, AfterValidator(_absolute_path), _FileContent()]
"""A file or folder that is read; its content is identity."""
StoragePath = Annotated[str, AfterValidator(_absolute_path)]
"""A local folder, `s3://...` or `gs://...` that is written; declare it with `execution`."""
Dataset = Annotated[str, AfterValidator(_absolute_if_local), _DatasetContent()]
"""A data set: an id on the Hugging Face hub, or a local folder, which counts by content."""
ModelName = Annotated[str, AfterValidator(_absolute_model), _Described()]
"""A model: see stages/encoder/settings.py, whose `ModelSettings.identity` describes it."""
