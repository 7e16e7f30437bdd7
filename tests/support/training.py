"""Training in process, for tests of the loop."""

from collections.abc import Callable
from typing import Any

from stages.train.checkpoint import Checkpoints
from stages.train.engine import Engine
from stages.train.loop import Trained, Training
from stages.train.settings import TrainSettings
from stages.train.views import TrainingData


def train(
    engine: Engine,
    settings: TrainSettings,
    data: TrainingData,
    checkpoints: Checkpoints | None = None,
    on_metrics: Callable[[dict[str, Any]], None] = lambda row: None,
) -> Trained:
    """Trains to the end; `on_metrics` gets each metric row. Errors as `Training` raises them."""
    training = Training(engine, settings, data, checkpoints)
    try:
        for row in training.rows():
            on_metrics(row)
    finally:
        training.finish_saving()
    return training.trained
