"""A training from its opened inputs to its published student, in whatever process that happens.

`start_training`, its rows, `publish_training`: a plain process, a Ray task, Ray Train's workers and
a search's actors are thin hosts of these.
"""

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from stages.contract import Work
from stages.encoder.cpu import NOT_HERE
from stages.encoder.model import drops_out
from stages.evaluate.sets import load_sts
from stages.files import storage_errors
from stages.rows import FactorRows, OwnedRows, TokenRows
from stages.sentences.settings import num_held_out
from stages.text import clock
from stages.train.checkpoint import Checkpoints
from stages.train.engine import DeepSpeedEngine, Engine, PlainEngine, start_deepspeed
from stages.train.loop import Training
from stages.train.metrics import MetricWriter
from stages.train.settings import TrainSettings
from stages.train.stage import Train
from stages.train.student import Student, autocasts, build_student, save_encoder
from stages.train.views import TrainingData

BuildEngine = Callable[[Student, TrainSettings], Engine]


def train(stage: Train, work: Work) -> None:
    """Trains on this worker and, on rank 0, publishes the student."""
    training = start_training(stage, work, engine_of(stage))
    is_first = training.engine.rank == 0
    live = work.root.local_path(f"{work.scratch}/live") if is_first else None
    with storage_errors(work.root.uri):
        writer = MetricWriter(live) if live else None
    student = training.engine.student
    if is_first and student.on_cpu and not student.packs:
        work.say(
            "Padding is computed too, in groups of like length: this student's attention cannot be "
            "told where sentences end. Others train faster on a CPU, without padding."
        )
    if is_first and _views_are_alike(stage, student):
        work.say(
            "WARNING: both views of a sentence are the same vector, as nothing drops out in model "
            f"'{stage.student.settings.model}': view 2 costs as much as view 1 and adds nothing; "
            "set student.dropout", important=True,
        )  # fmt: skip
    precision = stage.settings.precision
    if is_first and precision == "bfloat16" and not student.autocast:
        work.say(f"computed in {NOT_HERE.format(precision)}", important=True)
    for step in training.damaged if is_first else ():
        work.say(
            f"WARNING: the checkpoint of step {step:,} is damaged: a file is not as it was "
            "written. It is not used", important=True,
        )  # fmt: skip
    if is_first and training.continued is not None:
        work.say(_continued(*training.continued, training.engine.layout()), important=True)
    for row in training.rows():
        if writer:
            with storage_errors(work.root.uri):
                writer.add(row)
        if is_first:
            important = "dev_spearman" in row or "agreement" in row
            work.say(_training_line(row), important, row)
        training.put_away_if(work.stopping())
    if writer:
        with storage_errors(work.root.uri):
            writer.close()
    if is_first and training.warning:
        work.say(f"WARNING: {training.warning}", important=True)
    publish_training(work, training)


def _views_are_alike(stage: Train, student: Student) -> bool:
    """Whether dropout alone is to tell views apart and the model's own is 0, as ModernBERT's is."""
    settings = stage.student.settings
    by_dropout = settings.dropout is None and settings.second_template in (None, settings.template)
    rewritten = stage.rewrites and stage.settings.rewritten_view != "none"
    alone = by_dropout and "second" in student.views and not rewritten
    return alone and not drops_out(student.encoder.backbone)


def engine_of(stage: Train) -> BuildEngine:
    """The engine that the settings ask for; DeepSpeed's joins the process group first."""
    if stage.settings.resolved_engine == "plain":
        return PlainEngine
    start_deepspeed()
    return DeepSpeedEngine


def training_data(stage: Train, work: Work) -> TrainingData:
    """Memory-mapped tokens and factors, and the dev set."""

    def token_rows(name: str) -> TokenRows:
        tokens = work.input(name)
        pairs = zip(tokens.shard_paths("ids.npy"), tokens.shard_paths("offsets.npy"), strict=True)
        return TokenRows(list(pairs))

    def owned_rows(names: tuple[str, ...]) -> OwnedRows | None:
        found = []
        for name in names:
            places = [np.load(path) for path in work.input(name).shard_paths("owners.npy")]
            owners = [place + number * stage.rows_per_shard for number, place in enumerate(places)]
            found.append((token_rows(name), np.concatenate(owners)))
        return OwnedRows(found) if found else None

    dev, tokens = stage.settings.dev, token_rows("tokens")
    return TrainingData(
        tokens=tokens,
        factors=[
            FactorRows(work.input(name).shard_paths("factors.npy"), stage.rows_per_shard)
            for name, _ in stage.factors
        ],
        teacher_weights=[weight for _, weight in stage.factors],
        dev=[load_sts(one) for one in dev.sts] if dev else [],
        views={view: token_rows(name) for view, name in stage.views},
        rewrites=owned_rows(stage.rewrites),
        negatives=owned_rows(stage.negatives),
        num_held_out=num_held_out(stage.holdout, tokens.num_rows),
        transfer=dev.transfer if dev else (),
    )


def start_training(
    stage: Train, work: Work, build_engine: BuildEngine, checkpointed: bool = True
) -> Training:
    """The training of this worker.

    Args:
        checkpointed: whether it saves checkpoints and begins at the newest one.
    """
    settings, data = stage.settings, training_data(stage, work)
    student = build_student(
        stage.student.located(work),
        settings.objectives,
        settings.seed,
        autocast=autocasts(settings, stage.student.settings.device),
        teachers=list(zip(data.factors, data.teacher_weights, strict=True)),
        rewritten=data.rewrites is not None and settings.rewritten_view != "none",
    )
    checkpoints = Checkpoints(work.root, work.scratch, work.attempt) if checkpointed else None
    return Training(build_engine(student, settings), settings, data, checkpoints)


def publish_training(work: Work, training: Training, **more: Any) -> None:
    """Publishes the trained student on rank 0, with metrics and `more` about it."""
    engine, result = training.engine, training.trained
    if engine.rank == 0:
        with tempfile.TemporaryDirectory() as local:
            save_encoder(engine.student.encoder, result.weights, Path(local) / "model")
            writer = MetricWriter(Path(local) / "metrics")
            for row in result.progress.history:
                writer.add(row)
            writer.close()
            stats: dict[str, Any] = {
                "num_steps": result.progress.step,
                "best_step": result.progress.best_step,
                "dev_spearman": result.progress.best_score,
                "engine": engine.layout(),
            }
            if training.warning:
                stats["warning"] = training.warning
            work.count_tokens(training.tokens, training.positions)
            work.publish(stats | more, Path(local))
    engine.barrier()


def _continued(step: int, before: dict[str, Any], now: dict[str, Any]) -> str:
    text = f"goes on after step {step:,}"
    if before == now:
        return text
    was, other = (", ".join(f"{key} {one[key]}" for key in one) for one in (before, now))
    return f"{text}, which {was} came to; with {other} what follows is not the same bit for bit"


def _training_line(row: dict[str, Any]) -> str:
    left = (row["num_steps"] - row["step"]) * row["seconds_per_step"]
    text = (
        f"step {row['step']:,}/{row['num_steps']:,}  loss {row['loss']:.4f}  "
        f"{row['seconds_per_step']:.2f} s/step  {row['tokens_per_second']:,.0f} tokens/s  "
        f"peak {row['peak_memory_gib']:.1f} GiB  ETA {clock(left)}"
    )
    if "dev_spearman" in row:
        score = row["dev_spearman"]
        text += f"  {'near pairs' if 'dev/near pairs' in row else 'dev'} {score:.2f}"
        text += " (no number, never chosen)" * math.isnan(score)
    if "agreement" in row:
        text += f"  agreement with its teachers {row['agreement']:.2f}"
    return text
