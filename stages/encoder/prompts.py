"""What an encoder puts before a query and before a document. Imports no torch."""

from pathlib import Path
from typing import Any, TypeVar

from stages.encoder.config import described_in, resolved
from stages.encoder.files import read_json, read_prompts
from stages.encoder.settings import EncoderSettings
from stages.errors import UserError
from stages.kinds import KINDS, Kind

E = TypeVar("E", bound=EncoderSettings)

# A model's own prompts by kind: the names that sentence-transformers' encode_query and
# encode_document look for, in their order. Its `document` is there in every folder that it saves
# (version 5 on), empty where a model says `passage`; so the first one that is not empty counts.
NAMES: dict[Kind, tuple[str, ...]] = {
    "query": ("query",),
    "document": ("document", "passage", "corpus"),
}


def kind_prompts(settings: EncoderSettings) -> dict[Kind, str]:
    """The prompt of every kind; {} where there are none.

    They are `prompts` or `prompt_names` of the settings or, with pooling auto or pipeline and
    nothing else set, the model's own. A kind that has none has the prompt of all sentences.

    Raises:
        UserError: see `resolved`; the model has no prompt of that name, or a template.
    """
    if settings.is_static or settings.template is not None:
        return {}
    found = resolved(settings)
    asked = settings.given("prompts", "prompt_names")
    if found.template is not None:
        if asked:
            raise UserError(
                f"model '{settings.model}': its sentray.json sets a template, which stands around "
                f"every sentence; leave {asked[0]} out here"
            )
        return {}
    texts = dict(settings.prompts)
    if settings.prompt_names:
        texts = _named(settings)
    elif not asked and _reads_own(settings):
        texts = own_prompts(described_in(settings))
    everyone = found.prompt or ""
    whole = {kind: texts.get(kind, everyone) for kind in KINDS}
    return whole if any(whole.values()) else {}


def with_kind_prompts(settings: E) -> E:
    """The settings with `kind_prompts` as their `prompts`."""
    found = {"prompts": kind_prompts(settings), "prompt_names": {}}
    return settings.model_copy(update=found)


def own_prompts(folder: Path) -> dict[Kind, str]:
    """The prompts by kind that a model's files declare."""
    declared = _declared(folder)
    found: dict[Kind, str] = {}
    for kind in KINDS:
        texts = [str(declared[name] or "") for name in NAMES[kind] if name in declared]
        if texts:
            found[kind] = next(filter(None, texts), "")
    return found


def prompts_left_out(settings: EncoderSettings) -> str:
    """A warning, where a model has prompts for queries and documents and the settings, without a
    word about prompts, take its transformer alone; else ""."""
    around = settings.given("prompt", "prompt_name", "prompts", "prompt_names", "template")
    if around or settings.is_static or _reads_own(settings):
        return ""
    own = {kind: text for kind, text in own_prompts(described_in(settings)).items() if text}
    if not own:
        return ""
    return (
        f"WARNING: model '{settings.model}' has prompts for sentences of two kinds ({own}), and "
        f"pooling: {settings.pooling} leaves them out; set prompts, or pooling: auto"
    )


def _reads_own(settings: EncoderSettings) -> bool:
    whole = settings.pooling in ("auto", "pipeline")
    return whole and not settings.given("prompt", "prompt_name")


def _named(settings: EncoderSettings) -> dict[Kind, str]:
    declared = _declared(described_in(settings))
    for name in settings.prompt_names.values():
        if name not in declared:
            known = ", ".join(declared) or "none"
            raise UserError(
                f"model '{settings.model}': it has no prompt '{name}'; it has: {known}. Give the "
                "texts as `prompts` instead"
            )
    return {kind: str(declared[name]) for kind, name in settings.prompt_names.items()}


def _declared(folder: Path) -> dict[str, Any]:
    """All prompts by name; `sentray.json` is of students that were trained here."""
    return {**read_prompts(folder), **read_json(folder / "sentray.json").get("prompts", {})}
