"""Sentences through a sequence-to-sequence model: one pass of back-translation. Row-wise.

Batches hold sentences of similar length within a token budget. The search (or the draws) of both
engines follow the same rules, so that in float32 they find the same translations:

* a search ends when `num_beams` translations are complete, and the best by mean log probability
  of their tokens, the end token included, is taken;
* probabilities are those among the tokens allowed: never padding, nor what completes an n-gram of
  tokens for the second time;
* a translation ends by itself. One of more than `max_growth` times its source's tokens plus 10
  (end tokens included) has a reason, and no end token is forced on it. The engine stops at the
  limit of the longest source of the batch; each row is then held to its own.

Covered: Marian (one target language, or several and a prefix), and models that need no more than
a prefix. Models that take language codes (mBART, M2M100, NLLB) are refused.
"""

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from stages.encoder.config import num_positions
from stages.encoder.cpu import computed_type
from stages.encoder.model import pick_device
from stages.encoder.settings import ModelSettings
from stages.encoder.tokenizer import pad, token_budget_batches
from stages.errors import UserError
from stages.rewrite.back_translation import (
    BackTranslation,
    TranslationModel,
    check_translation_model,
)
from stages.rewrite.rewrites import Outcome
from stages.rewrite.translation_model import (
    check_prefix,
    convert,
    load_config,
    load_translation_model,
    load_translation_tokenizer,
)

# A batch of sources, and how many tokens their translations may have.
Batch = tuple[list[list[int]], int]


class Translator:
    """Translates sentences; loads (and for ctranslate2 converts) its model once and keeps it.

    Raises:
        UserError: no such model, one that cannot translate, not by this engine, or not without a
            prefix; a package is not installed.
    """

    def __init__(self, model: TranslationModel, settings: BackTranslation) -> None:
        self._settings, self._prefix = settings, model.prefix
        config = load_config(model)
        positions = self._max_tokens = num_positions(config.to_dict())
        if positions is not None and settings.max_length > positions:
            raise UserError(
                f"max_length={settings.max_length} is more than the {positions} positions of model "
                f"'{model.model}'; lower max_length"
            )
        check_translation_model(model, settings.engine, config.model_type)
        self._tokenizer = load_translation_tokenizer(model)
        check_prefix(model, config, self._tokenizer)
        engine = _CTranslate2 if settings.engine == "ctranslate2" else _Transformers
        self._engine = engine(model, settings, self._tokenizer)

    def __call__(self, texts: Sequence[str], seed: Sequence[int]) -> list[Outcome]:
        """One translation for each text, in order; a blank text gives an empty one.

        Reasons: too_long_to_translate (its text is empty), or endless_translation (its text is what
        there was at the limit).

        Args:
            seed: decides the draws, where there are any: the same texts and seed give the same
                translations on the same machine, whatever was translated before.
        """
        out = [Outcome("") for _ in texts]
        places = [place for place, text in enumerate(texts) if text.strip()]
        if not places:
            return out
        tokenized = self._tokenizer([self._prefix + texts[place] for place in places]).input_ids
        rows = dict(zip(places, tokenized, strict=True))
        for place in [place for place in places if len(rows[place]) > self._settings.max_length]:
            out[place] = Outcome("", reason="too_long_to_translate")
            del rows[place]
        kept, most = list(rows), self._settings.tokens_per_batch
        lengths = np.array([len(rows[place]) for place in kept], np.int64)
        groups = [[kept[i] for i in group] for group in token_budget_batches(lengths, most)]
        # longest first: the first row's limit holds for its batch
        batches = [
            ([rows[place] for place in group], self._limit(rows[group[0]])) for group in groups
        ]
        entropy = int(np.random.SeedSequence(list(seed)).generate_state(1)[0])
        for group, found in zip(groups, self._engine(batches, entropy), strict=True):
            cut = [ids[: self._limit(rows[place])] for place, ids in zip(group, found, strict=True)]
            decoded = self._tokenizer.batch_decode(cut, skip_special_tokens=True)
            for place, ids, text in zip(group, cut, decoded, strict=True):
                ended = ids[-1] == self._tokenizer.eos_token_id
                out[place] = Outcome(text, reason=None if ended else "endless_translation")
        return out

    def _limit(self, row: list[int]) -> int:
        """Tokens that a translation of the row may have, its end token included."""
        limit = int(self._settings.max_growth * len(row)) + 10
        return limit if self._max_tokens is None else min(limit, self._max_tokens)


class _CTranslate2:
    """Runs the model in CTranslate2, from a converted copy in a temporary folder."""

    def __init__(self, model: ModelSettings, settings: BackTranslation, tokenizer: Any) -> None:
        import ctranslate2

        self._settings, self._tokenizer = settings, tokenizer
        device = pick_device(settings.device).type
        if settings.precision not in ctranslate2.get_supported_compute_types(device):
            raise UserError(
                f"precision {settings.precision}: ctranslate2 has no such arithmetic on this "
                f"{device}; set precision: float32"
            )
        self._folder = tempfile.TemporaryDirectory(prefix="sentray-ctranslate2-")
        self._suppressed = convert(model, tokenizer, Path(self._folder.name), settings.precision)
        self._load = partial(
            ctranslate2.Translator,
            f"{self._folder.name}/converted",
            device=device,
            compute_type=settings.precision,
            inter_threads=1,
            intra_threads=torch.get_num_threads(),
        )
        self._model = self._load()

    def __call__(self, batches: Sequence[Batch], seed: int) -> list[list[list[int]]]:
        """Token ids of the translations, in the order of the batches."""
        import ctranslate2

        settings = self._settings
        draws: dict[str, Any] = {}
        if settings.temperature is not None:
            # its generator takes a seed only when a translator's thread first draws: start anew
            ctranslate2.set_random_seed(seed)
            self._model = self._load()
            draws = {
                "sampling_topk": settings.top_k,
                "sampling_topp": settings.top_p,
                "sampling_temperature": settings.temperature,
            }
        out = []
        for rows, limit in batches:
            results = self._model.translate_batch(
                [self._tokenizer.convert_ids_to_tokens(row) for row in rows],
                beam_size=settings.num_beams,
                length_penalty=1.0,
                no_repeat_ngram_size=settings.no_repeat_ngram,
                suppress_sequences=self._suppressed,
                return_end_token=True,
                max_input_length=0,  # never cut
                max_decoding_length=limit,
                **draws,
            )
            tokens = [result.hypotheses[0] for result in results]
            out.append([self._tokenizer.convert_tokens_to_ids(row) for row in tokens])
        return out


class _Transformers:
    """Runs the model with transformers' own `generate`."""

    def __init__(self, model: ModelSettings, settings: BackTranslation, tokenizer: Any) -> None:
        device = pick_device(settings.device)
        self._model = load_translation_model(model).to(device)
        self._model.to(computed_type(settings.precision, device))
        self._pad_id = tokenizer.pad_token_id
        theirs = self._model.generation_config
        draws: dict[str, Any] = {}
        if settings.temperature is not None:
            draws = {
                "do_sample": True, "top_k": settings.top_k, "top_p": settings.top_p,
                "temperature": settings.temperature,
            }  # fmt: skip
        # the model's own would fill whatever is left open (opus-mt: 4 or 6 beams, a forced end)
        self._model.generation_config = GenerationConfig(
            decoder_start_token_id=theirs.decoder_start_token_id,
            eos_token_id=theirs.eos_token_id,
            pad_token_id=self._pad_id,
            bad_words_ids=[[self._pad_id]],
            num_beams=settings.num_beams,
            early_stopping=settings.num_beams > 1,
            length_penalty=1.0,
            no_repeat_ngram_size=settings.no_repeat_ngram,
            renormalize_logits=True,
            **draws,
        )

    def __call__(self, batches: Sequence[Batch], seed: int) -> list[list[list[int]]]:
        """Token ids of the translations, in the order of the batches."""
        device = self._model.device
        out = []
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            for rows, limit in batches:
                ids, mask = pad([np.array(row, np.int64) for row in rows], self._pad_id)
                found = self._model.generate(
                    torch.from_numpy(ids).to(device),
                    attention_mask=torch.from_numpy(mask).to(device),
                    max_new_tokens=limit,
                )
                # without the token that starts the decoder, and the padding behind the end
                out.append([[i for i in row if i != self._pad_id] for row in found[:, 1:].tolist()])
        return out
