"""The training loop. Its hosts (a plain process, a Ray task, Ray Train workers) add nothing to it.

Step s: rows of global batch s -> this worker's views of them -> student -> gather the views over
workers -> cosines -> objectives over the global batch -> backward, clip, AdamW.
Teachers cost one gather of cached rows and one product: nobody runs a teacher here.
"""

import json
import math
import resource
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stages.errors import Stopped, UserError
from stages.train.checkpoint import Checkpoints, Saved
from stages.train.dev import HARDLY, Agreement, DevSets
from stages.train.engine import Engine
from stages.train.loss import total_loss
from stages.train.objectives.base import Scores
from stages.train.objectives.scores import cosines, mix_teachers, row_cosines
from stages.train.settings import TrainSettings, batch_too_large
from stages.train.state import read_state
from stages.train.student import step_seed
from stages.train.views import Batch, BatchReader, TrainingData


@dataclass
class Progress:
    """What a checkpoint carries besides weights and optimizer."""

    step: int = 0
    best_score: float | None = None
    best_step: int = 0
    evaluations_since_best: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Trained:
    """The result: the chosen weights of the encoder (on the CPU), and how training went."""

    weights: dict[str, Tensor]
    progress: Progress


class Training:
    """One training: `rows` trains, row by row of metrics; then `trained` has the result.

    Whoever reads the rows may stop, or save, between two of them.

    Args:
        checkpoints: where it continues, and saves every `checkpoint_every_seconds`.

    Raises:
        UserError: batch larger than the corpus, or a checkpoint that cannot be read.
    """

    def __init__(
        self,
        engine: Engine,
        settings: TrainSettings,
        data: TrainingData,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        for factor in data.factors:
            same = factor.num_rows == data.tokens.num_rows
            assert same, "factors and tokens come from different sentences"
        if settings.batch_size > data.num_rows:
            raise batch_too_large(settings.batch_size, data.num_rows)
        self.engine = engine
        self.num_steps = settings.num_steps(data.num_rows)
        self._settings = settings
        self._data = data
        self._checkpoints = checkpoints
        self._agreement = Agreement(engine, data) if data.factors else None
        self._dev: DevSets | Agreement | None = None  # what the checkpoint is chosen on
        if settings.dev is not None:
            on_held_out = self._agreement if data.num_held_out else None
            above = settings.dev.positives_above
            labelled = bool(data.dev or data.transfer)
            self._dev = DevSets(engine, data, above) if labelled else on_held_out
        self.progress = Progress()
        self._best: dict[str, Tensor] | None = None
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._saving: Future[None] | None = None
        self._saved_at = time.monotonic()
        # the step at which it went on, and the layout of who had come so far
        self.continued: tuple[int, dict[str, Any]] | None = None
        self.damaged: list[int] = []  # steps of newer checkpoints that were of no use
        self.tokens, self.positions = 0, 0  # that this worker was fed since it began
        if checkpoints is not None:
            self.resume(checkpoints)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Trains to the end; every worker gets the same number of metric rows.

        Raises:
            UserError: a loss that is not finite.
        """
        engine, settings, progress = self.engine, self._settings, self.progress
        steps = range(progress.step, self.num_steps if not self._patience_is_over() else 0)
        read = BatchReader(
            settings, self._data, engine.student.tokenizers, engine.student.views,
            (engine.rank, engine.num_workers), engine.student.encoder.device,
        )  # fmt: skip
        every = settings.dev.every_steps if settings.dev and self._dev else None
        window = _Window(progress.step)
        for step, batch in read(steps):
            torch.manual_seed(step_seed(settings.seed, step, engine.rank))
            engine.student.train()
            loss, parts = _loss(engine, settings, self._data, batch)
            rate = settings.learning_rate_at(step, self.num_steps)
            norm = engine.step(loss, rate)
            window.add(loss, parts, norm, batch.num_tokens, engine.student.num_positions)
            progress.step = step + 1

            last = progress.step == self.num_steps
            evaluate = every is not None and (last or progress.step % every == 0)
            steps_apart = settings.checkpoint_every_steps
            save = steps_apart is not None and progress.step % steps_apart == 0 and not last
            if evaluate or save or last or progress.step % settings.log_every_steps == 0:
                row = window.row(progress.step, self.num_steps, rate, engine)
                if evaluate:
                    row |= self._evaluate()
                if self.is_over and self._agreement is not None:
                    if self._dev is not self._agreement:
                        self._agreement.scores()
                    row["agreement"] = float(np.nan_to_num(self._agreement.of_all_pairs()))
                progress.history.append(row)
                self.tokens += window.tokens
                self.positions += window.positions
                yield row
                if self._checkpoints is not None and not self.is_over and (save or self._is_due()):
                    self._save_later(self._checkpoints)
                window = _Window(progress.step)
            if self._patience_is_over():
                break
        self.finish_saving()

    def put_away_if(self, asked: bool) -> None:
        """Saves a checkpoint, where it has any, and ends if any worker was asked to; all call it.

        Raises:
            Stopped: the checkpoint is there.
        """
        device = self.engine.student.encoder.device
        count = self.engine.sum_over_workers(torch.tensor(int(asked), device=device))
        if int(count) and not self.is_over:
            if self._checkpoints is not None:
                self.save(self._checkpoints)
            raise Stopped

    def _is_due(self) -> bool:
        """Whether the last checkpoint is old, by the first worker's clock; all call it."""
        engine = self.engine
        old = time.monotonic() - self._saved_at > self._settings.checkpoint_every_seconds
        flag = torch.tensor(int(old and engine.rank == 0), device=engine.student.encoder.device)
        return bool(engine.sum_over_workers(flag))

    @property
    def is_over(self) -> bool:
        """Whether no row follows."""
        return self.progress.step == self.num_steps or self._patience_is_over()

    @property
    def trained(self) -> Trained:
        """The weights of the best evaluation, or the last step's where none gave a number."""
        if self._best is None:
            self._best = self.engine.encoder_weights()
            self.progress.best_step = self.progress.step
        return Trained(self._best, self.progress)

    @property
    def warning(self) -> str | None:
        """What is to be said about the result as it is now."""
        progress = self.progress
        if progress.best_score is None and progress.evaluations_since_best:
            return (
                f"no evaluation gave a number ({progress.evaluations_since_best} of them): all "
                "vectors alike, or no numbers. The weights of the last step are the "
                "result. Look at the loss and at train.dev; a lower train.learning_rate may help."
            )
        agreed = progress.history[-1].get("agreement") if progress.history else None
        if agreed is None or agreed >= HARDLY:
            return None
        return (
            f"student and teachers hardly agree: Spearman x 100 of their similarities is "
            f"{agreed:.1f}. Do the student, its teachers and the "
            "sentences share a language? If they do, look at the loss; another "
            "train.learning_rate or more steps may help."
        )

    def save(self, checkpoints: Checkpoints) -> None:
        """Publishes a checkpoint of the present step; all call it, and return once it is there."""
        self._save_later(checkpoints)
        self.finish_saving()
        self.engine.barrier()

    def _save_later(self, checkpoints: Checkpoints) -> None:
        """Copies the present state and has it written while training goes on; all call it.

        Raises:
            StorageError: the checkpoint before this one could not be written.
        """
        self.finish_saving()
        progress, snapshot = self.progress, self.engine.snapshot()
        self._saved_at = time.monotonic()
        if snapshot is None:  # the first worker has it
            return
        # as text and back: training goes on to change it
        state = json.loads(json.dumps(vars(progress) | {"layout": self.engine.layout()}))
        best = None if self._best is None else (progress.best_step, self._best)
        self._saving = self._writer.submit(
            checkpoints.save, progress.step, snapshot.write, state, best
        )

    def finish_saving(self) -> None:
        """Waits for the checkpoint that is being written.

        Raises:
            StorageError: it could not be.
        """
        if self._saving is not None:
            self._saving.result()
            self._saving = None

    def resume(self, checkpoints: Checkpoints) -> None:
        """Goes on from the newest checkpoint that is whole, if there is one; before `rows`.

        With other workers than wrote it the steps to come are not the same bit for bit.
        """
        device = self.engine.student.encoder.device
        while True:
            # rank 0 chooses for all: a network file system may show the others an older listing
            newest = checkpoints.newest() if self.engine.rank == 0 else Saved(0, 0)
            chosen = self.engine.sum_over_workers(torch.tensor(newest, device=device)).tolist()
            saved = Saved(*chosen)
            if saved.step == 0:
                return
            with checkpoints.opened(saved) as found:
                whole = torch.tensor(int(found is not None), device=device)
                count = int(self.engine.sum_over_workers(whole))
                if found is not None and count == self.engine.num_workers:
                    self.engine.load(read_state(found.folder, device))
                    self.continued = (saved.step, found.state.pop("layout"))
                    self.progress, self._best = Progress(**found.state), found.best
                    return
            checkpoints.reject(saved)
            self.damaged.append(saved.step)

    def _evaluate(self) -> dict[str, float]:
        """Dev scores of the present step, which may be the best."""
        assert self._dev is not None
        progress, scores = self.progress, self._dev.scores()
        mean = sum(scores.values()) / len(scores)
        # nan (all vectors alike, say) is no score: it never wins, not even over none
        if math.isfinite(mean) and (progress.best_score is None or mean > progress.best_score):
            progress.best_score, progress.best_step = mean, progress.step
            progress.evaluations_since_best = 0
            self._best = self.engine.encoder_weights()
        else:
            progress.evaluations_since_best += 1
        row = {f"dev/{name}": score for name, score in scores.items()} | {"dev_spearman": mean}
        return row | (self._dev.geometry if isinstance(self._dev, DevSets) else {})

    def _patience_is_over(self) -> bool:
        patience = self._settings.dev.patience if self._settings.dev else None
        return patience is not None and self.progress.evaluations_since_best >= patience


def _loss(
    engine: Engine, settings: TrainSettings, data: TrainingData, batch: Batch
) -> tuple[Tensor, dict[str, Tensor]]:
    own = [factors_BD[batch.own] for factors_BD in batch.factors_BD]
    views_VbD, sums = engine.forward(batch.ids_VbL, batch.mask_VbL, batch.masked, own)
    auxiliary = {name: _global_mean(engine, *one) for name, one in sums.items()}
    if not settings.objectives.needs_second:
        return total_loss(None, settings.objectives, auxiliary)
    names = engine.student.views
    views = dict(zip(names, map(engine.gather_rows, views_VbD.chunk(len(names))), strict=True))
    factors = batch.factors_BD
    teacher_BB = mix_teachers(factors, data.teacher_weights) if factors else None
    losses = [
        total_loss(
            _scores({name: view_BD[:, :width] for name, view_BD in views.items()}, teacher_BB),
            settings.objectives,
            auxiliary,
        )
        for width in engine.student.widths
    ]
    return torch.stack([loss for loss, _ in losses]).mean(), losses[0][1]


def _scores(views: dict[str, Tensor], teacher_BB: Tensor | None) -> Scores:
    u_BD = views.pop("first")
    return Scores(
        cosines(u_BD, views.pop("second", u_BD)),
        teacher_BB,
        own={name: row_cosines(u_BD, view_BD) for name, view_BD in views.items()},
        across={name: cosines(u_BD, view_BD) for name, view_BD in views.items()},
    )


def _global_mean(engine: Engine, own_sum: Tensor, own_count: Tensor) -> Tensor:
    """The mean over all workers' tokens; its gradient is that of the own ones."""
    count = engine.sum_over_workers(own_count.detach().float())
    own = own_sum / count.clamp(min=1)
    return own + (engine.sum_over_workers(own.detach()) - own.detach())


class _Window:
    """Sums since the last metric row; stays on the device until a row is asked for."""

    def __init__(self, first_step: int) -> None:
        self._first_step = first_step
        self._started = time.perf_counter()
        self._sums: dict[str, Tensor] = {}
        self.tokens, self.positions = 0, 0

    def add(
        self, loss: Tensor, parts: dict[str, Tensor], norm: Tensor, tokens: int, positions: int
    ) -> None:
        values = {"loss": loss.detach(), "gradient_norm": norm.detach(), **parts}
        for name, value in values.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        self.tokens += tokens
        self.positions += positions

    def row(self, step: int, num_steps: int, rate: float, engine: Engine) -> dict[str, Any]:
        count = step - self._first_step
        row: dict[str, Any] = {"step": step, "num_steps": num_steps, "learning_rate": rate}
        row |= {name: float(value) / count for name, value in self._sums.items()}
        if not (math.isfinite(row["loss"]) and math.isfinite(row["gradient_norm"])):
            key = "gradient_norm" if math.isfinite(row["loss"]) else "loss"
            raise UserError(
                f"train: the {key} became {row[key]} between steps {self._first_step + 1} and "
                f"{step}; nothing was saved from there on. Lower train.learning_rate, raise the "
                "temperatures, or use precision: float32."
            )
        seconds = time.perf_counter() - self._started
        row["seconds_per_step"] = seconds / count
        row["tokens_per_second"] = self.tokens * engine.num_workers / seconds
        row["padding_share"] = 1 - self.tokens / self.positions
        row["peak_memory_gib"] = peak_memory_bytes(engine.student.encoder.device) / 2**30
        return row


def peak_memory_bytes(device: torch.device) -> int:
    """Peak of the GPU's allocator, or of this process's resident memory on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
