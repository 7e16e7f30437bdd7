"""Seconds instead of minutes of a teacher's and a student's work, on a sample of the user's text.

What is timed is what a run does: the embedder of the stage `embed`, the loop of `train`. torch is
imported when something is timed.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.new.models import Teacher
from stages.encoder.prompts import kind_prompts
from stages.encoder.settings import EncoderSettings
from stages.recipe import TeacherSettings
from stages.train.settings import TrainSettings
from stages.train.student_settings import StudentSettings

# A measurement ends when it has taken this long, or so many rounds or steps. A round has so many
# sentences at most, or as many as take a while.
ENOUGH_SECONDS, MOST_ROUNDS, MOST_STEPS = 3.0, 5, 8
MOST_TEXTS, SHORT_SECONDS = 1024, 0.3
# Text is read this far to find how long it is.
MOST_TOKENS = 512
# bfloat16 must be so many times as fast as float32 to be chosen, and similarities of its vectors
# be so near to float32's (root mean square): MiniLM's differ by 0.0009, and students do not notice
# (docs/results.md); six times that is not known to be harmless.
LEAST_GAIN, MOST_ERROR, COMPARED_TEXTS = 1.1, 0.005, 64


@dataclass(frozen=True)
class Lengths:
    """Tokens that the teacher and the student read at most, and the share of unknown ones."""

    teacher: int
    student: int
    unknown: float


@dataclass(frozen=True)
class TeacherSpeed:
    """What embedding takes.

    seconds: of a sentence. single: in float32, as the comparison at a run's end has it. load: of
    the model. precision: the one chosen; gain: how many times as fast as float32 bfloat16 is;
    error: root mean square of what it changes of similarities.
    """

    seconds: float
    single: float
    load: float
    precision: str
    gain: float
    error: float


@dataclass(frozen=True)
class StudentSpeed:
    """Seconds of a training step, and of loading the student."""

    step: float
    load: float


def longest_prompt(teacher: Teacher) -> str | None:
    """The longer one of what a model's own files put before queries and before documents.

    Both kinds are timed and measured with it, so that nothing is too short.
    """
    prompts = kind_prompts(EncoderSettings(model=teacher.model, pooling=_pooling(teacher)))
    return max(prompts.values(), key=len, default=None)


def measure_lengths(teacher: Teacher, texts: Sequence[str], prompt: str | None) -> Lengths:
    """Lengths that 99% (teacher) and 95% (student) of the sentences keep to, in eights.

    Args:
        prompt: before each; None for the model's own.

    Raises:
        UserError: the model has no tokenizer.
    """
    from stages.encoder.tokenizer import load_tokenizer

    most = min(teacher.positions or MOST_TOKENS, MOST_TOKENS)
    settings = EncoderSettings(
        model=teacher.model, pooling=_pooling(teacher), max_length=most, prompt=prompt
    )
    tokenizer = load_tokenizer(settings)
    rows = tokenizer(texts)
    lengths = sorted(map(len, rows))
    unknown = tokenizer.pretrained.unk_token_id
    count = sum(int((row == unknown).sum()) for row in rows) if unknown is not None else 0

    def kept_by(share: float, limit: int) -> int:
        length = lengths[int(share * (len(lengths) - 1))]
        return min(max(16, -(-length // 8) * 8), limit, most)

    return Lengths(kept_by(0.99, 256), kept_by(0.95, 128), count / max(1, sum(lengths)))


def measure_teacher(teacher: TeacherSettings, texts: Sequence[str]) -> TeacherSpeed:
    """Times embedding in float32 and, in turn, in bfloat16, and compares what comes of it.

    Raises:
        UserError: the model cannot be loaded.
    """
    import numpy as np

    from stages.embed.embedder import Embedder

    embed, load = {}, 0.0
    for precision in ("float32", "bfloat16"):
        started = time.perf_counter()
        settings = teacher.encoder().model_copy(update={"precision": precision})
        embed[precision] = Embedder(settings)
        load = time.perf_counter() - started  # the second time: not fetched, files in memory
        embed[precision](texts[:2])  # makes ready
    taken = _in_turn(embed, texts)
    gain = taken["float32"] / taken["bfloat16"]
    exact, rounded = (one.units(texts[:COMPARED_TEXTS]) for one in embed.values())
    error = float(np.sqrt(np.mean((exact @ exact.T - rounded @ rounded.T) ** 2)))
    chosen = "bfloat16" if gain >= LEAST_GAIN and error <= MOST_ERROR else "float32"
    return TeacherSpeed(taken[chosen], taken["float32"], load, chosen, gain, error)


def measure_student(
    student: StudentSettings, settings: TrainSettings, teacher: Teacher, texts: Sequence[str]
) -> StudentSpeed:
    """Times steps of training, by the loop itself; the teacher's vectors are made up.

    Raises:
        UserError: the student cannot be built.
    """
    import numpy as np

    from stages.rows import FactorRows, TokenRows, npy_bytes, unit_rows
    from stages.tokens.tokeniser import Tokeniser
    from stages.train.engine import PlainEngine
    from stages.train.loop import Training
    from stages.train.student import autocasts, build_student
    from stages.train.views import TrainingData

    num_rows = max(settings.batch_size, min(len(texts), MOST_TEXTS))
    rows = [texts[number % len(texts)] for number in range(num_rows)]
    with tempfile.TemporaryDirectory(prefix="sentray-new-") as name:
        folder = Path(name)
        files = Tokeniser(student.view_settings())(rows)
        random = np.random.default_rng(0).standard_normal((num_rows, teacher.width))
        files["factors.npy"] = npy_bytes(unit_rows(random).astype(np.float16))
        for file, content in files.items():
            (folder / file).write_bytes(content)
        tokens = TokenRows([(folder / "ids.npy", folder / "offsets.npy")])
        factors = FactorRows([folder / "factors.npy"], num_rows)
        data = TrainingData(tokens, [factors], [1.0], [])
        started = time.perf_counter()
        built = build_student(
            student, settings.objectives, settings.seed, autocasts(settings, student.device),
            [(factors, 1.0)],
        )  # fmt: skip
        load = time.perf_counter() - started
        timed = settings.model_copy(update={"max_steps": MOST_STEPS, "log_every_steps": 1})
        steps: list[float] = []
        for row in Training(PlainEngine(built, timed), timed, data).rows():
            steps.append(row["seconds_per_step"])
            if len(steps) > 2 and sum(steps) > ENOUGH_SECONDS:
                break
    return StudentSpeed(statistics.median(steps[1:]), load)  # the first one makes ready


def _pooling(teacher: Teacher) -> Literal["auto", "mean"]:
    return "auto" if teacher.names_pooling else "mean"


def _in_turn(
    embed: Mapping[str, Callable[[Sequence[str]], Any]], texts: Sequence[str]
) -> dict[str, float]:
    """Mean seconds of a sentence for each, in rounds, as others may use the machine too."""
    number, rounds = 8, list[dict[str, float]]()
    while sum(sum(one.values()) for one in rounds) < ENOUGH_SECONDS:
        seconds = {}
        for name, embed_texts in embed.items():
            started = time.perf_counter()
            embed_texts(texts[:number])
            seconds[name] = time.perf_counter() - started
        if max(seconds.values()) < SHORT_SECONDS and number < min(len(texts), MOST_TEXTS):
            number *= 2
            continue
        rounds.append(seconds)
        if len(rounds) == MOST_ROUNDS:
            break
    each = min(number, len(texts))
    return {name: statistics.fmean(one[name] for one in rounds) / each for name in embed}
