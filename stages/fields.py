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
from stages.plain import shortened

RECIPE_PREFIX, PACKAGE_PREFIX = "recipe:", "package:"
# Of file systems, in bytes: whole, and between two slashes
LONGEST_PATH, LONGEST_NAME = 4000, 255

# What a table, a node or a folder is called; file systems have 255 bytes for a name
Name = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[^\t\r\n]+$")]
# As a folder, a job or a node of a cluster may be called too
LONGEST_SLUG = 100
Slug = Annotated[str, Field(max_length=LONGEST_SLUG, pattern=r"^[a-z0-9][a-z0-9._-]*$")]
# What every random generator here takes.
Seed = Annotated[int, Field(ge=0, lt=2**63)]


def _absolute_path(value: str) -> str:
    return str(_expanded(value).absolute()) if value and "://" not in value else value


def _expanded(value: str) -> Path:
    """Raises ValueError: `~somebody` whom this machine does not know, or no file system has such
    long names."""
    if len(value) > LONGEST_PATH or max(map(len, value.encode().split(b"/"))) > LONGEST_NAME:
        raise ValueError(f"a path of {len(value):,} characters is too long ({shortened(value)})")
    try:
        return Path(value).expanduser()
    except RuntimeError:
        user = value.partition("/")[0]
        raise ValueError(f"'{user}': there is no such user here; write the folder itself") from None


def _absolute_if_local(value: str) -> str:
    """Ids of a hub stay; what looks like a path, or is a folder here, is one."""
    local = value and (value[0] in ".~" or _expanded(value).is_dir())
    return _absolute_path(value) if local else value


def _absolute_model(value: str, info: ValidationInfo) -> str:
    """As `_absolute_if_local`; other recipes are looked up from the folder of this one."""
    # without a context it is no person's: a recipe's own student is called so
    if info.context is not None and value in (RECIPE_PREFIX, PACKAGE_PREFIX):
        raise ValueError(f"'{value}' names none; write it behind the colon")
    if not value.startswith(RECIPE_PREFIX):
        return _absolute_if_local(value)
    here = (info.context or {}).get("folder", Path.cwd())
    file = _expanded(value.removeprefix(RECIPE_PREFIX))
    return RECIPE_PREFIX + os.path.normpath(here / file)


def named(value: str) -> str:
    """The path, unless it names nothing (ValueError)."""
    if not value:
        raise ValueError("the path is empty; name a file or folder, or leave the setting out")
    _, scheme, rest = value.rpartition("://")
    if scheme and not rest.strip("/"):
        raise ValueError(f"'{value}' names no bucket; write it behind the slashes")
    return value


@dataclass(frozen=True)
class _FileContent:
    deep: bool = False
    hidden: tuple[str, ...] = (".",)

    def describe(self, value: str, where: str) -> Any:
        return content.describe_path(value, where, self.deep, self.hidden)


@dataclass(frozen=True)
class _DatasetContent:
    def describe(self, value: str, where: str) -> Any:
        return content.describe_path(value, where, deep=True) if Path(value).is_dir() else value


@dataclass(frozen=True)
class _Described:
    """A model: what it is depends on its revision too, so its settings describe it."""

    def describe(self, value: str, where: str) -> Any:
        return value


InputPath = Annotated[str, AfterValidator(named), AfterValidator(_absolute_path), _FileContent()]
"""A file or folder that is read; its content is identity."""
TextsPath = Annotated[
    str,
    AfterValidator(named),
    AfterValidator(_absolute_path),
    _FileContent(deep=True, hidden=content.HIDDEN),
]
"""A file, or a folder whose files are parts of one text or table, as are its folders'."""
StoragePath = Annotated[str, AfterValidator(named), AfterValidator(_absolute_path)]
"""A local folder, `s3://...` or `gs://...` that is written; declare it with `execution`."""
Dataset = Annotated[str, AfterValidator(_absolute_if_local), _DatasetContent()]
"""A data set: an id on the Hugging Face hub, or a local folder, which counts by content."""
ModelName = Annotated[str, AfterValidator(_absolute_model), _Described()]
"""A model: see stages/encoder/settings.py, whose `ModelSettings.identity` describes it."""
