"""Trials of several workers: a training under Ray Train whose metric rows a trial's actor reads."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import ray

from pipeline.run.board import near, start_board
from pipeline.run.hosts import make_on_workers
from pipeline.run.work import NodeWork
from stages.train.stage import Train
from tune.trials import recent_loss

SECONDS_BETWEEN_LOOKS = 0.1


def every_row(
    training: Any, stopping: Callable[[], bool], loss_steps: int
) -> Iterator[dict[str, Any]]:
    """Metric rows of a training, with those from before it was continued; `last` marks the last.

    Whoever judges a trial sees its whole curve that way, in order. What is before is read now: a
    member of a population that takes over another's state afterwards does not tell its history.
    The loss is that of the last `loss_steps` steps (see `recent_loss`).

    Raises:
        Stopped: it was to end between two rows, and has saved a checkpoint.
    """
    rows = chain(list(training.progress.history), training.rows())

    def told() -> Iterator[dict[str, Any]]:
        for row in rows:
            is_last = training.is_over and row["step"] == training.progress.step
            loss = recent_loss(training.progress.history, row["step"], loss_steps)
            yield row | {"loss": loss, "last": is_last}
            training.put_away_if(stopping())

    return told()


@ray.remote(num_cpus=0)
class Relay:
    """Metrics of a training with several workers, on their way to the trial's actor.

    The workers wait at each row until the actor asks for the next one: a trial that is stopped has
    neither saved nor published anything since.
    """

    def __init__(self) -> None:
        self._row: dict[str, Any] | None = None
        self._answered = asyncio.Event()
        self._stopped = False

    async def put(self, row: dict[str, Any]) -> bool:
        """Hands a row over; whether the training is to stop."""
        self._row, self._answered = row, asyncio.Event()
        if not self._stopped:
            await self._answered.wait()
        return self._stopped

    async def take(self) -> dict[str, Any] | None:
        row, self._row = self._row, None
        return row

    async def answer(self, stop: bool) -> None:
        self._stopped = stop
        self._answered.set()


def nested_rows(work: NodeWork, search: str) -> Iterator[dict[str, Any]]:
    """Trains with Ray Train and yields its metric rows; closing ends the training.

    The workers are asked to stop and do so together at their next row: killing them would leave
    their cores to a cleaner that can die first.

    Raises:
        Stopped: `work` asked for it; a checkpoint is saved.
    """
    relay: Any = Relay.options(**near()).remote()  # type: ignore[attr-defined]
    board = start_board()
    errors: list[BaseException] = []

    def train() -> None:
        try:
            workers = work.node.stage.resources().workers
            assert workers is not None
            train_relayed = partial(_train_relayed, relay, search)
            make_on_workers(work, workers, board, train_relayed, work.say)
        except BaseException as error:  # handed to the thread that reads
            errors.append(error)

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    try:
        while True:
            if work.stopping():
                ray.get(board.stop.remote())
            alive = thread.is_alive()
            row = ray.get(relay.take.remote())
            if row is not None and not row["last"]:
                yield row
                ray.get(relay.answer.remote(False))
            elif row is not None:  # it counts when the workers have published
                ray.get(relay.answer.remote(False))
                thread.join()
            if errors:
                raise errors[0]
            if row is not None and row["last"]:
                yield row
            if not alive:
                return
            time.sleep(SECONDS_BETWEEN_LOOKS)
    finally:
        ray.get(relay.answer.remote(True))
        thread.join()


def _train_relayed(relay: Any, search: str, work: NodeWork) -> None:
    """Runs in every worker of a nested training."""
    import torch

    from stages.train.run import engine_of, publish_training, start_training

    stage = work.node.stage
    assert isinstance(stage, Train)
    training = start_training(stage, work, engine_of(stage))
    engine = training.engine
    for row in every_row(training, work.stopping, stage.settings.log_every_steps):
        stop = engine.rank == 0 and ray.get(relay.put.remote(row))
        device = engine.student.encoder.device
        if engine.sum_over_workers(torch.tensor(float(stop), device=device)) > 0:
            return
    publish_training(work, training, search=search)
