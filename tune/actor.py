"""Where trials train: a Tune actor that makes one after the other.

A one-device trial trains in the actor itself, so the next one finds libraries, factors and tokens
there already. A trial with several workers runs Ray Train, and the actor hands its metrics on.
Tune sees one result for each value of the metric, and one when the trial is published.
"""

import gc
import os
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ray
from ray.tune import Trainable

from pipeline.plan.graph import build_graph
from pipeline.recipe.read import read_recipe
from pipeline.run.board import stop_of
from pipeline.run.placement import use_assigned_cores
from pipeline.run.work import begun
from stages.errors import Stopped, StorageError, UserError
from stages.files import Root
from stages.train.stage import Train
from tune.assignment import Assignment
from tune.nested import every_row, nested_rows
from tune.trials import curve_of, publish_result


class TrialActor(Trainable):
    """Tune's view of a trial. What goes wrong is a result too: the actor stays."""

    def setup(self, config: dict[str, Any], board: Any) -> None:  # type: ignore[override]
        self._free_since = time.time()
        self._board, self._stopping = board, stop_of(board)
        use_assigned_cores()
        self._take(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.cleanup()
        self._take(new_config)
        return True

    def _take(self, config: dict[str, Any]) -> None:
        self._assignment: Assignment = config["assignment"]
        self._values = self._assignment.values
        if self._assignment.member is not None:
            self._values = self._assignment.member.space.within(config)
        self._training: Any = None  # of a one-device trial
        self._rows: Iterator[dict[str, Any]] | None = None
        self._seconds = 0.0

    def step(self) -> dict[str, Any]:
        """Trains until the metric is measured again, and publishes at the end."""
        try:
            return self._next_result()
        except Stopped:
            if not ray.get(self._board.asked_to_stop.remote()):
                os._exit(0)  # its machine is taken away: Tune lets it go on elsewhere
            self.cleanup()
            return self._over({"step": 0, "put_away": True})
        except UserError as error:
            return self._failed(str(error), retryable=isinstance(error, StorageError))
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0]
            reason = f"{type(error).__name__}: {reason} (its traceback is with the trial)"
            return self._failed(reason, retryable=True, trace=traceback.format_exc())

    def _next_result(self) -> dict[str, Any]:
        if self._rows is None:
            self._rows = self._open()
        started = time.time()
        for row in self._rows:
            point = curve_of([row], self._assignment.metric)
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
            if self._assignment.member is None:
                self._publish()
                result["published"] = True
            return self._over(result)
        raise RuntimeError("the training ended without its last row of metrics")

    def _open(self) -> Iterator[dict[str, Any]]:
        (work,) = begun([replace(self._assignment.work, stopping=self._stopping)])
        member, stage = self._assignment.member, work.node.stage
        if member is not None:
            changes = self._values | {"train.seed": self._assignment.seed}
            recipe = read_recipe(member.document.changed(changes, ""))
            stage = build_graph(recipe).nodes["train"].stage
        assert isinstance(stage, Train)
        if stage.settings.resolved_engine == "deepspeed":
            return nested_rows(work, self._assignment.search)
        from stages.train.engine import PlainEngine
        from stages.train.run import start_training

        # a member continues others, not itself
        self._training = start_training(stage, work, PlainEngine, checkpointed=member is None)
        return every_row(self._training, self._stopping, stage.settings.log_every_steps)

    def _publish(self) -> None:
        work, result = self._assignment.work, self._assignment.result
        if self._training is not None:
            from stages.train.run import publish_training

            publish_training(work, self._training, search=self._assignment.search)
        publish_result(work, result)

    def _facts(self, step: int) -> dict[str, Any]:
        """What this trial cost so far."""
        overhead = time.time() - self._free_since - self._seconds
        return {"step": step, "seconds": self._seconds, "overhead_seconds": overhead}

    def _over(self, result: dict[str, Any]) -> dict[str, Any]:
        """The last result; what it cost includes the publishing."""
        result |= self._facts(result["step"]) | {"done": True}
        self._free_since = time.time()
        return result

    def _failed(self, reason: str, retryable: bool, trace: str = "") -> dict[str, Any]:
        step = self._training.progress.step if self._training is not None else 0
        failure = {"reason": reason, "retryable": retryable, "trace": trace}
        result = self._over({"step": step} | failure)
        self.cleanup()
        return result

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
        """Goes on where a member was, with the configuration that this one has now."""
        from stages.train.checkpoint import Checkpoints

        self._rows = self._open()
        self._training.resume(Checkpoints(Root(str(checkpoint)), "member"))
        if self._training.continued is None:
            raise StorageError(f"the state of a member in {checkpoint} is damaged")
