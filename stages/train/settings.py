"""Settings of student and training. Imports no torch.

Defaults are RankCSE's BERT-base ListNet row (Table 9) where the paper gives a number.
"""

from typing import Literal

from pydantic import Field, model_validator

from stages.encoder.settings import EncoderSettings
from stages.errors import UserError
from stages.evaluate.settings import StsSettings
from stages.settings import Settings, execution


class StudentSettings(EncoderSettings):
    max_length: int = Field(32, ge=3, le=8192, description="Tokens of a training sentence.")
    head: Literal["tanh", "none"] = Field(
        "tanh",
        description="Layer between pooling and loss while training, dropped afterwards: "
        "tanh(Wx + b) as in SimCSE, or none.",
    )
    dropout: float | None = Field(
        None, ge=0, lt=1, description="Dropout everywhere in the backbone; null keeps its own."
    )


class InfoNce(Settings):
    weight: float = Field(1.0, ge=0)
    temperature: float = Field(0.05, gt=0, description="tau1.")


class Consistency(Settings):
    weight: float = Field(1.0, ge=0, description="beta.")
    temperature: float = Field(0.05, gt=0, description="tau1 of this term.")


class ListNet(Settings):
    weight: float = Field(1.0, ge=0, description="gamma.")
    student_temperature: float = Field(0.025, gt=0, description="tau2.")
    teacher_temperature: float = Field(0.0125, gt=0, description="tau3.")


class ListMle(Settings):
    weight: float = Field(1.0, ge=0, description="gamma.")
    student_temperature: float = Field(0.05, gt=0, description="tau2.")
    keep_positive: bool = Field(True, description="Leave the sentence itself in its list.")


class Objectives(Settings):
    """Losses that are summed with their weights; a method is a choice of these."""

    infonce: InfoNce | None = None
    consistency: Consistency | None = None
    listnet: ListNet | None = None
    listmle: ListMle | None = None

    @model_validator(mode="after")
    def _some(self) -> "Objectives":
        if not any((self.infonce, self.consistency, self.listnet, self.listmle)):
            raise ValueError("name at least one objective: infonce, consistency, listnet, listmle")
        return self

    @property
    def needs_teacher(self) -> bool:
        return self.listnet is not None or self.listmle is not None


class DevSettings(Settings):
    sts: StsSettings = Field(description="The STS set that checkpoints are chosen on.")
    every_steps: int = Field(125, ge=1, description="Steps between evaluations.")
    patience: int | None = Field(
        None, ge=1, description="Stop after this many evaluations without a better one."
    )


class TrainSettings(Settings):
    objectives: Objectives
    batch_size: int = Field(128, ge=2, description="Sentences of the global batch.")
    epochs: int = Field(1, ge=1)
    max_steps: int | None = Field(
        None, ge=1, description="Steps in all, fewer or more than the epochs would make."
    )
    learning_rate: float = Field(3e-5, gt=0)
    warmup_ratio: float = Field(0.05, ge=0, lt=1, description="Share of steps with rising rate.")
    weight_decay: float = Field(0.0, ge=0)
    clip_norm: float = Field(1.0, gt=0, description="Largest global gradient norm.")
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="bfloat16: autocast; weights, optimizer and losses stay float32."
    )
    seed: int = Field(42, ge=0)
    dev: DevSettings | None = Field(
        None, description="Without it the weights of the last step are the result."
    )
    engine: Literal["auto", "plain", "deepspeed"] = execution(
        "auto", description="plain: one device. deepspeed: under Ray Train. auto: by num_workers."
    )
    num_workers: int = execution(1, ge=1, description="Training processes.")
    zero_stage: int = execution(0, ge=0, le=3, description="DeepSpeed ZeRO stage.")
    cpus_per_worker: int | None = execution(
        None, ge=1, description="Cores of a worker; null: this machine's, divided by workers."
    )
    gpus_per_worker: int | None = execution(
        None, ge=0, description="GPUs of a worker; null: one where the cluster has them."
    )
    checkpoint_every_steps: int = execution(500, ge=1, description="Steps a kill can cost at most.")
    max_failures: int = execution(3, ge=0, description="Lost workers that are replaced.")
    log_every_steps: int = execution(10, ge=1, description="Steps between metric rows.")

    @model_validator(mode="after")
    def _consistent(self) -> "TrainSettings":
        if self.batch_size % self.num_workers:
            raise ValueError(
                f"batch_size {self.batch_size} cannot be divided among num_workers "
                f"{self.num_workers}; change one of them"
            )
        if self.engine == "plain" and self.num_workers > 1:
            raise ValueError("engine 'plain' is for one worker; set engine: deepspeed")
        if self.zero_stage and self.resolved_engine == "plain":
            raise ValueError("zero_stage needs engine: deepspeed")
        return self

    @property
    def resolved_engine(self) -> Literal["plain", "deepspeed"]:
        if self.engine == "auto":
            return "plain" if self.num_workers == 1 else "deepspeed"
        return self.engine

    def num_steps(self, num_rows: int) -> int:
        """Steps of the whole training; the partial batch at an epoch's end is left out."""
        return self.max_steps or self.epochs * (num_rows // self.batch_size)

    def learning_rate_at(self, step: int, num_steps: int) -> float:
        """Linear warm-up, then linear decay to 0; `step` counts from 0."""
        warmup = int(self.warmup_ratio * num_steps)
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        return self.learning_rate * (num_steps - step) / max(1, num_steps - warmup)


def batch_too_large(batch_size: int, num_rows: int) -> UserError:
    """The error of a batch that the corpus cannot fill."""
    return UserError(
        f"train.batch_size is {batch_size}, but there are only {num_rows} sentences; lower it or "
        "give more text"
    )
