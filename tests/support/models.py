"""Made-up sentences, and encoders of a few thousand parameters that read them."""

import random
from pathlib import Path
from typing import Any

WORDS = """the a cat dog bird man woman child runs eats sees reads writes sings plays sleeps house
tree river city book song red blue small large old young quickly slowly happily under over
near""".split()  # noqa: SIM905


def make_sentences(count: int, seed: int = 0) -> list[str]:
    """Distinct made-up sentences of 4 to 12 words."""
    source = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        words = source.choices(WORDS, k=source.randint(4, 12))
        found[" ".join(words).capitalize() + "."] = None
    return list(found)


def make_model(
    folder: Path,
    layers: int = 2,
    width: int = 32,
    seed: int = 0,
    kind: str = "Bert",
    head: str = "Model",
    **config: Any,
) -> Path:
    """A transformer of a few thousand parameters with a word-level tokenizer, saved like any other.

    Args:
        kind: Bert or Roberta; head: Model, or ForMaskedLM to keep the masked-language head.
    """
    import torch
    import transformers
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: i for i, word in enumerate([*special, *WORDS, ".", ":", '"', "means"])}
    rust = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    rust.normalizer = normalizers.Lowercase()
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=rust, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]", mask_token="[MASK]",
    )  # fmt: skip
    torch.manual_seed(seed)
    settings = {
        "vocab_size": len(vocabulary), "hidden_size": width, "num_hidden_layers": layers,
        "num_attention_heads": 2, "intermediate_size": 2 * width, "max_position_embeddings": 64,
        "initializer_range": 0.2,
    }  # fmt: skip
    whole = getattr(transformers, f"{kind}Config")(**({"pad_token_id": 0} | settings | config))
    getattr(transformers, f"{kind}{head}")(whole).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def byte_tokenizer() -> Any:
    """A tokenizer with one token for each byte, so that `decode` gives back every space."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<s>", "</s>", *letters])}
    rust = Tokenizer(models.BPE(vocabulary, []))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=rust, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
