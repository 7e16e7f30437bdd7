"""Speed of student and teachers, side by side.

Machines are shared and noisy, so encoders take turns in several rounds and what is reported is
the median of the paired ratios with its range; absolute rates are only of this machine, now.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from stages.contract import (
    EncoderLabel,
    Figure,
    Fingerprinted,
    Measurement,
    Resources,
    Stage,
    Work,
    measured,
)
from stages.encoder.source import EncoderSource
from stages.planning import Graph
from stages.sentences.texts import read_kinds, read_texts
from stages.teachers import encoding_teachers

if TYPE_CHECKING:
    import numpy as np

NUM_ROUNDS = 5
NUM_TEXTS = 100


@dataclass(frozen=True)
class Speed(Stage):
    """Times student and teachers on the first sentences of the corpus, all in float32."""

    student: EncoderSource[Any]
    teachers: tuple[tuple[str, EncoderSource[Any]], ...]
    max_length: int

    kind = "speed"
    version = 4  # 100 sentences, not 256

    def identity(self, inputs: Mapping[str, Fingerprinted]) -> dict[str, Any]:
        # its figures and notes name them
        found = {"max_length": self.max_length, "names": [name for name, _ in self.teachers]}
        return found | {
            f"teachers[{number}]": teacher.identity(inputs)
            for number, (_, teacher) in enumerate(self.teachers)
        }

    def resources(self) -> Resources:
        return Resources(gpu=True, alone=True)

    def make(self, work: Work, loaded: Any) -> None:
        from stages.encoder.model import load_told

        sentences = work.input("sentences")
        first = sentences.shard_numbers[0]
        texts = read_texts(sentences, first)[:NUM_TEXTS]
        kinds = (read_kinds(sentences, first) or [])[:NUM_TEXTS] or None  # prompts take time too
        alike = {"max_length": self.max_length, "precision": "float32"}
        everyone = {"after": self.student, **dict(self.teachers)}
        encoders = {
            name: load_told(one.located(work).model_copy(update=alike), work)
            for name, one in everyone.items()
        }
        work.say(f"{len(texts)} sentences, student and {len(self.teachers)} teacher(s) in turn")
        encode = {name: partial(one.encode, kinds=kinds) for name, one in encoders.items()}
        work.publish(compared(time_all(encode, texts), len(texts)))


def plan(graph: Graph) -> None:
    recipe = graph.recipe
    teachers = tuple((t.name, graph.encoder(t.encoder())) for _, t in encoding_teachers(graph))
    if not (recipe.evaluate.speed and teachers):
        return
    student = graph.trained_student()
    stage = Speed(student, teachers, recipe.evaluate.max_length)
    others = dict(pair for _, teacher in teachers for pair in teacher.inputs)
    graph.add("speed", stage, ["sentences", *student.inputs, *others.items()])


def time_all(
    encode: Mapping[str, Callable[[Sequence[str]], Any]], texts: Sequence[str]
) -> "dict[str, np.ndarray]":
    """Seconds of every round for everyone, in turn, after one round of warm-up."""
    import numpy as np

    seconds: dict[str, list[float]] = {name: [] for name in encode}
    for _ in range(NUM_ROUNDS + 1):
        for name, encode_texts in encode.items():
            start = time.perf_counter()
            encode_texts(texts)
            seconds[name].append(time.perf_counter() - start)
    return {name: np.array(taken[1:]) for name, taken in seconds.items()}


def times_as_fast(slow: "np.ndarray", fast: "np.ndarray") -> tuple[float, float, float]:
    """Median, lowest and highest of the ratios of seconds that were measured in pairs."""
    import numpy as np

    ratio = slow / fast
    return float(np.median(ratio)), float(ratio.min()), float(ratio.max())


def compared(seconds: "dict[str, np.ndarray]", num_texts: int) -> dict[str, Any]:
    """Stats of the node: sentences a second of everyone (median), and for each teacher how many
    times as fast the student, `after`, is: median, lowest and highest of the paired ratios."""
    import numpy as np
    import torch

    threads = torch.get_num_threads()
    measurements, notes, ratios = [], [], {}
    for name, taken in seconds.items():
        label = EncoderLabel("after" if name == "after" else "teacher", name)
        rate = float(num_texts / np.median(taken))
        measurements.append(Measurement(label, [Figure("sentences/s", rate, decimals=0)]))
        if name == "after":
            continue
        median, low, high = times_as_fast(taken, seconds["after"])
        ratios[name] = {"median": median, "low": low, "high": high}
        notes.append(
            f"The student is {median:.2f} times as fast as {name} ({low:.2f} to {high:.2f}, "
            f"{threads} thread(s))."
        )
    return measured(measurements, notes, threads=threads, num_texts=num_texts, times_faster=ratios)
