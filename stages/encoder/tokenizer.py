"""Text to token ids, with an optional template assembled at id level, or a prompt in the text.

Assembling ids (not text) means that truncation shortens the sentence and never the template,
and that a sentence's own tokens are the same with and without a template; but where a space is part
of the next token (RoBERTa), the template's space before the sentence belongs to the sentence.
A prompt is tokenised with its sentence, as sentence-transformers does.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from stages.encoder.config import resolved
from stages.encoder.files import model_folder
from stages.encoder.settings import EncoderSettings
from stages.errors import UserError, lacks_room
from stages.kinds import Kind, Kinds, kind_of_each

# Where a final period is missing, as a pattern that both Python and tokenizers understand, and
# what is then added.
FINAL_PERIOD = {
    "promptbert": (r"(?<![.?\"'])\z", "."),
    "sncse": (r"(?<![!-/:-@\[-`{-~])\z", " ."),
}


class SentenceTokenizer:
    """Turns sentences into int32 id arrays of at most `max_length` tokens, unpadded."""

    def __init__(self, tokenizer: Any, settings: EncoderSettings) -> None:
        if not tokenizer.is_fast:
            raise UserError(
                f"model '{settings.model}': it has no fast tokenizer (tokenizer.json); "
                "convert it with transformers' AutoTokenizer(..., use_fast=True).save_pretrained"
            )
        self.pretrained = tokenizer
        self.settings = settings
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        self.mask_id = tokenizer.mask_token_id
        self.mask_is_last = True
        self._rust = tokenizer.backend_tokenizer
        self._rust.no_padding()
        self._rust.no_truncation()
        self.prefix, self.suffix = self._special_tokens_around()
        self.lead = settings.prompt or ""  # what is put before a sentence's text
        self.room = settings.max_length
        if settings.template is not None:
            self._set_template(settings)
        elif self.mask_id is not None:
            self.mask_is_last = self.mask_id not in self.prefix
        self.room -= len(self.prefix) + len(self.suffix)
        for prompt in (settings.prompt or "", *settings.prompts.values()):
            count = len(self._ids(prompt))
            if prompt and self.room <= count:
                raise UserError(
                    f"prompt {prompt!r} takes {count} tokens, which leaves none of "
                    f"max_length={settings.max_length} for the sentence"
                )
        if self.room < 1:
            raise UserError(
                f"template {settings.template!r} takes {len(self.prefix) + len(self.suffix)} "
                f"tokens, which leaves none of max_length={settings.max_length} for the sentence"
            )
        if settings.is_static:
            self.prefix, self.suffix = [], []

    def _set_template(self, settings: EncoderSettings) -> None:
        template = settings.template or ""
        if settings.pooling == "mask":
            if self.mask_id is None:
                raise UserError(
                    f"model '{settings.model}': its tokenizer has no mask token, "
                    "so pooling 'mask' cannot be used; choose cls, mean or last"
                )
            template = template.replace("{mask}", self.pretrained.mask_token)
        before, after = template.split("{sentence}")
        self.mask_is_last = self.mask_id is None or self.pretrained.mask_token not in before
        first, bare = self._ids(before), self._ids(before.rstrip())
        if first != bare:
            # `' {sentence}`: tokenised apart it would be `Ġ' Ġ The`, in one text it is `Ġ' ĠThe`
            self.lead, first = before[len(before.rstrip()) :], bare
        self.prefix = self.prefix + first
        self.suffix = self._ids(after) + self.suffix

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._rust.encode(text, add_special_tokens=False).ids
        return ids

    def _special_tokens_around(self) -> tuple[list[int], list[int]]:
        """What the tokenizer puts before and after a sentence, found with two of them.

        One alone is not enough: an exported student's tokenizer adds its template, where a word
        may stand as well.
        """
        bare, whole = (
            [self._rust.encode(text, add_special_tokens=special).ids for text in ("a", "b b b")]
            for special in (False, True)
        )
        for start in range(len(whole[0])):
            ends = [start + len(ids) for ids in bare]
            inside = all(w[start:end] == b for w, b, end in zip(whole, bare, ends, strict=True))
            before, after = ([w[:start] for w in whole],
                             [w[end:] for w, end in zip(whole, ends, strict=True)])  # fmt: skip
            if inside and before[0] == before[1] and after[0] == after[1]:
                return before[0], after[0]
        raise AssertionError("the tokenizer does not put the same around every sentence")

    def __call__(self, texts: Sequence[str], kinds: Kinds = None) -> list[np.ndarray]:
        """One int32 array of ids per text, in order: special tokens, template, sentence."""
        return self.wrap(self.sentence_ids(texts, self.room, kinds))

    def sentence_ids(self, texts: Sequence[str], room: int, kinds: Kinds = None) -> list[list[int]]:
        """Ids of the sentences and their prompts alone, at most `room` each."""
        side = self.pretrained.truncation_side
        self._rust.enable_truncation(max_length=room, direction=side)
        each = zip(texts, kind_of_each(kinds, len(texts)), strict=True)
        texts = [self._closed(text, kind) for text, kind in each]
        encodings = self._rust.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def wrap(self, rows: Sequence[Sequence[int] | np.ndarray]) -> list[np.ndarray]:
        """Sentence ids with special tokens and template around them, int32."""
        around = [np.asarray(ids, dtype=np.int32) for ids in (self.prefix, self.suffix)]
        inner = [np.asarray(row, dtype=np.int32) for row in rows]
        return [np.concatenate([around[0], row, around[1]]) for row in inner]

    def _closed(self, text: str, kind: Kind | None) -> str:
        """The text with its final period, as the setting asks, and what is put before it."""
        if text and self.settings.final_period != "keep":
            missing, added = FINAL_PERIOD[self.settings.final_period]
            text = re.sub(missing.replace(r"\z", r"\Z"), added, text, count=1)
        prompt = self.settings.prompts.get(kind) if kind else None
        if prompt is None:
            prompt = self.lead if text else self.settings.prompt or ""  # a template's space is not
        return prompt + text


def load_tokenizer(settings: EncoderSettings) -> SentenceTokenizer:
    """The model's own tokenizer, for its template and maximum length.

    Raises:
        UserError: no such model, or no tokenizer in it.
    """
    from transformers import AutoTokenizer

    folder = model_folder(settings.model)
    with readable_errors(settings.model):
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder or settings.model),
            revision=settings.commit,
            trust_remote_code=settings.trust_remote_code,
        )
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        # transformers then makes up an empty vocabulary: every word would be unknown
        raise UserError(
            f"model '{settings.model}': it has no tokenizer files (tokenizer.json or vocab.txt)"
        )
    return SentenceTokenizer(tokenizer, resolved(settings))


def save_tokenizer(pretrained: Any, folder: Path) -> None:
    """Writes a tokenizer of transformers so that older versions load it too, and whoever reads its
    file alone cuts nothing."""
    pretrained.backend_tokenizer.no_truncation()  # that of whoever used it last
    pretrained.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    about = json.loads(file.read_text(encoding="utf-8"))
    if about.get("tokenizer_class") == "TokenizersBackend":  # unknown before version 5
        about["tokenizer_class"] = "PreTrainedTokenizerFast"
        file.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def rebuilt(rust: Any, old: Any) -> Any:
    """The tokenizer `rust` for transformers, with the special tokens and habits of `old`.

    Not of the model's own class: some of them rebuild the post-processor when loaded.
    """
    from transformers import PreTrainedTokenizerFast

    named = ("pad", "unk", "cls", "sep", "mask", "bos", "eos")
    special = {f"{name}_token": getattr(old, f"{name}_token", None) for name in named}
    habits = ("padding_side", "truncation_side", "model_max_length", "model_input_names")
    return PreTrainedTokenizerFast(
        tokenizer_object=rust,
        **{name: token for name, token in special.items() if token},
        **{name: getattr(old, name) for name in habits},
    )


def load_view_tokenizers(views: Sequence[EncoderSettings]) -> list[SentenceTokenizer]:
    """Tokenizer of view 1 and of view 2 (and further ones): the same one with other templates.

    Raises:
        UserError: the views' sentences would not have the same tokens.
    """
    found = [load_tokenizer(view) for view in views]
    if len({tokenizer.lead for tokenizer in found}) > 1:
        raise UserError(
            "student.second_template: there is a space before {sentence} in one template and not "
            f"in the other, and the tokenizer of model '{views[0].model}' makes it part of the "
            "sentence's first token; write both alike"
        )
    return found


@contextmanager
def readable_errors(model: str) -> Iterator[None]:
    """Turns what libraries raise while they load a model into one message for people.

    Damaged files and those of newer versions may end in any error, so nothing but their loading
    belongs inside.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        is_input = isinstance(error, OSError | ValueError | SafetensorError)
        if lacks_room(error) and not is_input:
            raise
        # their own messages run over many lines; the first says what went wrong
        reason = (str(error).strip().splitlines() or [""])[0]
        if not (reason and is_input):
            reason = f"{type(error).__name__}: {reason}"  # a KeyError says no more than the key
        raise UserError(
            f"model '{model}': cannot be loaded ({reason}). Check its name and files; offline, "
            "only models in the Hugging Face cache, local folders and package:NAME can be used."
        ) from error


def pad(rows: Sequence[np.ndarray], pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Right-pads id arrays to the longest.

    Returns:
        ids (B, L) int64 and mask (B, L) int64, 1 where there is a token.
    """
    lengths = np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows))
    mask = np.arange(lengths.max())[None, :] < lengths[:, None]
    ids = np.full(mask.shape, pad_id, dtype=np.int64)
    ids[mask] = np.concatenate(rows)
    return ids, mask.astype(np.int64)


def token_budget_batches(lengths: np.ndarray, tokens_per_batch: int) -> list[np.ndarray]:
    """Row numbers in batches of similar length, longest first, each within the budget.

    A batch of b rows whose longest has L tokens costs b * L tokens; a single row may exceed
    the budget by itself.
    """
    order = np.argsort(-lengths, kind="stable")
    batches = []
    start = 0
    while start < len(order):
        size = max(1, tokens_per_batch // max(1, int(lengths[order[start]])))
        batches.append(order[start : start + size])
        start += size
    return batches
