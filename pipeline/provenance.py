"""What a path, a model or a list of packages *is*, apart from where it lies.

Files count by content (stages/content.py), so a moved file is the same input.
"""

import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from stages.content import digest
from stages.encoder.settings import PACKAGE_PREFIX, ModelSettings, model_folder
from stages.errors import UserError
from stages.files import masked_uri


def describe_path(path: str, setting: str) -> dict[str, Any]:
    """Content of a file and its kind (the suffix), or content of a folder's files by name.

    Raises:
        UserError: nothing is there; names `setting`.
    """
    place = Path(path).expanduser()
    if place.is_dir():
        files = sorted(p for p in place.rglob("*") if p.is_file() and not p.name.startswith("."))
        return {"files": {p.relative_to(place).as_posix(): digest(p) for p in files}}
    if not place.is_file():
        shown = masked_uri(path) if "://" in path else place
        raise UserError(f"{setting}: there is no file or folder {shown}")
    kind = [suffix for suffix in place.suffixes if suffix != ".gz"][-1:]
    return {"sha256": digest(place), "kind": "".join(kind)}


def describe_model(settings: ModelSettings) -> dict[str, Any]:
    """A package by name and version, a folder by content, a hub model by id and revision."""
    folder = model_folder(settings.model)
    if settings.model.startswith(PACKAGE_PREFIX):
        name = settings.model.removeprefix(PACKAGE_PREFIX)
        return {"package": name, "version": metadata.version(name)}
    if folder is None:
        return {"hub": settings.model, "revision": settings.revision}
    # configuration, vocabulary in all its forms, weights, and code that may come with them
    patterns = (
        "*.json",
        "*.txt",
        "*.model",
        "*.spm",
        "*.safetensors",
        "*.py",
        "1_Pooling/config.json",
    )
    files = [file for pattern in patterns for file in sorted(folder.glob(pattern))]
    return {"files": {p.relative_to(folder).as_posix(): digest(p) for p in files}}


def describe_packages(packages: list[str] | None) -> dict[str, Any]:
    """Versions of the packages whose documentation is read, and of Python."""
    try:
        if packages is None:
            versions = {str(d.metadata["Name"]): d.version for d in metadata.distributions()}
        else:
            versions = {name: metadata.version(name) for name in packages}
    except metadata.PackageNotFoundError as error:
        raise UserError(
            f"sentences.packages: '{error.name}' is not installed in this Python; "
            "install it or take it off the list"
        ) from None
    return {"packages": versions, "python": platform.python_version()}
