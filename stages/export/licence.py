"""Licences of models, as their cards state them: the front matter of README.md."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from stages.encoder.files import model_folder
from stages.encoder.settings import ModelSettings
from stages.encoder.source import EncoderSource
from stages.settings import bare_name

UNKNOWN = "unknown"
# of a model card's front matter; the latter two where the licence is `other`
KEYS = ("license", "license_name", "license_link")


@dataclass(frozen=True)
class Origin:
    """A model that the student comes from.

    what: `base model`, or `teacher NAME`. settings: None where there is no model to look at.
    known_as: then its name, if it has one.
    """

    what: str
    settings: ModelSettings | None
    known_as: str = ""


def origin(what: str, source: EncoderSource[Any]) -> Origin:
    """The model that an encoder was before any recipe trained it."""
    training: Any = source.training  # stages.train.stage.Train
    while training is not None:
        source = training.student
        training = source.training
    return Origin(what, source.settings)


def licences(origins: tuple[Origin, ...]) -> list[dict[str, str]]:
    """What each model's card says: `what`, `model`, and those of KEYS that it has."""
    found = []
    for one in origins:
        model = bare_name(one.settings.model) if one.settings else one.known_as
        stated = _stated(one.settings) if one.settings else {}
        found.append({"what": one.what, "model": model, **stated})
    return found


def front_matter(card: str) -> dict[str, Any]:
    """The YAML between the first two lines `---`; nothing where it cannot be read."""
    lines = card.splitlines()
    if not lines or lines[0].strip() != "---":
        return {}
    end = next((i for i, line in enumerate(lines) if i and line.strip() == "---"), None)
    if end is None:
        return {}
    try:
        found = yaml.safe_load("\n".join(lines[1:end]))
    except (yaml.YAMLError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _stated(settings: ModelSettings) -> dict[str, str]:
    card = _card_of(settings)
    try:
        text = card.read_text(encoding="utf-8-sig", errors="replace") if card else ""
    except OSError:
        return {}
    stated = front_matter(text)
    values = {key: stated[key] for key in KEYS if stated.get(key)}
    listed = {k: ", ".join(map(str, v)) if isinstance(v, list) else v for k, v in values.items()}
    found = {key: " ".join(str(value).split()) for key, value in listed.items()}
    return found if "license" in found else {}


def _card_of(settings: ModelSettings) -> Path | None:
    folder = model_folder(settings.model)
    if folder is not None:
        return folder / "README.md"
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(hf_hub_download(settings.model, "README.md", revision=settings.commit))
    except (OSError, HfHubHTTPError, ValueError):
        return None  # no card, or no way to the hub: said as unknown
