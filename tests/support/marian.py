"""Tiny Marian models made offline, and a made-up language to train them on.

The language is a cipher of English as the tests write it: every word of `WORDS` has one word of
two or three made-up syllables, and a sentence is read from its end. So a model must learn a
dictionary and where to look, and whether a translation is right can be said exactly.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.models import WORDS, make_sentences

HELD_OUT = make_sentences(100, seed=77)  # no model of the tests has seen these
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]


def _dictionary() -> dict[str, str]:
    source = random.Random(0)
    made_up: dict[str, None] = {}
    while len(made_up) < len(WORDS):
        made_up["".join(source.choices(SYLLABLES, k=source.randint(2, 3)))] = None
    return dict(zip(WORDS, made_up, strict=True))


CIPHER = _dictionary()


def ciphered(text: str) -> str:
    """A sentence of `make_sentences` in the made-up language: word for word, from its end."""
    words = [CIPHER[word] for word in text.rstrip(".").lower().split()]
    return " ".join(reversed(words)).capitalize() + "."


def make_pair(folder: Path, train_steps: int = 0, batch_size: int = 64) -> tuple[Path, Path]:
    """Model folders to the made-up language and back, taught by sentences of seed 1."""
    english = make_sentences(4000, seed=1)
    made_up = [ciphered(text) for text in english]
    return (
        make_marian(folder / "there", english, made_up, train_steps, batch_size, seed=1),
        make_marian(folder / "back", made_up, english, train_steps, batch_size, seed=2),
    )


def make_marian(
    folder: Path,
    source_texts: Sequence[str],
    target_texts: Sequence[str],
    train_steps: int = 0,
    batch_size: int = 64,
    seed: int = 0,
) -> Path:
    """A MarianMTModel of one layer a side with its own SentencePiece models, as on the hub.

    Args:
        train_steps: batches of `batch_size` pairs it learns from; none: its weights stay random.
    """
    import torch
    from transformers import MarianConfig, MarianMTModel, MarianTokenizer

    folder.mkdir(parents=True)
    pieces = [
        *_sentencepiece(folder / "source.spm", source_texts),
        *_sentencepiece(folder / "target.spm", target_texts),
    ]
    tokens = dict.fromkeys(["</s>", "<unk>", *pieces, "<pad>"])
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    tokenizer = MarianTokenizer(
        source_spm=str(folder / "source.spm"),
        target_spm=str(folder / "target.spm"),
        vocab=str(folder / "vocab.json"),
    )
    pad = len(tokens) - 1
    torch.manual_seed(seed)
    model = MarianMTModel(
        MarianConfig(
            vocab_size=len(tokens), d_model=64, encoder_layers=1, decoder_layers=1,
            encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128,
            decoder_ffn_dim=128, max_position_embeddings=128, dropout=0.0, scale_embedding=True,
            activation_function="swish", pad_token_id=pad, eos_token_id=0, forced_eos_token_id=0,
            decoder_start_token_id=pad, bad_words_ids=[[pad]], init_std=0.1,
        )
    )  # fmt: skip
    # as in the models of the hub, whose decoder starts from nothing
    model.get_input_embeddings().weight.data[pad] = 0
    if train_steps:
        _train(model, tokenizer, source_texts, target_texts, train_steps, batch_size)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _sentencepiece(file: Path, texts: Sequence[str]) -> list[str]:
    """Trains a SentencePiece model; returns its pieces without the special ones."""
    import sentencepiece

    with file.open("wb") as out:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_writer=out, vocab_size=120,
            hard_vocab_limit=False, minloglevel=2, num_threads=1,
        )  # fmt: skip
    processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
    return [processor.id_to_piece(i) for i in range(3, processor.get_piece_size())]


def _train(
    model: Any,
    tokenizer: Any,
    source_texts: Sequence[str],
    target_texts: Sequence[str],
    steps: int,
    batch_size: int,
) -> None:
    import torch

    sources = tokenizer(list(source_texts), padding=True, return_tensors="pt")
    targets = tokenizer(text_target=list(target_texts), padding=True, return_tensors="pt")
    labels = targets.input_ids.masked_fill(targets.attention_mask == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    model.train()
    for _ in range(steps):
        rows = torch.randint(len(labels), (batch_size,))
        loss = model(
            input_ids=sources.input_ids[rows],
            attention_mask=sources.attention_mask[rows],
            labels=labels[rows],
        ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        model.get_input_embeddings().weight.data[tokenizer.pad_token_id] = 0
    model.eval()
