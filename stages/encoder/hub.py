"""Models of the Hugging Face hub: the commit that a run reads, and their files. Imports no torch.

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

COMMITS = "SENTRAY_COMMITS"
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
    """The commit that a revision is now: the hub's, or where it cannot be asked the cache's.

    Raises:
        UserError: the model is not to be had.
    """
    if _COMMIT.fullmatch(revision):
        return revision
    return hub_folder(model, revision, ["config.json", "modules.json"]).name


def cached_commit(model: str, revision: str) -> str | None:
    """The commit that a revision is in this machine's cache; asks nobody."""
    from huggingface_hub.constants import HF_HUB_CACHE

    file = Path(HF_HUB_CACHE, f"models--{model.replace('/', '--')}", "refs", revision)
    try:
        return file.read_text(encoding="utf-8").strip() or None
    except (OSError, ValueError):
        return None


def models_in(identity: Any) -> set[tuple[str, str]]:
    """Models of the hub that a node's identity names, with their revisions."""
    if isinstance(identity, dict):
        if identity.keys() == {"hub", "revision"}:
            return {(identity["hub"], identity["revision"])}
        identity = list(identity.values())
    if isinstance(identity, list):
        return {one for value in identity for one in models_in(value)}
    return set()


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
