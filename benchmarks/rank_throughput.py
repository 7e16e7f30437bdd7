"""Rank vectors: sentences a second against two straightforward ways, and memory at any size.

    python benchmarks/rank_throughput.py
    python benchmarks/rank_throughput.py --corpus 1000000 --dimensions 256 --memory

All three compute the similarities of 384-dimensional unit vectors to the corpus and rank each row,
on one thread, as one actor of the stage does: Sentray's rank stage (tiles, one sort of packed
keys, bytes of the shard included), `scipy.stats.rankdata` row by row, and a double `torch.argsort`
by batches of 64. They take turns; reported are the median paired ratios and their range.

--memory instead makes corpus and basis and ranks one small shard, and prints the peak memory.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when NumPy is imported

import argparse
import io
import resource
import time

import numpy as np
import torch
from scipy.stats import rankdata

from stages.ranks.corpus import Ranker, corpus_files
from stages.ranks.settings import RanksSettings
from stages.rows import unit_rows

DIMENSION = 384


def random_unit(rows: np.ndarray) -> np.ndarray:
    """Unit vectors of row numbers: a few strong directions and noise, as sentences have."""
    strong = np.random.default_rng(0).standard_normal((32, DIMENSION), dtype=np.float32)
    random = np.random.default_rng(rows[0])
    weights = random.standard_normal((len(rows), 32), dtype=np.float32)
    noise = random.standard_normal((len(rows), DIMENSION), dtype=np.float32)
    return unit_rows(weights @ strong + 2 * noise)


def compare(num_rows: int, corpus_size: int, rounds: int) -> None:
    corpus = random_unit(np.arange(corpus_size))
    sentences = random_unit(np.arange(corpus_size, corpus_size + num_rows))
    corpus_torch, sentences_torch = torch.from_numpy(corpus), torch.from_numpy(sentences)
    ranker = Ranker(corpus, None)

    def with_scipy() -> None:
        for row in sentences @ corpus.T:
            rankdata(row)

    def with_torch() -> None:
        for batch in sentences_torch.split(64):
            (batch @ corpus_torch.T).argsort(-1).argsort(-1)

    ways = {"Sentray": lambda: ranker(sentences), "scipy": with_scipy, "torch": with_torch}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name in sorted(ways, reverse=bool(turn % 2)):
            start = time.perf_counter()
            ways[name]()
            seconds[name].append(time.perf_counter() - start)
    times = {name: np.array(taken[1:]) for name, taken in seconds.items()}
    print(f"{num_rows} sentences, corpus of {corpus_size:,}, one thread, {rounds} rounds")
    for name, taken in times.items():
        ratios = taken / times["Sentray"]
        print(
            f"{name:<8} {num_rows / np.median(taken):7.0f} sentences/s; Sentray is "
            f"{np.median(ratios):.2f} ({ratios.min():.2f} to {ratios.max():.2f}) times as fast"
        )


def memory(num_rows: int, corpus_size: int, dimensions: int | None) -> None:
    settings = RanksSettings(corpus_size=corpus_size, dimensions=dimensions)
    start = time.perf_counter()
    files, stats = corpus_files(random_unit, corpus_size + 10_000, settings, "random")
    made = time.perf_counter() - start
    loaded = {name: np.load(io.BytesIO(data)) for name, data in files.items()}
    files.clear()
    start = time.perf_counter()
    Ranker(loaded["corpus.npy"], loaded.get("basis.npy"))(random_unit(np.arange(num_rows)))
    ranked = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    error = {k: v for k, v in stats.get("error", {}).items() if k != "tenths"}
    print(
        f"corpus of {corpus_size:,}, {dimensions} dimensions: corpus and basis in {made:.0f} s, "
        f"{num_rows} sentences ranked in {ranked:.0f} s, peak {peak:.1f} GiB, error {error}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--corpus", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dimensions", type=int)
    parser.add_argument("--memory", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory:
        memory(options.rows, options.corpus, options.dimensions)
    else:
        compare(options.rows, options.corpus, options.rounds)


if __name__ == "__main__":
    main()
