"""A model folder cut to some tokens: rows of its embeddings, its configuration, its tokenizer.

All else is as it was, file by file, so that the folder is used as the whole model's is.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from stages.encoder.config import position_offset
from stages.encoder.files import READ, model_folder, read_files, read_json
from stages.encoder.hub import hub_folder
from stages.encoder.settings import ModelSettings
from stages.encoder.tokenizer import readable_errors
from stages.errors import UserError
from stages.vocabulary.tokenizer import WHERE, CutTokenizer

WEIGHTS = "model.safetensors"
# Written anew, or about generating text; a tokenizer in its older forms has the whole vocabulary
NOT_COPIED = ("config.json", "generation_config.json", "special_tokens_map.json", "vocab.json",
              "added_tokens.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt",
              "merges.txt", f"{WEIGHTS}.index.json")  # fmt: skip
VOCABULARIES = (".model", ".spm", ".safetensors")


def whole_folder(settings: ModelSettings) -> Path:
    """The folder with all files of a model; may ask the hub.

    Raises:
        UserError: it is not to be had.
    """
    return model_folder(settings.model) or hub_folder(
        settings.model, settings.commit, [*READ], ["onnx/*", "openvino/*"]
    )


def required_ids(folder: Path) -> set[int]:
    """Ids that the model's configuration names, and those that its positions are counted from."""
    config = read_json(folder / "config.json")
    found = {one for ids in _token_ids(config).values() for one in ids}
    return found | {*range(position_offset(config))}  # the padding's, and all before it


def cut_model(settings: ModelSettings, tokenizer: CutTokenizer, target: Path) -> tuple[int, int]:
    """Writes the model to `target`, without a tokenizer.

    Returns:
        rows and width of the whole table of token embeddings.

    Raises:
        UserError: tokens without an embedding, or weights that are not understood.
    """
    folder = whole_folder(settings)
    _copy_the_rest(folder, target)
    config = read_json(folder / "config.json")
    new = tokenizer.new_ids
    for key, ids in _token_ids(config).items():
        kept = [new[one] for one in ids if one in new]
        config[key] = kept if isinstance(config[key], list) else next(iter(kept), None)
    config["vocab_size"] = len(tokenizer.kept)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    name, own = _embedding(settings, folder)
    weights = dict(_tensors(folder))
    keys = [key for key in weights if key == name or key.endswith(f".{name}")]
    if len(keys) != 1:
        raise UserError(
            f"{WHERE}: model '{settings.model}' has {len(keys)} tables of token embeddings called "
            f"'{name}' among its weights, and needs one; leave `vocabulary` out"
        )
    prefix, table = keys[0].removesuffix(name), weights[keys[0]]
    rows = len(table)
    if tokenizer.kept.max() >= rows:
        raise UserError(
            f"{WHERE}: the tokenizer of model '{settings.model}' has the token number "
            f"{tokenizer.kept.max():,}, and its table of embeddings only {rows:,} rows; they do "
            "not belong together"
        )
    index = torch.from_numpy(tokenizer.kept).long()
    for key, tensor in weights.items():
        # outside of the encoder, what has a row for each token is a head over the vocabulary
        is_head = not (key.startswith(prefix) and key.removeprefix(prefix) in own)
        if key == keys[0] or (is_head and tensor.ndim and len(tensor) == rows):
            weights[key] = tensor[index].contiguous()
    save_file(weights, target / WEIGHTS, {"format": "pt"})
    return rows, table.shape[1]


def _copy_the_rest(folder: Path, target: Path) -> None:
    target.mkdir(parents=True)
    for file in read_files(folder):
        here = file.relative_to(folder)
        is_top = file.parent == folder
        if not is_top or (file.name not in NOT_COPIED and file.suffix not in VOCABULARIES):
            (target / here).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target / here)


def _token_ids(config: dict[str, Any]) -> dict[str, list[int]]:
    """Ids of tokens in a config.json, by key."""
    found = {}
    for key, value in config.items():
        ids = value if isinstance(value, list) else [value]
        if key.endswith("_token_id") and all(type(one) is int for one in ids):
            found[key] = ids
    return found


def _embedding(settings: ModelSettings, folder: Path) -> tuple[str, set[str]]:
    """Name of the table of token embeddings in the encoder, and names of all its weights."""
    from transformers import AutoConfig, AutoModel

    trust = settings.trust_remote_code
    with readable_errors(settings.model):
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust)
        with torch.device("meta"):
            model = AutoModel.from_config(config, trust_remote_code=trust)
    table = model.get_input_embeddings().weight
    (name,) = (name for name, one in model.named_parameters() if one is table)
    return name, set(model.state_dict())


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The weights that transformers reads, by name."""
    shards = read_json(folder / f"{WEIGHTS}.index.json").get("weight_map")
    for file in sorted({*shards.values()}) if shards else [WEIGHTS]:
        with safe_open(folder / file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - it is no dictionary
                yield name, weights.get_tensor(name)
