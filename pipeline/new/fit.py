"""What fits a budget of time: teacher, student and training, timed on the user's own text."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pipeline.new.choose import Costs, Schedule, TooShort, batch_size, num_trained, schedule
from pipeline.new.models import Teacher
from pipeline.new.speed import (
    Lengths,
    StudentSpeed,
    TeacherSpeed,
    longest_prompt,
    measure_lengths,
    measure_student,
    measure_teacher,
)
from pipeline.new.text import Text
from stages.errors import UserError
from stages.evaluate.speed import NUM_ROUNDS, NUM_TEXTS
from stages.recipe import TeacherSettings
from stages.sentences.settings import num_held_out
from stages.text import clock
from stages.train.settings import DevSettings, TrainSettings
from stages.train.student_settings import StudentSettings

# Learning rate and batch that were best for students with layers, and that suit static tables
# (docs/log.md, docs/recipes.md).
LAYERED, STATIC = (1e-3, 64), (3e-3, 512)
# Seconds of a run beside embedding, training and loading models: a guess from the log of one run on
# a busy machine (Ray's start, then 5 s for sentences, 13 s and 9 s until embedding and training
# begin). How often a run loads each model, one after the other.
START_SECONDS = 30.0
TEACHER_LOADS, STUDENT_LOADS = 6, 2
# Reading, cleaning, cutting and sorting take a second for about 100,000 short lines, or 12,000
# texts of 2,000 characters (one core of an AMD EPYC). Tables with held-out pairs are read twice.
SECONDS_PER_RECORD, SECONDS_PER_CHAR = 1e-5, 3.5e-8
# The comparison of speed is left out where it would take more than this share of the budget.
MOST_COMPARING = 0.2
LEAST_SENTENCES = 16
LEAST_ROWS, SHARDS_PER_CORE = 256, 4
# Of the curve by which `run` judges what would help next.
CURVE_POINTS = 40


@dataclass(frozen=True)
class Machine:
    """cores: that this process may use. gpu: its name, or ""."""

    cores: int
    memory_gib: float
    gpu: str

    def __str__(self) -> str:
        cores = f"{self.cores} core{'s' * (self.cores != 1)}"
        return f"{cores}, {self.memory_gib:.0f} GiB, {self.gpu or 'no GPU'}"


@dataclass(frozen=True)
class Sections:
    """Teacher, student and training as plain data: what is timed is what is written."""

    teacher: dict[str, Any]
    student: dict[str, Any]
    train: dict[str, Any]


@dataclass(frozen=True)
class Proposal:
    """A recipe, and what it stands on.

    layers: that the student keeps. seconds: of the parts of a run, by name. compares_speed: whether
    its end times student and teacher side by side. minutes: the budget.
    """

    text: Text
    teacher: Teacher
    lengths: Lengths
    machine: Machine
    speed: TeacherSpeed
    sections: Sections
    schedule: Schedule
    rows_per_shard: int
    layers: int
    seconds: dict[str, float]
    compares_speed: bool
    minutes: float

    @property
    def passes(self) -> float:
        seen = self.schedule.num_steps * int(self.sections.train["batch_size"])
        return seen / num_trained(self.schedule.num_sentences)

    @property
    def all_seconds(self) -> float:
        return sum(self.seconds.values())


def fit(
    text: Text, teacher: Teacher, layers: int | None, minutes: float, say: Callable[[str], None]
) -> Proposal:
    """Settings and steps that fit.

    Args:
        layers: of the student; None: half of the teacher's, fewer where the time is too short.
        say: told what is measured.

    Raises:
        UserError: too little text or time, or a model that cannot be loaded.
    """
    if text.num_sentences < LEAST_SENTENCES:
        raise UserError(
            f"{text.source.path}: {text.num_sentences} different sentences are too few to train "
            f"on ({LEAST_SENTENCES} at least, some thousands to learn anything)"
        )
    say(f"timing {teacher.model}")
    prompt = longest_prompt(teacher) if text.source.has_pairs else None
    prompted: dict[str, Any] = {} if prompt is None else {"prompt": prompt}
    lengths = measure_lengths(teacher, text.sample, prompt)
    timed = _sections(teacher, 1, lengths, "float32", 2).teacher
    speed = measure_teacher(TeacherSettings(**timed, **prompted), text.sample)
    machine = look_at_machine()
    half = math.ceil(teacher.layers / 2)
    fewer = [kept for kept in (half, 1, 0) if kept < teacher.layers]
    tried = dict.fromkeys(fewer if layers is None else [layers])
    needed: dict[int, tuple[float, float]] = {}
    for kept in tried:
        batch = batch_size((LAYERED if kept else STATIC)[1], text.num_sentences)
        found = _sections(teacher, kept, lengths, speed.precision, batch)
        plan = partial(_scheduled, text, teacher, lengths, machine, speed, found, kept)
        say(f"timing {students_name(kept, teacher)}")
        student = StudentSettings(**found.student, **prompted if kept else {})
        timing = measure_student(student, TrainSettings(**found.train), teacher, text.sample)
        one = plan(timing, minutes)
        if isinstance(one, Proposal):
            return one
        needed[kept] = _enough(partial(plan, timing), one)
    kept, (enough, seconds) = min(needed.items(), key=lambda item: item[1])
    raise UserError(
        f"--minutes {minutes:g} is too short for {students_name(kept, teacher)}: start, tests and "
        f"the least training take {clock(seconds)} or more; give --minutes {enough:g}"
        + (", or fewer --layers" if layers is not None and kept > 1 else "")
    )


def _enough(
    plan: "Callable[[float], Proposal | TooShort]", refused: TooShort
) -> tuple[float, float]:
    """Minutes, in halves, for which there is a plan, and the seconds that the refused one takes:
    where there is more time, more is compared."""
    found: Proposal | TooShort = refused
    while isinstance(found, TooShort):
        seconds, minutes = found.seconds, math.ceil(found.seconds / 30) / 2
        found = plan(minutes)
    return minutes, seconds


def look_at_machine() -> Machine:
    """The machine that this process runs on."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(len(os.sched_getaffinity(0)), memory / 2**30, gpu)


def students_name(layers: int, teacher: Teacher) -> str:
    """The student in words."""
    if not layers:
        return "a static table of token vectors"
    return f"{layers} of the teacher's {teacher.layers} layers"


def _sections(
    teacher: Teacher, layers: int, lengths: Lengths, precision: str, batch: int
) -> Sections:
    both: dict[str, Any] = {"model": teacher.model}
    both |= {} if teacher.names_pooling else {"pooling": "mean"}
    teaches = {"name": teacher.short_name} | both
    teaches |= {"max_length": lengths.teacher, "precision": precision}
    student = both | {"layers": layers, "head": "none", "dropout": 0.0}
    if layers > 2:  # with less than two layers to train it costs more than it saves
        student["freeze_layers"] = 1
    elif layers:
        student["freeze_embeddings"] = True
    student["max_length"] = lengths.student
    train = {
        "objectives": {"vector_regression": {}},
        "batch_size": batch,
        "learning_rate": (LAYERED if layers else STATIC)[0],
        "precision": precision,
    }
    return Sections(teaches, student, train)


def _scheduled(
    text: Text,
    teacher: Teacher,
    lengths: Lengths,
    machine: Machine,
    speed: TeacherSpeed,
    found: Sections,
    layers: int,
    student: StudentSpeed,
    minutes: float,
) -> Proposal | TooShort:
    budget = 60 * minutes
    reading = text.num_records * SECONDS_PER_RECORD + text.num_chars * SECONDS_PER_CHAR
    start = START_SECONDS + reading * (2 if text.num_held_out else 1)
    start += TEACHER_LOADS * speed.load + STUDENT_LOADS * student.load
    # in turn and on one core; one round more to warm up
    each = speed.single * (1 if machine.gpu else machine.cores) * (1 + layers / teacher.layers)
    comparing = (NUM_ROUNDS + 1) * min(NUM_TEXTS, text.num_sentences) * each
    compares = comparing < MOST_COMPARING * budget
    start += comparing if compares else 0
    # the retrieval test: both sides of each pair, by the teacher and by the student twice
    start += 2 * text.num_held_out * speed.single * (1 + 2 * layers / teacher.layers)
    # the student embeds what recipes hold out before training, after it, and now and then meanwhile
    embedding_held = num_held_out(None, text.num_sentences) * speed.single * layers / teacher.layers
    start += 2 * embedding_held
    step = student.step + embedding_held / DevSettings().every_steps
    batch = found.train["batch_size"]
    costs = Costs(start, speed.seconds, step, batch)
    one = schedule(costs, text.num_sentences, budget)
    if isinstance(one, TooShort):
        return one
    train = found.train | {"max_steps": one.num_steps}
    if one.num_steps < 10 * CURVE_POINTS:  # else every ten steps
        train["log_every_steps"] = max(1, one.num_steps // CURVE_POINTS)
    found = replace(found, train=train)
    # several shards for each core, or some would have nothing to embed
    rows = max(LEAST_ROWS, math.ceil(one.num_sentences / (SHARDS_PER_CORE * machine.cores)))
    seconds = {
        "start and tests": start,
        "embedding": one.num_sentences * speed.seconds,
        "training": one.num_steps * step,
    }
    return Proposal(
        text, teacher, lengths, machine, speed, found, one, rows, layers, seconds, compares, minutes
    )
