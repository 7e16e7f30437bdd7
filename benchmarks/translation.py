"""Translation throughput: the engine ctranslate2 against transformers' generate, side by side.

    SENTRAY_DATA=/path/to/data python benchmarks/translation.py
    python benchmarks/translation.py lines.txt --sentences 500 --threads 2

Both are `Translator` with the same settings but the engine: the same model folder, sentences,
beams and token budget, float32; ctranslate2 in int8 is one row more. They take turns, after one
warm-up each, and the ratio is that of the same round. Loading and conversion are not in it.

No hub is needed: the model has the shape of opus-mt (6 and 6 layers, width 512, 8 heads, 2048,
vocabulary 58,101) and random weights. Its SentencePiece pieces are learnt from the sentences, up
to 8,000; the rest of its vocabulary is made up, so that the output layer costs what it does there.
A random model does not know where to end. So the end token is out of its reach (a bias of -1e9),
and max_growth 0.65 stops every translation at 0.65 times the tokens of its batch's longest source
plus 10: about as many as the source has. The translations mean nothing, and how long real ones
are is not measured here.
"""

import argparse
import gzip
import json
import os
import platform
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stages.rewrite.back_translation import BackTranslation, TranslationModel
from stages.rewrite.translate import Translator

VOCABULARY = 58_101


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(os.environ.get("SENTRAY_DATA", "../shared/data"))
    parser.add_argument(
        "lines", nargs="?", type=Path, default=default / "wiki/wiki1m_sentences.txt.gz"
    )
    parser.add_argument("--sentences", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens-per-batch", type=int, default=2048)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    opened = gzip.open if options.lines.suffix == ".gz" else open
    with opened(options.lines, "rt", encoding="utf-8") as lines:
        texts = [text for line in islice(lines, options.sentences) if (text := line.strip())]
    with tempfile.TemporaryDirectory() as folder:
        model = TranslationModel(model=str(make_model(Path(folder), texts)))
        compare(model, texts, options)


def make_model(folder: Path, texts: list[str]) -> Path:
    import sentencepiece
    from transformers import MarianConfig, MarianMTModel, MarianTokenizer

    for name in ("source.spm", "target.spm"):
        with (folder / name).open("wb") as out:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(texts), model_writer=out, vocab_size=8000,
                hard_vocab_limit=False, minloglevel=2,
            )  # fmt: skip
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "source.spm"))
    pieces = [processor.id_to_piece(i) for i in range(3, processor.get_piece_size())]
    tokens = ["</s>", "<unk>", *pieces]
    tokens += [f"madeup{i}" for i in range(VOCABULARY - 1 - len(tokens))] + ["<pad>"]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    files: list[Any] = [str(folder / f) for f in ("source.spm", "target.spm", "vocab.json")]
    MarianTokenizer(*files).save_pretrained(folder)
    pad = VOCABULARY - 1
    torch.manual_seed(0)
    model = MarianMTModel(
        MarianConfig(
            vocab_size=VOCABULARY, d_model=512, encoder_layers=6, decoder_layers=6,
            encoder_attention_heads=8, decoder_attention_heads=8, encoder_ffn_dim=2048,
            decoder_ffn_dim=2048, max_position_embeddings=512, scale_embedding=True,
            activation_function="swish", pad_token_id=pad, eos_token_id=0,
            decoder_start_token_id=pad,
        )
    )  # fmt: skip
    model.final_logits_bias[0, 0] = -1e9
    model.save_pretrained(folder)
    return folder


def compare(model: TranslationModel, texts: list[str], options: argparse.Namespace) -> None:
    ways = {}
    for name, engine, precision in (
        ("transformers", "transformers", "float32"),
        ("ctranslate2", "ctranslate2", "float32"),
        ("ctranslate2 int8", "ctranslate2", "int8"),
    ):
        settings = BackTranslation.model_validate(
            dict(engine=engine, precision=precision, num_beams=options.beams, max_growth=0.65,
                 max_length=512, tokens_per_batch=options.tokens_per_batch)
        )  # fmt: skip
        start = time.perf_counter()
        ways[name] = Translator(model, settings)
        print(f"{name:<17} loaded in {time.perf_counter() - start:.1f} s", flush=True)
    speed: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(-1, options.rounds):
        for name, way in ways.items():
            some = texts if number >= 0 else texts[:16]
            start = time.perf_counter()
            outcomes = way(some, (0,))
            if number >= 0:
                assert {one.reason for one in outcomes} == {"endless_translation"}
                speed[name].append(len(some) / (time.perf_counter() - start))
                print(f"{name:<17} {speed[name][-1]:.2f} sentences/s", flush=True)
    print(
        f"{len(texts)} sentences, {options.beams} beams, {options.tokens_per_batch} tokens per "
        f"batch, {options.threads} of {os.cpu_count()} cores ({platform.machine()}), "
        f"{options.rounds} rounds"
    )
    base = np.array(speed["transformers"])
    for name, rates in speed.items():
        ratio = np.array(rates) / base
        print(
            f"{name:<17} {np.median(rates):6.2f} sentences/s, {np.median(ratio):.2f} times "
            f"transformers ({ratio.min():.2f} to {ratio.max():.2f})"
        )


if __name__ == "__main__":
    main()
