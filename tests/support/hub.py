"""A cache of the Hugging Face hub, as its client leaves it."""

import shutil
from pathlib import Path


def put_on_hub(cache: Path, model: str, folder: Path, commit: str = "0" * 40) -> None:
    """Puts a folder under an id: as that commit, to which `main` then leads."""
    place = cache / f"models--{model.replace('/', '--')}"
    (place / "refs").mkdir(parents=True, exist_ok=True)
    (place / "refs" / "main").write_text(commit)
    shutil.copytree(folder, place / "snapshots" / commit)
