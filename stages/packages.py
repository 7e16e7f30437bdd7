"""What installed Python packages give: extras that a recipe needs, and data that a package carries.

A package with a model is read as data: its folder is found through its list of files, and no code
of it is imported. The packages in `stages/pinned.py` are re-uploads by third parties; every file in
their folders is compared with its digest before anything of it is used.
"""

import re
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from stages.content import digest
from stages.errors import UserError
from stages.pinned import PINNED

# Extras of pyproject.toml that settings may ask for, and the modules they bring.
EXTRAS: dict[str, tuple[str, ...]] = {
    "deepspeed": ("deepspeed", "ninja"),
    "tune": ("optuna", "aiohttp_cors"),  # the latter: ray[default]
    "cluster": ("aiohttp_cors", "obstore"),
    "rewrites": ("aiohttp", "py3langid", "rapidfuzz"),
    "endpoints": ("aiohttp",),
    "translation": ("ctranslate2", "sacremoses", "sentencepiece"),
    "hub": ("datasets",),
    "mteb": ("mteb",),
    "negation": ("spacy",),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "openvino": ("onnx", "onnxscript", "openvino", "nncf"),
}


def need(extra: str, what: str, *modules: str) -> None:
    """Checks that an extra is installed. Imports nothing of it.

    Args:
        what: what needs it, e.g. a setting with its value; starts the message.
        modules: those of the extra's modules that are needed; all if not given.

    Raises:
        UserError: a module is missing; with the command that installs the extra.
    """
    missing = [name for name in modules or EXTRAS[extra] if find_spec(name) is None]
    if missing:
        raise UserError(
            f"{what} needs packages that are not installed ({', '.join(missing)}); install them "
            f"with: pip install 'sentray[{extra}]'"
        )


def carried_folder(package: str, marker: str) -> Path | None:
    """The folder with a file called `marker` in an installed package, checked if it is pinned.

    Returns:
        None where the package carries no such file.

    Raises:
        PackageNotFoundError: the package is not installed.
        UserError: the package is pinned, and its version or a file in the folder is another.
    """
    distribution = metadata.distribution(package)
    for file in distribution.files or []:
        if file.name == marker:
            folder = Path(str(file.locate())).parent
            _check_pinned(package, distribution.version, folder)
            return folder
    return None


def _check_pinned(package: str, version: str, folder: Path) -> None:
    pin = PINNED.get(re.sub(r"[-_.]+", "-", package).lower())  # PEP 503: one name, many spellings
    if pin is None:
        return
    again = f"pip install --force-reinstall --no-deps {package}=={pin.version}"
    if version != pin.version:
        raise UserError(
            f"package {package}: its version is {version}, but only the files of {pin.version} are "
            f"known here, so it is not used. Install that one: {again}"
        )
    found = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    if found.keys() != pin.sha256.keys():
        differing = ", ".join(sorted(found.keys() ^ pin.sha256.keys()))
        raise UserError(
            f"package {package} {version} ({folder}): files were added or are missing "
            f"({differing}), so it is not used. Install it again: {again}"
        )
    for name, expected in pin.sha256.items():
        actual = digest(found[name])
        if actual != expected:
            raise UserError(
                f"package {package} {version}: {found[name]} has the SHA-256 {actual}, but "
                f"{expected} is expected; it was changed, so it is not used. Install it again: "
                f"{again}"
            )
