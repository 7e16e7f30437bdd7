"""Where trials train: a Tune actor that makes one after the other.

A one-device trial trains in the actor itself, so the next one finds libraries, factors and tokens
there already. A trial with several workers runs Ray Train, and the actor hands its metrics on.
Tune sees one result for each value of the metric, and one when the trial is published.
"""

import asyncio
import gc
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import ray
from ray.tune import Trainable

from pipeline.hosts import start_board, train_deepspeed, use_assigned_cores
from pipeline.job import Job, Say
from pipeline.recipe import Recipe
from pipeline.work import publish_training, start_training
from stages.errors import StorageError, UserError
from stages.files import Root
from tune.space import Space, Values
from tune.trials import curve_of, publish_result

SECONDS_BETWEEN_LOOKS = 0.1


@dataclass(frozen=True, repr=False)
class Assignment:
    """What an actor is to train; `repr` is short since Tune puts it into names.

    result: the job whose publication says that the trial is finished.
    may_be_stopped: whether the scheduler judges it.
    space, member: of a population, whose settings change while it trains: they are then in
        Tune's configuration, by path.
    """

    job: Job
    result: Job
    values: Values
    metric: str
    search: str
    may_be_stopped: bool = True
    space: Space | None = None
    member: str = ""

    def __repr__(self) -> str:
        return self.job.node.fingerprint[:8]

    def __deepcopy__(self, memo: Any) -> "Assignment":
        return self  # Tune copies configurations often


class TrialActor(Trainable):
    """Tune's view of a trial. What goes wrong is a result too: the actor stays."""

    def setup(self, config: dict[str, Any]) -> None:
        self._free_since = time.time()
        use_assigned_cores()
        self._take(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.cleanup()
        self._take(new_config)
        return True

    def _take(self, config: dict[str, Any]) -> None:
        self._assignment: Assignment = config["assignment"]
        self._values = self._assignment.values
        if self._assignment.space is not None:
            self._values = self._assignment.space.within(config)
        self._started = time.time()
        self._training: Any = None  # of a one-device trial
        self._rows: Iterator[dict[str, Any]] | None = None
        self._seconds = 0.0

    def step(self) -> dict[str, Any]:
        """Trains until the metric is measured again, and publishes at the end."""
        try:
            return self._next_result()
        except UserError as error:
            return self._failed(str(error), mendable=isinstance(error, StorageError))
        except Exception as error:
            traceback.print_exc()
            reason = (str(error).splitlines() or [""])[0]
            return self._failed(f"{type(error).__name__}: {reason}", mendable=True)

    def _next_result(self) -> dict[str, Any]:
        if self._rows is None:
            self._rows = self._open()
        metric = self._assignment.metric
        started = time.time()
        for row in self._rows:
            point = curve_of([row], metric)
            if not (point or row["last"]):
                continue
            self._seconds += time.time() - started
            result = self._facts(row["step"])
            result["progress"] = 100 * row["step"] / row["num_steps"]
            if self._assignment.may_be_stopped:
                result["judged"] = result["progress"]
            if point:
                result["value"] = point[0][2]
            if not row["last"]:
                return result
            if self._assignment.space is None:
                self._publish()
                result["published"] = True
            return self._over(result)
        raise RuntimeError("the training ended without its last row of metrics")

    def _open(self) -> Iterator[dict[str, Any]]:
        job = self._assignment.job
        if job.recipe.train.resolved_engine == "deepspeed":
            return nested_rows(job, self._assignment.search)
        from stages.train.engine import PlainEngine

        if self._assignment.space is not None:  # a member of a population continues others
            recipe = changed_recipe(job.recipe, self._values)
            job = replace(job, node=replace(job.node, recipe=recipe))
        self._training = start_training(job, PlainEngine, self._assignment.space is None)
        return every_row(self._training)

    def _publish(self) -> None:
        job, result = self._assignment.job, self._assignment.result
        if self._training is not None:
            publish_training(job, self._training, search=self._assignment.search)
        publish_result(job, result)

    def _facts(self, step: int) -> dict[str, Any]:
        """What this trial cost so far."""
        now = time.time()
        return {
            "step": step,
            "seconds": self._seconds,
            "overhead_seconds": now - self._free_since - self._seconds,
        }

    def _over(self, result: dict[str, Any]) -> dict[str, Any]:
        result |= {"overhead_seconds": time.time() - self._free_since - self._seconds}
        self._free_since = time.time()
        return result | {"done": True}

    def _failed(self, reason: str, mendable: bool) -> dict[str, Any]:
        step = self._training.progress.step if self._training is not None else 0
        facts = self._facts(step)
        self.cleanup()
        return self._over(facts | {"reason": reason, "mendable": mendable})

    def cleanup(self) -> None:
        """Ends what runs and frees its memory."""
        rows, self._rows, self._training = self._rows, None, None
        if rows is not None:
            rows.close()  # type: ignore[attr-defined]
            self._free_since = time.time()
        gc.collect()
        import torch

        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any] | None:
        """The state of a population's member."""
        from stages.train.checkpoint import Checkpoints

        if self._training is not None:
            self._training.save(Checkpoints(Root(checkpoint_dir), "member"))
        return None

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Goes on where a member was, with the settings that this one has now."""
        from stages.train.checkpoint import Checkpoints

        self._rows = self._open()
        self._training.resume(Checkpoints(Root(str(checkpoint)), "member"))


def changed_recipe(recipe: Recipe, values: Values) -> Recipe:
    """The recipe with other values, which it is known to accept (`run_population`)."""
    from pipeline.document import assign

    raw = recipe.model_dump()
    for key, value in values.items():
        assign(raw, key, value, key)
    return Recipe.model_validate(raw)


def every_row(training: Any) -> Iterator[dict[str, Any]]:
    """Metric rows of a training, with those from before it was continued; `last` marks the last.

    Whoever judges a trial sees its whole curve that way, in order. What is before is read now: a
    member of a population that takes over another's state afterwards does not tell its history.
    """
    rows = chain(list(training.progress.history), training.rows())
    return (
        row | {"last": training.is_over and row["step"] == training.progress.step} for row in rows
    )


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


def nested_rows(job: Job, search: str) -> Iterator[dict[str, Any]]:
    """Trains with Ray Train and yields its metric rows; closing ends the training.

    The workers are asked to stop and do so together at their next row: killing them would leave
    their cores to a cleaner that can die first.
    """
    relay: Any = Relay.remote()  # type: ignore[attr-defined]
    errors: list[BaseException] = []

    def train() -> None:
        try:
            train_deepspeed(job, start_board(), _Relayed(relay, search))
        except BaseException as error:  # handed to the thread that reads
            errors.append(error)

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    try:
        while True:
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


@dataclass
class _Relayed:
    """Runs in every worker of a nested training."""

    relay: Any
    search: str

    def __call__(self, job: Job, build_engine: Any, say: Say) -> None:
        import torch

        training = start_training(job, build_engine)
        engine = training.engine
        for row in every_row(training):
            stop = False
            if engine.rank == 0:
                stop = ray.get(self.relay.put.remote(row))
            device = engine.student.encoder.device
            if engine.sum_over_workers(torch.tensor(float(stop), device=device)) > 0:
                return
        publish_training(job, training, search=self.search)
