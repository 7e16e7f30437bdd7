"""The modules in a model's folder, by sentence-transformers' files. Imports no torch."""

from dataclasses import dataclass, replace
from pathlib import Path

from stages.encoder.files import read_json, read_modules, reads_as_chat
from stages.errors import UserError


@dataclass(frozen=True)
class Pipeline:
    """What a model does to the states of its tokens.

    pooling: as `EncoderSettings.pooling` names it; "" where nothing is said. dense: folders of the
    Dense modules behind it. unknown: what of it only sentence-transformers computes; "" for
    nothing. once_unseen: whether that was once not looked at, so that what was made with the model
    then is another artifact.
    """

    pooling: str = ""
    dense: tuple[str, ...] = ()
    unknown: str = ""
    once_unseen: bool = False


# What our own encoder computes: poolings by sentence-transformers' older and newer words, and the
# activations of Dense modules.
POOLINGS = {
    "cls_token": "cls", "cls": "cls", "mean_tokens": "mean", "mean": "mean", "lasttoken": "last",
}  # fmt: skip
TRUSTED = "sentence_transformers."  # modules that come with the library, not with a model
# Of sentence_bert_config.json, beside do_lower_case: what changes how texts are read, or a model.
NEWER = (
    "processing_kwargs", "processor_kwargs", "tokenizer_args", "config_kwargs", "config_args",
    "query_length", "document_length", "query_expansion",
)  # fmt: skip
STATES = "token_embeddings"
ACTIVATIONS = ("torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Tanh")


def read_pipeline(folder: Path) -> Pipeline:
    """The pipeline in a model's folder; `sentray.json` is of students that were trained here."""
    found = _modules_of(folder)
    newer = "" if found.unknown or not read_modules(folder) else _newer(folder)
    return replace(found, unknown=newer, once_unseen=True) if newer else found


def _modules_of(folder: Path) -> Pipeline:
    own, modules = read_json(folder / "sentray.json"), read_modules(folder)
    dense = tuple(one["path"] for one in modules if one["type"].endswith(".Dense"))
    foreign = [one["type"] for one in modules if not one["type"].startswith(TRUSTED)]
    if foreign:
        return Pipeline(unknown=f"the module {foreign[0]}")
    if own:  # an export has our mask pooling as word weights
        return Pipeline(own.get("pooling", ""), dense or tuple(own.get("dense", ())))
    if not modules:  # nor a pipeline that sentence-transformers would know
        return replace(_pooled(folder / "1_Pooling", ()), unknown="")
    kinds = [one["type"].rpartition(".")[2] for one in modules]
    ours = ["Transformer", "Pooling", *["Dense"] * len(dense), "Normalize"]
    if [kind for kind in kinds if kind != "Dropout"] not in (ours, ours[:-1]) or modules[0]["path"]:
        return Pipeline(unknown=f"the modules {', '.join(kinds)}")
    unknown = [_unknown_input(folder), *(_unknown_dense(folder / path) for path in dense)]
    found = _pooled(folder / modules[kinds.index("Pooling")]["path"], dense)
    return replace(found, unknown=next(filter(None, [*unknown, found.unknown]), ""))


def normalizes(folder: Path) -> bool:
    """Whether sentence-transformers' vectors of a model have length 1 as they come, as those of
    students have that were trained here, once they are exported."""
    modules = read_modules(folder)
    own = (folder / "sentray.json").exists()
    return own or any(one["type"].endswith(".Normalize") for one in modules)


def _pooled(folder: Path, dense: tuple[str, ...]) -> Pipeline:
    config = read_json(folder / "config.json")
    given = config.get("pooling_mode") or [
        key.removeprefix("pooling_mode_")
        for key, chosen in config.items()
        if key.startswith("pooling_mode_") and chosen is True
    ]
    modes = [given] if isinstance(given, str) else given
    if len(modes) != 1 or modes[0] not in POOLINGS:
        return Pipeline("", dense, f"pooling {' and '.join(modes)}" if modes else "")
    if not config.get("include_prompt", True):
        return Pipeline("", dense, "pooling without the prompt's tokens")
    return Pipeline(POOLINGS[modes[0]], dense)


def _unknown_input(folder: Path) -> str:
    config = read_json(folder / "sentence_bert_config.json")
    text = (config.get("modality_config") or {}).get("text") or {}
    states = text.get("method", "forward"), text.get("method_output_name", "last_hidden_state")
    if config.get("do_lower_case"):
        return "do_lower_case"
    if states != ("forward", "last_hidden_state"):
        return f"token states from {'.'.join(states)}"
    if read_json(folder / "config.json").get("is_encoder_decoder"):
        return "the encoder of an encoder-decoder"
    return ""


def _newer(folder: Path) -> str:
    """As `unknown` of a pipeline, of options that came to sentence-transformers later."""
    config = read_json(folder / "sentence_bert_config.json")
    task = config.get("transformer_task", "feature-extraction")
    if options := [name for name in NEWER if config.get(name)]:
        return options[0]
    if task != "feature-extraction" or config.get("module_output_name", STATES) != STATES:
        return f"{task} with {config.get('module_output_name', STATES)}"
    if reads_as_chat(folder):
        return "a chat template, through which it reads texts"
    width = cut_to(folder)
    return f"truncate_dim: {width}" if width else ""


def cut_to(folder: Path) -> int | None:
    """Dimensions that sentence-transformers cuts a model's vectors to; None for all."""
    width: int | None = read_json(folder / "config_sentence_transformers.json").get("truncate_dim")
    return width


def _unknown_dense(folder: Path) -> str:
    config = read_json(folder / "config.json")
    if not {"in_features", "out_features"} <= config.keys():
        raise UserError(f"{folder}: no config.json of a Dense module")
    names = {config.get(f"module_{way}_name") for way in ("input", "output")}
    if names - {None, "sentence_embedding"} or config.get("use_residual"):
        return "a Dense module with a residual, or of other features"
    activation = config.get("activation_function", ACTIVATIONS[1])
    return "" if activation in ACTIVATIONS else f"a Dense module with {activation}"
