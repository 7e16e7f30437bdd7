"""The student as a sentence-transformers folder with a model card.

The module types are written under their older names, which sentence-transformers 3 to 6 load;
writing four small files keeps its 12-second import out of the stage.

A prompt template becomes part of the exported tokenizer, which then adds it as it adds special
tokens, so that truncation shortens the sentence only. Mask pooling becomes word weights: 1 for the
mask token, 0 for all others, and the mean of that.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from stages.encoder.config import space_is_part_of_a_token, state_width
from stages.encoder.settings import LONGEST, EncoderSettings
from stages.encoder.tokenizer import (
    FINAL_PERIOD,
    SentenceTokenizer,
    readable_errors,
    rebuilt,
    save_tokenizer,
)
from stages.errors import UserError
from stages.kinds import KINDS

# Model types whose tokenizers transformers 5 builds anew from their vocabulary, without what is
# done to a text before it is split (MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS).
REBUILT = {
    "hyperclovax_vision_v2", "qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp",
    "siglip2",
}  # fmt: skip
SAMPLES = ("A cat sleeps", "Two men, a dog.")


def check_tokenizer(settings: EncoderSettings, config: dict[str, Any]) -> None:
    """Whether the student's template and final period can be part of an exported tokenizer.

    Args:
        settings: as the student is trained. config: its config.json.

    Raises:
        UserError: they cannot.
    """
    kind = config.get("model_type")
    if kind not in REBUILT:
        return
    lost = f"in the tokenizer of a {kind}, which transformers builds anew from its vocabulary"
    if settings.final_period != "keep":
        raise UserError(
            f"student.final_period: an exported student would not add a period {lost}; set "
            "final_period: keep"
        )
    if space_is_part_of_a_token(settings):
        raise UserError(
            "student.template: the space before {sentence} is part of the sentence's first token, "
            f"and an exported student would not have it {lost}; write none there"
        )


def export_student(
    model: Path, tokenizer: SentenceTokenizer, max_length: int, card: str, target: Path
) -> None:
    """Writes `target`, loadable with SentenceTransformer(target).

    Args:
        model: folder with backbone and tokenizer, as training wrote it.
        tokenizer: the student's, with its template.
        max_length: tokens read of a sentence when used, as in the evaluation.
        card: the model card, Markdown.

    Raises:
        UserError: transformers would read the folder's tokenizer as another one.
    """
    shutil.copytree(model, target)
    config = json.loads((model / "config.json").read_text())
    settings = tokenizer.settings
    dense = sorted(model.glob("*_Dense"))
    modules = ["Transformer", "Pooling", *["Dense"] * len(dense), "Normalize"]
    if settings.pooling == "mask":
        modules.insert(1, "WordWeights")
        _write_mask_weights(tokenizer, _module_folder(target, modules, "WordWeights"))
    pooling = _module_folder(target, modules, "Pooling")
    _write(
        pooling / "config.json",
        {
            "word_embedding_dimension": state_width(config),
            "pooling_mode_cls_token": settings.pooling == "cls",
            "pooling_mode_mean_tokens": settings.pooling in ("mean", "mask"),
            "pooling_mode_max_tokens": False,
            "pooling_mode_mean_sqrt_len_tokens": False,
            "pooling_mode_lasttoken": settings.pooling == "last",
        },
    )
    paths = [f"{i}_{kind}" if i else "" for i, kind in enumerate(modules)]
    places = [path for path in paths if path.endswith("_Dense")]
    for folder, place in reversed([*zip(dense, places, strict=True)]):
        (target / folder.name).rename(target / place)
    if settings.template is not None or settings.final_period != "keep":
        _write_template_tokenizer(tokenizer, target)
        _check_same(tokenizer, target)
        _write(target / "sentray.json", {"pooling": settings.pooling})
    _write_padding(tokenizer.pretrained, config, target / "tokenizer_config.json")
    _write(
        target / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False}
    )
    # a kind's name is the one that encode_query and encode_document look for, which do without the
    # default prompt
    everyone = dict.fromkeys(("default", *KINDS), settings.prompt) if settings.prompt else {}
    prompts = everyone | {str(kind): text for kind, text in settings.prompts.items()}
    _describe(target, [*zip(modules, paths, strict=True)], prompts, card)


def export_static(model: Path, card: str, target: Path) -> None:
    """As `export_student`, of a student without layers, which reads all of a text."""
    shutil.copytree(model, target)
    _describe(target, [("StaticEmbedding", ""), ("Normalize", "1_Normalize")], {}, card)


def _describe(
    target: Path, modules: list[tuple[str, str]], prompts: dict[str, str], card: str
) -> None:
    _write(
        target / "modules.json",
        [
            {
                "idx": i,
                "name": str(i),
                "path": path,
                "type": f"sentence_transformers.models.{kind}",
            }
            for i, (kind, path) in enumerate(modules)
        ],
    )
    _write(
        target / "config_sentence_transformers.json",
        {
            "prompts": prompts,
            "default_prompt_name": "default" if "default" in prompts else None,
            "similarity_fn_name": "cosine",
        },
    )
    (target / "README.md").write_text(card, encoding="utf-8")


def _module_folder(target: Path, modules: list[str], kind: str) -> Path:
    folder = target / f"{modules.index(kind)}_{kind}"
    folder.mkdir()
    return folder


def _write_mask_weights(tokenizer: SentenceTokenizer, folder: Path) -> None:
    by_id = {number: word for word, number in tokenizer.pretrained.get_vocab().items()}
    # a weight is found by its token's id, and ids may have gaps
    words = [by_id.get(number, f"[no token {number}]") for number in range(max(by_id) + 1)]
    mask = tokenizer.pretrained.mask_token
    about = {"vocab": words, "word_weights": {mask: 1.0}, "unknown_word_weight": 0.0}
    for name in ("config.json", "wordweights_config.json"):  # the latter before version 5
        _write(folder / name, about)
    weights = np.array([[float(word == mask)] for word in words], dtype=np.float32)
    save_file({"emb_layer.weight": weights}, folder / "model.safetensors")


def _write_template_tokenizer(tokenizer: SentenceTokenizer, target: Path) -> None:
    """The tokenizer with template and final period of its own, in place of the student's."""
    from tokenizers import Regex, Tokenizer, normalizers, processors

    old = tokenizer.pretrained
    rust = Tokenizer.from_str(old.backend_tokenizer.to_str())
    rust.no_padding()
    rust.no_truncation()
    parts = {"<before>": tokenizer.prefix, "<after>": tokenizer.suffix}
    rust.post_processor = processors.TemplateProcessing(
        single="<before> $A <after>",
        special_tokens=[
            {"id": name, "ids": ids, "tokens": old.convert_ids_to_tokens(ids)}
            for name, ids in parts.items()
        ],
    )
    steps: list[Any] = []
    if tokenizer.settings.final_period != "keep":
        missing, added = FINAL_PERIOD[tokenizer.settings.final_period]
        steps.append(normalizers.Replace(Regex(missing), added))
    if tokenizer.settings.template is not None and tokenizer.lead:
        steps.append(normalizers.Prepend(tokenizer.lead))
    if steps:
        old_steps = [] if rust.normalizer is None else [rust.normalizer]
        rust.normalizer = normalizers.Sequence([*steps, *old_steps])
    save_tokenizer(rebuilt(rust, old), target)


def _check_same(tokenizer: SentenceTokenizer, target: Path) -> None:
    """Compares ids, as it is transformers that decides which class reads the folder's tokenizer."""
    from transformers import AutoTokenizer

    settings = tokenizer.settings
    with readable_errors(settings.model):
        loaded = AutoTokenizer.from_pretrained(
            str(target), trust_remote_code=settings.trust_remote_code
        )
    # not cut, whatever max_length is
    ours = tokenizer.wrap(tokenizer.sentence_ids(SAMPLES, LONGEST))
    theirs = loaded([(settings.prompt or "") + text for text in SAMPLES])["input_ids"]
    if [row.tolist() for row in ours] != theirs:
        raise UserError(
            f"model '{settings.model}': transformers ({type(loaded).__name__}) does not read the "
            "exported tokenizer as the student was trained, as it leaves out what is done to a "
            "text before it is split; write student.template without a space before {sentence}, "
            "and set student.final_period: keep"
        )


def _write_padding(pretrained: Any, config: dict[str, Any], file: Path) -> None:
    """Padding that sentence-transformers masks as we do.

    It pads with a padding token alone, so one that has none gets another special token's name; and
    it counts positions from the padding on, so absolute ones are padded on the right.
    """
    about = json.loads(file.read_text(encoding="utf-8"))
    changes: dict[str, str] = {}
    if pretrained.pad_token is None:
        special = [t for t in pretrained.special_tokens_map.values() if isinstance(t, str)]
        size = config.get("vocab_size", len(pretrained))
        known = [t for t in special if pretrained.convert_tokens_to_ids(t) < size]
        changes |= {"pad_token": known[0]} if known else {}
    if about.get("padding_side") == "left" and not any(key.startswith("rope") for key in config):
        changes["padding_side"] = "right"
    if changes:
        _write(file, about | changes)


def _write(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
