"""Tokenizers of every kind that can be cut, trained on made-up text, and tiny models with them."""

import json
from pathlib import Path
from typing import Any

from tests.support.models import WORDS, make_model, make_sentences

# A token in front of all others that no text has, as BERT has a thousand of
UNUSED = "[unused0]"
KINDS = ("WordPiece", "BPE", "Unigram")
ACCENTED = ["Über die Brücke führt der Weg.", "naïve façade, 12.5%", "東京 の 天気", "кот и собака"]


def train_text() -> list[str]:
    """What tokenizers are trained on: more words than the made-up sentences have."""
    more = [f"{a}{b}s {b}ing un{a}" for a in WORDS[:20] for b in WORDS[20:]]
    return [*make_sentences(300), *more, *ACCENTED * 5]


def train_tokenizer(kind: str) -> Any:
    """BERT's word pieces, RoBERTa's byte-level BPE, or XLM-R's Unigram with its metaspace."""
    from tokenizers import (
        AddedToken,
        Tokenizer,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )
    from transformers import PreTrainedTokenizerFast

    if kind == "WordPiece":
        special = [UNUSED, "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        pad, unk, cls, sep, mask = special[1:]
        rust = Tokenizer(models.WordPiece(unk_token=unk))
        rust.normalizer = normalizers.BertNormalizer()
        rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer: Any = trainers.WordPieceTrainer(vocab_size=600, special_tokens=special)
    else:
        special = [UNUSED, "<s>", "<pad>", "</s>", "<unk>"]
        cls, pad, sep, unk = special[1:]
        mask = "<mask>"
        if kind == "BPE":
            rust = Tokenizer(models.BPE())
            rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            letters = pre_tokenizers.ByteLevel.alphabet()
            trainer = trainers.BpeTrainer(
                vocab_size=700, special_tokens=special, initial_alphabet=letters
            )
        else:
            rust = Tokenizer(models.Unigram())
            rust.normalizer = normalizers.NFKC()
            rust.pre_tokenizer = pre_tokenizers.Metaspace()
            trainer = trainers.UnigramTrainer(
                vocab_size=400, special_tokens=special, unk_token=unk, show_progress=False
            )
    trainer.show_progress = False
    rust.train_from_iterator(train_text(), trainer)
    raw = json.loads(rust.to_str())
    raw["added_tokens"] = [one for one in raw["added_tokens"] if one["content"] != UNUSED]
    rust = Tokenizer.from_str(json.dumps(raw))
    ids = {token: rust.token_to_id(token) for token in (cls, sep)}
    if kind == "BPE":
        rust.post_processor = processors.RobertaProcessing((sep, ids[sep]), (cls, ids[cls]))
    else:
        rust.post_processor = processors.TemplateProcessing(
            single=f"{cls} $A {sep}", special_tokens=[*ids.items()]
        )
    # behind all others, as XLM-R and RoBERTa have it: an added token alone
    marker = AddedToken(mask, lstrip=True, special=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=rust, pad_token=pad, unk_token=unk, cls_token=cls, sep_token=sep,
        bos_token=cls, eos_token=sep, mask_token=marker,
    )  # fmt: skip


def make_cuttable(folder: Path, kind: str, head: str = "ForMaskedLM", **config: Any) -> Path:
    """A Bert, or a Roberta, whose positions are counted from the padding's id; with a head."""
    tokenizer = train_tokenizer(kind)
    options = {"vocab_size": len(tokenizer) + 5, "pad_token_id": tokenizer.pad_token_id}
    if kind != "WordPiece":
        options |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    base = "Bert" if kind == "WordPiece" else "Roberta"
    make_model(folder, kind=base, head=head, **options | config)
    for file in folder.glob("*token*"):
        file.unlink()
    tokenizer.save_pretrained(folder)
    return folder
