"""The nearest sentences of every sentence: time, memory and recall of exact and approximate ways.

    pip install faiss-cpu usearch pynndescent    (Sentray itself needs none of them)
    SENTRAY_DATA=/path/to/data python benchmarks/neighbour_graph.py --rows 1000000

The graph of N unit vectors (N, D) holds the 32 nearest of each, by inner product. Every way has a
process of its own, which is given the vectors as a memory-mapped fp16 file:
  exact        blocks of 1,024 rows times all, in float32, tile by tile (on the GPU if there is one)
  faiss-ivf    faiss: sqrt(N) cells of fp16 vectors; each row looks through the --probes nearest
  faiss-hnsw   faiss: HNSW of fp16 vectors, 16 links a vector
  usearch      USearch: HNSW of fp16 vectors, 16 links a vector
  pynndescent  PyNNDescent: nearest-neighbour descent, which makes the whole graph at once
All but the last search block by block, so a search can be stopped and continued; --part rows are
searched, and the time of all N follows from it. CPU seconds are of all threads: where others have
the cores too, they say more. Recall@10 is against the exact neighbours of 1,000 of these rows;
--ways without `exact` need a --folder that has them. Memory is the peak of the process: what of
the mapped vectors is in memory and all modules are counted.

The vectors: mean of MiniLM's word embeddings over the tokens of a Wikipedia sentence, less the mean
of all sentences. That makes a million in minutes, of real text, which a teacher would embed in an
hour. --factors takes the shards of a teacher's artifact instead.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.recipe.read import load_recipe
from stages.encoder.model import load_encoder
from stages.rows import unit_rows
from stages.sentences.sources import Reject, read_records

NUM_NEAREST, BLOCK_ROWS, TILE_ROWS, NUM_SAMPLED = 32, 1024, 65_536, 1000
LINKS, EXPANSION = 16, 100

# Rows (n, D) float32 to their nearest (n, k) int64, themselves included
Search = Callable[[np.ndarray, int], np.ndarray]


def exact(vectors_ND: np.ndarray, options: argparse.Namespace) -> Search:
    """Tiles of float32 scores: memory does not grow with N beyond the mapped vectors."""

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def search(rows_nD: np.ndarray, k: int) -> np.ndarray:
        rows = torch.from_numpy(rows_nD).to(device)
        scores = torch.empty(len(rows), 0, device=device)
        places = torch.empty(len(rows), 0, dtype=torch.int64, device=device)
        for start in range(0, len(vectors_ND), TILE_ROWS):
            tile = torch.from_numpy(vectors_ND[start : start + TILE_ROWS].astype(np.float32))
            found = (rows @ tile.to(device).T).topk(min(k, len(tile)))
            scores = torch.cat([scores, found.values], 1)
            places = torch.cat([places, found.indices + start], 1)
        return places.gather(1, scores.topk(k).indices).cpu().numpy()

    return search


def faiss_ivf(vectors_ND: np.ndarray, options: argparse.Namespace) -> Search:
    import faiss

    num_rows, dimension = vectors_ND.shape
    cells = round(num_rows**0.5)
    metric = faiss.METRIC_INNER_PRODUCT
    coarse = faiss.IndexFlatIP(dimension)
    index = faiss.IndexIVFScalarQuantizer(
        coarse, dimension, cells, faiss.ScalarQuantizer.QT_fp16, metric, False
    )
    index.cp.niter = 10
    index.train(vectors_ND[:: max(1, num_rows // (64 * cells))].astype(np.float32))
    for start in range(0, num_rows, BLOCK_ROWS):
        index.add(vectors_ND[start : start + BLOCK_ROWS].astype(np.float32))
    index.nprobe = options.probes
    return lambda rows_nD, k: index.search(rows_nD, k)[1]


def faiss_hnsw(vectors_ND: np.ndarray, options: argparse.Namespace) -> Search:
    import faiss

    # the number of links is that of upper layers; the lowest has twice as many, as USearch's has
    index = faiss.IndexHNSWSQ(
        vectors_ND.shape[1], faiss.ScalarQuantizer.QT_fp16, LINKS, faiss.METRIC_INNER_PRODUCT
    )
    index.hnsw.efConstruction, index.hnsw.efSearch = EXPANSION, EXPANSION
    index.train(vectors_ND[:BLOCK_ROWS].astype(np.float32))
    for start in range(0, len(vectors_ND), 64 * BLOCK_ROWS):
        index.add(vectors_ND[start : start + 64 * BLOCK_ROWS].astype(np.float32))
    return lambda rows_nD, k: index.search(rows_nD, k)[1]


def usearch(vectors_ND: np.ndarray, options: argparse.Namespace) -> Search:
    from usearch.index import Index

    index = Index(
        ndim=vectors_ND.shape[1], metric="ip", dtype="f16", connectivity=LINKS,
        expansion_add=EXPANSION, expansion_search=EXPANSION,
    )  # fmt: skip
    for start in range(0, len(vectors_ND), 64 * BLOCK_ROWS):
        block = np.asarray(vectors_ND[start : start + 64 * BLOCK_ROWS])
        index.add(np.arange(start, start + len(block)), block, threads=options.threads)
    return lambda rows_nD, k: index.search(
        rows_nD.astype(np.float16), k, threads=options.threads
    ).keys.astype(np.int64)


def pynndescent(vectors_ND: np.ndarray, options: argparse.Namespace) -> np.ndarray:
    from pynndescent import NNDescent

    made = NNDescent(
        vectors_ND.astype(np.float32), metric="dot", n_neighbors=NUM_NEAREST + 1,
        n_jobs=options.threads, random_state=0, low_memory=True,
    )  # fmt: skip
    return np.asarray(made.neighbor_graph[0])


WAYS: dict[str, Callable[[np.ndarray, argparse.Namespace], Any]] = {
    "exact": exact,
    "faiss-ivf": faiss_ivf,
    "faiss-hnsw": faiss_hnsw,
    "usearch": usearch,
    "pynndescent": pynndescent,
}


def in_blocks(search: Search, vectors_ND: np.ndarray, rows: np.ndarray, k: int) -> np.ndarray:
    """The k nearest of these rows (n, k) int64, themselves included."""
    found_nk = np.empty((len(rows), k), dtype=np.int64)
    for first in range(0, len(rows), BLOCK_ROWS):
        block = rows[first : first + BLOCK_ROWS]
        found_nk[first : first + len(block)] = search(vectors_ND[block].astype(np.float32), k)
    return found_nk


def without_itself(rows: np.ndarray, found_nk: np.ndarray, k: int) -> np.ndarray:
    """The k nearest of these rows (n, k), of one more."""
    return np.array([near[near != row][:k] for row, near in zip(rows, found_nk, strict=True)])


class Watch:
    """Seconds, and CPU seconds of all threads of this process: others may have the cores too."""

    def __init__(self) -> None:
        self._start = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        return time.perf_counter() - self._start[0], time.process_time() - self._start[1]


def measure(options: argparse.Namespace) -> None:
    """One way, in this process; prints its figures, and leaves its neighbours of the sample."""
    torch.set_num_threads(options.threads)
    vectors_ND = np.load(options.folder / "vectors.npy", mmap_mode="r")
    part = np.random.default_rng(0).permutation(len(vectors_ND))[: options.part]
    watch = Watch()
    made = WAYS[options.measure](vectors_ND, options)
    built, searched = watch.read(), (0.0, 0.0)
    if callable(made):
        watch = Watch()
        found_nk = in_blocks(made, vectors_ND, part, NUM_NEAREST + 1)
        seconds, cpu_seconds = watch.read()
        times = len(vectors_ND) / len(part)
        searched = (seconds * times, cpu_seconds * times)
    else:
        found_nk = made[part]
    sample = without_itself(part[:NUM_SAMPLED], found_nk[:NUM_SAMPLED], 10)
    np.save(options.folder / f"{options.measure}.npy", sample)
    status = Path("/proc/self/status").read_text()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    figures = {"built": built, "searched": searched, "peak_gib": int(peak.split()[1]) / 2**20}
    (options.folder / f"{options.measure}.json").write_text(json.dumps(figures))


def static_vectors(num_rows: int) -> np.ndarray:
    """(N, 384) fp16: mean word embedding of each sentence, less the mean of all."""
    recipe = load_recipe("recipes/wiki-minilm.yaml", ["sentences.max_chars=250"])
    encoder = load_encoder(recipe.teachers[0].encoder())
    words = encoder.backbone.get_input_embeddings().weight.detach()
    texts = (row[0] for row in read_records(recipe.sentences) if not isinstance(row, Reject))
    vectors = np.empty((num_rows, encoder.dimension), dtype=np.float32)
    for start in range(0, num_rows, 4096):
        batch = list(itertools.islice(texts, min(4096, num_rows - start)))
        tokens = encoder.tokenizer(batch)
        ends = np.cumsum([len(row) for row in tokens])
        starts = torch.from_numpy(np.concatenate([[0], ends[:-1]]))
        flat = torch.from_numpy(np.concatenate(tokens).astype(np.int64))
        vectors[start : start + len(batch)] = torch.nn.functional.embedding_bag(flat, words, starts)
    return unit_rows(vectors - vectors.mean(0)).astype(np.float16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--factors", type=Path, help="folder with factors.npy files of a teacher")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--part", type=int, default=8192)
    parser.add_argument("--probes", type=int, default=16)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--folder", type=Path, help="keeps vectors and neighbours")
    parser.add_argument("--measure", choices=list(WAYS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options)
        return
    with tempfile.TemporaryDirectory() as scratch:
        options.folder = options.folder or Path(scratch)
        compare(options)


def compare(options: argparse.Namespace) -> None:
    options.folder.mkdir(parents=True, exist_ok=True)
    place = options.folder / "vectors.npy"
    if not place.exists():
        start = time.perf_counter()
        if options.factors:
            shards = sorted(options.factors.glob("**/*.factors.*.npy"))
            np.save(place, np.concatenate([np.load(shard) for shard in shards]))
        else:
            np.save(place, static_vectors(options.rows))
        print(f"vectors in {time.perf_counter() - start:.0f} s")
    shape = np.load(place, mmap_mode="r").shape
    print(f"{shape[0]:,} vectors of {shape[1]}, {options.threads} threads, {options.probes} probes")
    environment = os.environ | {
        name: str(options.threads) for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")
    }
    handed = [
        f"--{name}={getattr(options, name)}" for name in ("part", "probes", "threads", "folder")
    ]
    for way in sorted(options.ways, key=list(WAYS).index):
        command = [sys.executable, __file__, f"--measure={way}", *handed]
        subprocess.run(command, check=True, env=environment)
        figures = json.loads((options.folder / f"{way}.json").read_text())
        found = np.load(options.folder / f"{way}.npy")
        truth = np.load(options.folder / "exact.npy")  # of this run, or kept from one before
        recall = np.mean([len(np.intersect1d(*rows)) for rows in zip(found, truth, strict=True)])
        built, searched = (
            f"{figures[name][0]:,.0f} s ({figures[name][1]:,.0f} of CPU)"
            for name in ("built", "searched")
        )
        print(
            f"{way:<12} built in {built}, all searched in {searched}, "
            f"peak {figures['peak_gib']:.1f} GiB, recall@10 {10 * recall:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
