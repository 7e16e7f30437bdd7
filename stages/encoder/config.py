"""What a model's own files say of how it is used, compared with the settings. Imports no torch."""

from pathlib import Path
from typing import Any, TypeVar

from stages.encoder.files import model_folder, read_json, read_modules, read_prompts
from stages.encoder.hub import hub_folder
from stages.encoder.modules import TRUSTED, read_pipeline
from stages.encoder.settings import LONGEST, EncoderSettings, ModelSettings
from stages.errors import UserError

S = TypeVar("S", bound=EncoderSettings)

# Pre-tokenizers that drop white space, so that no token has any in it
DROPS_SPACES = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit"}
# Under what names types of models have their sizes in config.json
LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
WIDTHS = ("hidden_size", "dim", "n_embd", "d_model")
POSITIONS = "max_position_embeddings"


def space_is_part_of_a_token(settings: EncoderSettings) -> bool:
    """Whether the template's space before the sentence may be part of the sentence's first token.

    So it is in byte-level tokenizers (RoBERTa) and in most SentencePiece ones. Read from the
    model's files; of hub ids, which must be judged before anything is loaded, only those of
    Google's BERT are known to have word pieces, and all others may.

    Raises:
        UserError: see `model_folder`.
    """
    template = settings.template
    folder = local_folder(settings)
    if folder and template is None:
        template = read_json(folder / "sentray.json").get("template")
    before = (template or "").partition("{sentence}")[0]
    if before == before.rstrip():
        return False
    if folder is None:
        return not settings.model.startswith(("google-bert/", "bert-"))
    file = folder / "tokenizer.json"
    if not file.is_file():
        return not (folder / "vocab.txt").is_file()
    splitter = read_json(file).get("pre_tokenizer") or {}
    kinds = {one.get("type") for one in [splitter, *splitter.get("pretokenizers", [])]}
    return not kinds & DROPS_SPACES


def kept_layers(settings: EncoderSettings, config: dict[str, Any]) -> list[int] | None:
    """Which of a model's layers are kept; None for all.

    Raises:
        UserError: more than there are.
    """
    total, kinds = num_layers(config), layer_kinds(config)
    chosen = settings.layers
    if not isinstance(chosen, int):
        return chosen
    if chosen > total:
        raise UserError(
            f"layers={chosen}: model '{settings.model}' has only {total}; keep fewer, or all"
        )
    last = total - 1
    even = [last] * chosen if chosen < 2 else [last * i // (chosen - 1) for i in range(chosen)]
    return _of_their_kinds(even, kinds) if even and kinds else even


def layer_kinds(config: dict[str, Any]) -> list[str]:
    """Kinds of attention of a model's layers, in order; [] where all are alike.

    Files of ModernBERT and Gemma 3 may have the rule alone that transformers derives them by.
    """
    layers = range(num_layers(config))
    kinds = list(config.get("layer_types") or ())[: len(layers)]
    if not kinds and (every := config.get("global_attn_every_n_layers")):
        kinds = ["sliding_attention" if i % every else "full_attention" for i in layers]
    if not kinds and (every := config.get("sliding_window_pattern")):
        kinds = ["sliding_attention" if (i + 1) % every else "full_attention" for i in layers]
    return kinds if len(set(kinds)) > 1 else []


def _of_their_kinds(even: list[int], kinds: list[str]) -> list[int]:
    """The layers nearest to `even` of which each is of the kind that its new place has.

    Where older versions of transformers know kinds by place alone, the student is the same so.
    The first is layer 0, which may be built otherwise (ModernBERT's has no norm before attention).
    """
    best = {0: (0, [0])}  # by the last layer taken: how far they are from `even`, and which
    for place, wanted in enumerate(even[1:], start=1):
        best = {
            layer: min(
                (far + abs(layer - wanted), [*taken, layer])
                for before, (far, taken) in best.items()
                if before < layer
            )
            for layer in range(min(best) + 1, len(kinds))
            if kinds[layer] == kinds[place]
        }
    return min(best.values())[1]


def num_layers(config: dict[str, Any]) -> int:
    """Layers of a model by its config.json; 0: none."""
    return int(next((config[name] for name in LAYERS if config.get(name) is not None), 0))


def state_width(config: dict[str, Any]) -> int | None:
    """Width of a model's token states by its config.json; None where it says none."""
    return next((int(config[name]) for name in WIDTHS if config.get(name)), None)


def check_config(settings: EncoderSettings, config: dict[str, Any]) -> None:
    """Compares settings with a model's config.json, before anything heavy is loaded.

    Raises:
        UserError: a layer that is not there, layers that cannot be kept or have no place of their
            kind, an encoder-decoder, more tokens than the model has positions.
    """
    model = f"model '{settings.model}'"
    if config.get("is_encoder_decoder") and settings.pooling not in ("auto", "pipeline"):
        raise UserError(
            f"{model} is an encoder-decoder, of which only a whole sentence-transformers pipeline "
            "is read here, as a teacher's; leave pooling out, or choose an encoder or a decoder"
        )
    total, kinds = num_layers(config), layer_kinds(config)
    layers = kept_layers(settings, config) if total else None
    if layers and max(layers) >= total:
        raise UserError(f"layers={layers}: {model} has layers 0 to {total - 1}")
    if layers and config.get("num_hidden_groups"):
        raise UserError(
            f"layers={layers}: the layers of {model} share their weights, so none can be taken "
            "out; leave layers out, or choose another model"
        )
    if layers and kinds and (layers[0] or any(kinds[i] != kinds[p] for p, i in enumerate(layers))):
        fitting = _of_their_kinds(layers, kinds)
        raise UserError(
            f"layers={layers}: the layers of {model} differ by position ({', '.join(kinds)}). "
            "Layer 0 must be the first, and each of the kind of its new place, as "
            f"{fitting} are; `layers: {len(layers)}` chooses by itself"
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
    positions = config.get(POSITIONS)
    return None if positions is None else positions - position_offset(config)


def tokens_read(folder: Path) -> int:
    """Tokens that sentence-transformers reads of a text with the model in a folder, at most
    LONGEST, and the usual number where its files do not say; newer versions write it down with the
    tokenizer."""
    place = folder / next((one["path"] for one in read_modules(folder)), "")
    names = {"sentence_bert_config": "max_seq_length", "tokenizer_config": "model_max_length"}
    told = (_with_sizes(place / f"{file}.json", key).get(key) for file, key in names.items())
    positions = num_positions(_with_sizes(place / "config.json", POSITIONS))
    length = next((length for length in told if length), None)
    bounds = [bound for bound in (length, positions) if bound is not None]
    usual = EncoderSettings.model_fields["max_length"].default
    return int(min(*bounds, LONGEST) if bounds else usual)


def described_in(settings: ModelSettings) -> Path:
    """The folder with a model's configuration: its own, or the hub's cache of its JSON files.

    Raises:
        UserError: it is not to be had.
    """
    folder = model_folder(settings.model)
    if folder is not None:
        return folder
    return hub_folder(settings.model, settings.commit, ["*.json"], ["onnx/*", "openvino/*"])


def model_config(settings: ModelSettings) -> dict[str, Any]:
    """config.json of a model that is there already; {} where it has none. May ask the hub.

    Raises:
        UserError: the model is not to be had, or a size in the file is no number.
    """
    return config_in(described_in(settings))


def config_in(folder: Path) -> dict[str, Any]:
    """config.json of a model's folder; {} where it has none.

    Raises:
        UserError: a size in the file is no number.
    """
    return _with_sizes(folder / "config.json", *LAYERS, *WIDTHS, POSITIONS)


def _with_sizes(file: Path, *names: str) -> dict[str, Any]:
    found = read_json(file)
    for name in names:
        if isinstance(size := found.get(name), str | list | dict):
            raise UserError(f"{file}: not readable, as {name} is {size!r}, which is no number")
    return found


def resolved(settings: S) -> S:
    """Settings in which the model's own files have filled in pooling, prompt and template.

    `sentray.json` (a student trained here) names pooling, template, prompt and period rule;
    sentence-transformers' files name modules and prompts.

    Raises:
        UserError: the model names no pooling, not this prompt, or modules that cannot be trained.
    """
    if settings.is_static:  # a table reads the tokens of the sentence alone
        whole = resolved(settings.model_copy(update={"layers": None}))
        if whole.pooling == "pipeline":
            _check_whole(settings, "sentence-transformers computes the whole of it")
        bare: dict[str, Any] = {"template": None, "final_period": "keep", "prompt": None}
        return whole.model_copy(update=bare | {"layers": 0, "pooling": "mean"})
    if settings.pooling not in ("auto", "pipeline") and settings.prompt_name is None:
        return settings
    folder = described_in(settings)
    found: dict[str, Any] = {"prompt": _prompt(settings, folder), "prompt_name": None}
    if settings.pooling == "pipeline":
        _check_whole(settings, "pooling: pipeline was asked for")
    if settings.pooling != "auto":
        return settings.model_copy(update=found)
    pipeline, own = read_pipeline(folder), read_json(folder / "sentray.json")
    if own:
        around = settings.given("template", "final_period", "prompt", "prompt_name")
        if around and (own.get("template") or around[0] in ("template", "final_period")):
            raise UserError(
                f"model '{settings.model}': its sentray.json sets template and final period; "
                f"leave {around[0]} out here, or set pooling as well to replace them"
            )
        found |= {key: own[key] for key in ("template", "final_period") if key in own}
    found["pooling"] = pipeline.pooling
    if settings.encode_arguments:
        found["pooling"] = "pipeline"
        _check_whole(settings, "encode_arguments are for sentence-transformers")
    elif pipeline.unknown:
        found["pooling"] = "pipeline"
        if settings.trained:
            alone = "set pooling to cls, mean, last or mask to train its transformer alone"
            if read_json(folder / "config.json").get("is_encoder_decoder"):
                alone = "choose an encoder or a decoder"
            raise UserError(
                f"student.model '{settings.model}': its pipeline has {pipeline.unknown}, which "
                f"cannot be trained here; {alone}"
            )
        _check_whole(settings, f"only sentence-transformers computes {pipeline.unknown}")
    elif not pipeline.pooling:
        raise UserError(
            f"model '{settings.model}': it does not say how to pool; set pooling to cls, mean, "
            "last or mask in the recipe, or give a model that sentence-transformers has saved"
        )
    return settings.model_copy(update=found)


def _check_whole(settings: EncoderSettings, why: str) -> None:
    """Refuses what sentence-transformers' own pipeline has no place for."""
    for name in settings.given("layers", "template", "final_period"):
        raise UserError(f"model '{settings.model}': {why}, so `{name}` has no effect; leave it out")
    modules = read_modules(described_in(settings))
    if not modules:
        raise UserError(
            f"model '{settings.model}': {why}, but it is no sentence-transformers pipeline: it has "
            "no modules.json"
        )
    for one in modules:
        if not (one["type"].startswith(TRUSTED) or settings.trust_remote_code):
            raise UserError(
                f"model '{settings.model}': its module {one['type']} is Python code that comes "
                "with the model; read it, then set trust_remote_code: true to run it"
            )


def once_unseen(settings: EncoderSettings) -> str:
    """What of a local model's own files was once not looked at, so that what was made with it then
    is another artifact; "" for nothing."""
    folder = local_folder(settings)
    if folder is None or settings.pooling != "auto":
        return ""
    found = read_pipeline(folder)
    return found.unknown if found.once_unseen else ""


def local_folder(settings: EncoderSettings) -> Path | None:
    """The folder of a model that is here; None for a hub's and a recipe's.

    Raises:
        UserError: see `model_folder`.
    """
    return model_folder(settings.model) if settings.recipe_file is None else None


def is_on_hub(settings: EncoderSettings) -> bool:
    """Whether the model is neither here nor a recipe's."""
    return settings.recipe_file is None and local_folder(settings) is None


def default_prompt(settings: EncoderSettings) -> str | None:
    """The prompt that a local model has by default, where the settings leave it at that."""
    folder = local_folder(settings)
    whole = settings.pooling in ("auto", "pipeline") and not settings.is_static
    asked = settings.given("prompt", "prompt_name", "template")
    return _prompt(settings, folder) if folder and whole and not asked else None


def _prompt(settings: EncoderSettings, folder: Path) -> str | None:
    config = read_json(folder / "config_sentence_transformers.json")
    prompts = read_prompts(folder)
    name = settings.prompt_name
    if name is None:
        if settings.prompt is not None or settings.template is not None:
            return settings.prompt
        own = read_json(folder / "sentray.json").get("prompt")
        usual = config.get("default_prompt_name")
        return own or (prompts.get(usual) if isinstance(usual, str) else None)
    if name not in prompts:
        known = ", ".join(prompts) or "none"
        raise UserError(
            f"model '{settings.model}': it has no prompt '{name}'; it has: {known}. Give its text "
            "as `prompt` instead"
        )
    return str(prompts[name])
