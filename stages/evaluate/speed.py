"""Size and speed of encoders, side by side.

Machines are shared and noisy, so encoders take turns in several rounds and what is reported is
the median of the paired ratios with its range; absolute rates are only of this machine, now.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from stages.encoder.model import Encoder

NUM_ROUNDS = 5


def size_of(encoder: Encoder) -> dict[str, Any]:
    """Layers, parameters, and bytes of the float32 weights."""
    number = sum(p.numel() for p in encoder.backbone.parameters())
    return {
        "layers": encoder.backbone.config.num_hidden_layers,
        "parameters": number,
        "megabytes_float32": 4 * number / 1e6,
    }


def compare_speed(
    student: Encoder, teachers: dict[str, Encoder], texts: Sequence[str]
) -> dict[str, Any]:
    """Encodes `texts` with everyone in turn, after one round of warm-up.

    Returns:
        `sentences_per_second` by name (median), `times_faster` by teacher (median, lowest and
        highest of the rounds' paired ratios), threads and number of texts.
    """
    everyone = {"student": student} | teachers
    seconds: dict[str, list[float]] = {name: [] for name in everyone}
    for _ in range(NUM_ROUNDS + 1):
        for name, encoder in everyone.items():
            start = time.perf_counter()
            encoder.encode(texts)
            seconds[name].append(time.perf_counter() - start)
    times = {name: np.array(taken[1:]) for name, taken in seconds.items()}
    ratios = {name: times[name] / times["student"] for name in teachers}
    return {
        "threads": torch.get_num_threads(),
        "num_texts": len(texts),
        "sentences_per_second": {
            name: float(len(texts) / np.median(taken)) for name, taken in times.items()
        },
        "times_faster": {
            name: {"median": float(np.median(r)), "low": float(r.min()), "high": float(r.max())}
            for name, r in ratios.items()
        },
    }
