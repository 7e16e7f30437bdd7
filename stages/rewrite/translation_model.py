"""Translation models: loading them with errors for people, and converting them for CTranslate2."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer

from stages.encoder.files import model_folder
from stages.encoder.model import load_pretrained
from stages.encoder.settings import ModelSettings
from stages.encoder.tokenizer import readable_errors
from stages.errors import UserError
from stages.rewrite.back_translation import TranslationModel

OTHER_ENGINE = "set engine: transformers"


def load_config(model: ModelSettings) -> Any:
    config = _auto(AutoConfig, model)
    if not config.is_encoder_decoder:
        raise UserError(
            f"model '{model.model}': a {config.model_type} is not a sequence-to-sequence model and "
            "cannot translate; take one such as Helsinki-NLP/opus-mt-en-de"
        )
    return config


def load_translation_tokenizer(model: ModelSettings) -> Any:
    tokenizer = _auto(AutoTokenizer, model)
    if not any(token.strip("▁Ġ").isalpha() for token in tokenizer.get_vocab()):
        # transformers then makes up a vocabulary of special tokens
        raise UserError(f"model '{model.model}': it has no tokenizer files")
    return tokenizer


def check_prefix(model: TranslationModel, config: Any, tokenizer: Any) -> None:
    """Refuses models that would translate into whatever language they like."""
    if hasattr(tokenizer, "src_lang"):
        raise UserError(
            f"model '{model.model}': a {config.model_type} needs language codes, which are not "
            "covered; take a Marian model such as Helsinki-NLP/opus-mt-en-de"
        )
    known = list(getattr(tokenizer, "supported_language_codes", []))
    if len(known) > 1 and not model.prefix.startswith(tuple(known)):
        raise UserError(
            f"model '{model.model}': it has several target languages; set prefix to one of "
            f"{', '.join(sorted(known))}"
        )
    tasks = (config.to_dict().get("task_specific_params") or {}).values()
    examples = [task["prefix"] for task in tasks if task.get("prefix")]
    if examples and not model.prefix:
        raise UserError(
            f"model '{model.model}': it must be told its task; set prefix, such as {examples[-1]!r}"
        )


def load_translation_model(model: ModelSettings) -> Any:
    return load_pretrained(AutoModelForSeq2SeqLM, model).eval()


def convert(
    model: ModelSettings, tokenizer: Any, folder: Path, precision: str
) -> list[list[str]] | None:
    """Writes `folder/converted`; returns what must not be generated.

    The converter reads a copy saved from what our own loader read, as it would take pickled
    weights, and the configuration of another revision.
    """
    from ctranslate2.converters import TransformersConverter

    loaded = load_translation_model(model)
    is_marian = loaded.config.model_type == "marian"
    if is_marian:
        _check_marian(model, loaded)
    copy = folder / "copy"
    loaded.save_pretrained(copy)
    tokenizer.save_pretrained(copy)
    del loaded
    try:
        TransformersConverter(str(copy)).convert(str(folder / "converted"), quantization=precision)
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"model '{model.model}': ctranslate2 cannot convert it ({reason}); {OTHER_ENGINE}"
        ) from error
    # of a Marian model the converter takes the padding away
    return None if is_marian else [[tokenizer.pad_token]]


def _check_marian(model: ModelSettings, loaded: Any) -> None:
    """Refuses what the converter takes without a word and then translates wrongly."""
    config = loaded.config
    if not config.share_encoder_decoder_embeddings:
        raise UserError(f"model '{model.model}': it has two vocabularies; {OTHER_ENGINE}")
    # CTranslate2 starts a Marian decoder from zeros, as Marian does; a model trained further with
    # transformers has moved that row, as the output layer shares it
    if loaded.get_decoder().embed_tokens.weight[config.decoder_start_token_id].any():
        raise UserError(
            f"model '{model.model}': its decoder starts from a token with a trained embedding, "
            f"which ctranslate2 cannot; {OTHER_ENGINE}"
        )


def _auto(kind: Any, model: ModelSettings) -> Any:
    """A model's configuration or tokenizer."""
    with readable_errors(model.model):
        return kind.from_pretrained(
            str(model_folder(model.model) or model.model),
            revision=model.commit,
            trust_remote_code=model.trust_remote_code,
        )
