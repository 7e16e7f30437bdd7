"""Students with prompts, heads and auxiliary losses, and batches for them."""

from pathlib import Path
from typing import Any

import torch

from stages.train.settings import Objectives, TrainSettings
from stages.train.student import Student, build_student
from stages.train.student_settings import StudentSettings
from stages.train.views import Batch, BatchReader, TrainingData
from tests.support.data import token_rows
from tests.support.models import make_sentences

FIRST = 'A book : "{sentence}" means a{mask}.'
SECOND = "A large red {sentence} means a {mask} ."
PROMPTS: dict[str, Any] = dict(
    pooling="mask", template=FIRST, second_template=SECOND, max_length=24, dropout=0.0
)


def built(model: str, objectives: dict[str, Any] | None = None, **settings: Any) -> Student:
    """A student in training mode."""
    chosen = StudentSettings(model=model, device="cpu", **({"pooling": "mean"} | settings))
    checked = Objectives.model_validate(objectives or {"infonce": {}})
    return build_student(chosen, checked, seed=0, autocast=False).train()


def token_data(folder: Path, **settings: Any) -> TrainingData:
    """Tokens of 40 sentences, and nothing else."""
    chosen = StudentSettings.model_validate({"pooling": "mean", "max_length": 16} | settings)
    return TrainingData(token_rows(folder, "tokens", [make_sentences(40)], chosen), [], [], [])


def reader(
    student: Student,
    objectives: dict[str, Any],
    data: TrainingData,
    worker: tuple[int, int] = (0, 1),
) -> BatchReader:
    settings = TrainSettings.model_validate(
        dict(objectives=objectives, batch_size=8, max_steps=4, seed=3)
    )
    return BatchReader(
        settings, data, student.tokenizers, student.views, worker, torch.device("cpu")
    )


def batch_of(
    student: Student,
    objectives: dict[str, Any],
    data: TrainingData,
    worker: tuple[int, int] = (0, 1),
    step: int = 0,
) -> Batch:
    return dict(reader(student, objectives, data, worker)(range(step + 1)))[step]
