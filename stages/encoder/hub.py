"""Models and data sets of the Hugging Face hub: the commit that a run reads, and models' files.
Imports no torch.

A revision such as `main` may move, while a run works or between two of its machines. So a run
settles on commits before it starts, all of its processes read these (the environment variable
SENTRAY_COMMITS, which Ray hands on), and manifests keep them.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stages.errors import UserError
from stages.packages import need

COMMITS = "SENTRAY_COMMITS"
DATA_SETS, MAIN = "datasets/", "main"
_COMMIT = re.compile("[0-9a-f]{40}")


def named(model: str, revision: str) -> str:
    """What a commit is settled for, and kept under."""
    return f"{model}@{revision}"


@contextmanager
def reading(commits: Mapping[str, str]) -> Iterator[None]:
    """Within it this process and those that it starts read these commits, by `named`."""
    before = os.environ.get(COMMITS)
    os.environ[COMMITS] = json.dumps(dict(commits))
    try:
        yield
    finally:
        if before is None:
            del os.environ[COMMITS]
        else:
            os.environ[COMMITS] = before


def settled() -> dict[str, str]:
    """The commits that this process reads."""
    return dict(json.loads(os.environ.get(COMMITS, "{}")))


def commit_of(model: str, revision: str) -> str:
    """What to ask for: the commit that the run has settled on, else the revision itself."""
    return settled().get(named(model, revision), revision)


def settle(model: str, revision: str) -> str:
    """The commit that a revision is now: the hub's, or where it cannot be asked, and for models
    only, the cache's.

    Args:
        model: or a data set, as `data_set` calls it.

    Raises:
        UserError: it is not to be had.
    """
    if _COMMIT.fullmatch(revision):
        return revision
    if model.startswith(DATA_SETS):
        return _commit_of_data_set(model.removeprefix(DATA_SETS), revision)
    return hub_folder(model, revision, ["config.json", "modules.json"]).name


def data_set(name: str) -> str:
    """What a data set is called among the models: it may have a model's name."""
    return f"{DATA_SETS}{name}"


def _commit_of_data_set(name: str, revision: str) -> str:
    need("hub", f"data set '{name}'")
    from huggingface_hub import HfApi

    try:
        found = HfApi().dataset_info(name, revision=revision).sha
    except Exception as error:  # of whichever HTTP client that package uses
        raise UserError(
            f"data set '{name}': the hub does not say what it is ({type(error).__name__}). Check "
            "the name and the network; offline, use files or a local folder."
        ) from None
    return found or revision


def cached_commit(model: str, revision: str) -> str | None:
    """The commit that a revision is in this machine's cache; asks nobody."""
    from huggingface_hub.constants import HF_HUB_CACHE

    file = Path(HF_HUB_CACHE, f"models--{model.replace('/', '--')}", "refs", revision)
    try:
        return file.read_text(encoding="utf-8").strip() or None
    except (OSError, ValueError):
        return None


def models_in(identity: Any) -> set[tuple[str, str]]:
    """Models and data sets of the hub that a node's identity names, with their revisions."""
    found: set[tuple[str, str]] = set()
    if isinstance(identity, dict):
        if identity.keys() == {"hub", "revision"}:
            return {(identity["hub"], identity["revision"])}
        for name, value in identity.items():
            # a local one is described by its files
            if name.rpartition(".")[2] == "dataset" and isinstance(value, str):
                found.add((data_set(value), MAIN))
        identity = list(identity.values())
    if isinstance(identity, list):
        found.update(one for value in identity for one in models_in(value))
    return found


def hub_folder(
    model: str, revision: str, wanted: list[str] | None = None, unwanted: list[str] | None = None
) -> Path:
    """The hub's cache of a model, these files of it fetched if they can be.

    Raises:
        UserError: it is not to be had.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    error = "no model in its folder"
    try:
        found = Path(
            snapshot_download(
                model, revision=revision, allow_patterns=wanted, ignore_patterns=unwanted
            )
        )
        if any((found / name).is_file() for name in ("modules.json", "config.json")):
            return found
    except (OSError, HfHubHTTPError, HFValidationError, ValueError) as raised:
        error = type(raised).__name__
    raise UserError(
        f"model '{model}': not in the Hugging Face cache, and cannot be fetched from the hub "
        f"({error}). Check the name and the network; offline, use a cached model, a local folder "
        "or package:NAME."
    )
