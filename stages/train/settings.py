"""Settings of student and training. Imports no torch.

Defaults are RankCSE's BERT-base ListNet row (Table 9) where the paper gives a number.
"""

from typing import Literal

from pydantic import Field, model_validator

from stages.encoder.settings import EncoderSettings, ModelSettings
from stages.errors import UserError
from stages.evaluate.settings import StsSettings, check_names_differ
from stages.settings import Settings, execution

# What a rank regression may take the maximum with
CONTRASTIVE = ("infonce", "soft_negative")


class StudentSettings(EncoderSettings):
    max_length: int = Field(
        32, ge=3, le=8192, description="Tokens of a training sentence, template included."
    )
    second_template: str | None = Field(
        None, description="Template of the second view (and of soft negatives); null: the same."
    )
    template_denoising: bool = Field(
        False,
        description="Subtract what the template alone gives, at the sentence's positions, while "
        "training (PromptBERT).",
    )
    head: Literal["tanh", "linear", "batchnorm", "none"] = Field(
        "tanh",
        description="Layer between pooling and loss while training, dropped afterwards: "
        "tanh(Wx + b) as in SimCSE, Wx + b as in DenoSent, DiffCSE's two layers with batch norm, "
        "or none.",
    )
    dropout: float | None = Field(
        None, ge=0, lt=1, description="Dropout everywhere in the backbone; null keeps its own."
    )

    @model_validator(mode="after")
    def _templates_go_together(self) -> "StudentSettings":
        if self.template is None and (self.second_template or self.template_denoising):
            raise ValueError("second_template and template_denoising need a template")
        if self.second_template is not None:
            EncoderSettings(
                model=self.model, pooling=self.pooling, template=self.second_template,
                max_length=self.max_length,
            )  # fmt: skip
        if self.template_denoising and self.pooling != "mask":
            raise ValueError("template_denoising needs pooling: mask")
        return self

    def view_settings(self) -> list[EncoderSettings]:
        """The encoder of view 1 and that of view 2 (and soft negatives): templates may differ."""
        first = self.encoder()
        second = self.second_template or self.template
        return [first, first.model_copy(update={"template": second})]


class InfoNce(Settings):
    weight: float = Field(1.0, ge=0)
    temperature: float = Field(0.05, gt=0, description="tau1.")
    hard_negatives: bool = Field(
        False, description="The rewrites' negatives are candidates too, every sentence's for all."
    )


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


class RankRegression(Settings):
    """RankEncoder. Defaults are the paper's; two of its released runs use a sum and 0.9999."""

    weight: float = Field(0.05, ge=0, description="lambda.")
    low: float = Field(0.5, ge=-1, le=1, description="tau_l: least teacher similarity of a pair.")
    high: float = Field(0.8, ge=-1, le=1, description="tau_u: greatest teacher similarity.")
    combine: Literal["maximum", "sum"] = Field(
        "maximum",
        description="maximum: the larger of this and the contrastive part (infonce and "
        "soft_negative); all other objectives are added after it. sum: added like them.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> "RankRegression":
        if self.low > self.high:
            raise ValueError(
                f"low {self.low} (tau_l) is above high {self.high} (tau_u), so no pair would pass"
            )
        return self


class SoftNegative(Settings):
    """SNCSE's bidirectional margin; every sentence gets its negation as a third view."""

    weight: float = Field(1e-3, ge=0, description="lambda: 1e-3 for BERT, 5e-4 for RoBERTa.")
    low: float = Field(0.1, description="alpha: least distance below the positive's cosine.")
    high: float = Field(0.3, description="beta: greatest distance below it.")

    @model_validator(mode="after")
    def _ordered(self) -> "SoftNegative":
        if self.low > self.high:
            raise ValueError(f"low {self.low} (alpha) is above high {self.high} (beta)")
        return self


class MaskedLanguage(Settings):
    weight: float = Field(0.1, ge=0)
    mask_ratio: float = Field(0.15, gt=0, lt=1, description="Share of tokens to be predicted.")


class ReplacedToken(Settings):
    """DiffCSE: a discriminator, conditioned on the vector, finds what a generator replaced."""

    weight: float = Field(0.005, ge=0, description="lambda.")
    mask_ratio: float = Field(0.30, gt=0, lt=1, description="Share of tokens that are masked.")
    generator: ModelSettings = Field(
        ModelSettings(model="distilbert-base-uncased"),
        description="Frozen masked-language model with the student's vocabulary.",
    )

    @model_validator(mode="after")
    def _generator_is_pretrained(self) -> "ReplacedToken":
        if self.generator.recipe_file is not None:
            raise ValueError("it must be a pretrained model: a recipe's student has no head")
        return self


class Denoising(Settings):
    """DenoSent: a decoder that is given the vector finds the tokens behind noisy embeddings."""

    weight: float = Field(1.0, ge=0, description="w_g.")
    target: Literal["input", "memory"] = Field(
        "input",
        description="input: the tokens of view 2, whose embeddings the decoder is given (released "
        "code). memory: those of view 1, which gives the vector (the paper's text).",
    )
    layers: int = Field(16, ge=1)
    attention_heads: int = Field(1, ge=1)
    feed_forward: int = Field(2048, ge=1, description="Width between the two linear layers.")
    noise: float = Field(
        0.825, ge=0, lt=1, description="Share of the numbers of the embeddings that are dropped."
    )
    dropout: float = Field(0.1, ge=0, lt=1, description="Inside the decoder.")
    vocabulary_head: Literal["pretrained", "new"] = Field(
        "pretrained",
        description="The student's own masked-language head, or a freshly initialised one; either "
        "way its vocabulary matrix is the student's word embedding.",
    )


class Objectives(Settings):
    """Losses that are combined with their weights; a method is a choice of these."""

    infonce: InfoNce | None = None
    consistency: Consistency | None = None
    listnet: ListNet | None = None
    listmle: ListMle | None = None
    rank_regression: RankRegression | None = None
    soft_negative: SoftNegative | None = None
    masked_language: MaskedLanguage | None = None
    replaced_token: ReplacedToken | None = None
    denoising: Denoising | None = None

    @model_validator(mode="after")
    def _some(self) -> "Objectives":
        named = {name for name in type(self).model_fields if getattr(self, name) is not None}
        if not named:
            raise ValueError(f"name at least one objective: {', '.join(type(self).model_fields)}")
        regression = self.rank_regression
        if regression and regression.combine == "maximum" and named.isdisjoint(CONTRASTIVE):
            raise ValueError(
                "rank_regression has no other to take the maximum with: add infonce, or set "
                "rank_regression.combine: sum"
            )
        return self

    @property
    def needs_teacher(self) -> bool:
        return any((self.listnet, self.listmle, self.rank_regression))

    @property
    def needs_negatives(self) -> bool:
        return self.infonce is not None and self.infonce.hard_negatives


class DevSettings(Settings):
    sts: list[StsSettings] = Field(
        min_length=1, description="STS sets; checkpoints are chosen on their mean."
    )
    every_steps: int = Field(125, ge=1, description="Steps between evaluations.")
    patience: int | None = Field(
        None, ge=1, description="Stop after this many evaluations without a better one."
    )

    @model_validator(mode="after")
    def _names_differ(self) -> "DevSettings":
        check_names_differ(self.sts)
        return self


class TrainSettings(Settings):
    objectives: Objectives
    batch_size: int = Field(128, ge=2, description="Sentences of the global batch.")
    epochs: int = Field(1, ge=1)
    max_steps: int | None = Field(
        None, ge=1, description="Steps in all, fewer or more than the epochs would make."
    )
    rewritten_view: Literal["second", "first", "none"] = Field(
        "second",
        description="With rewrites (`perturb`): which view is one of the sentence's rewrites. none "
        "trains on the same sentences without them, as an ablation.",
    )
    learning_rate: float = Field(3e-5, gt=0)
    schedule: Literal["linear", "constant"] = Field(
        "linear", description="After the warm-up: falling to 0, or staying."
    )
    warmup_ratio: float = Field(0.05, ge=0, lt=1, description="Share of steps with rising rate.")
    weight_decay: float = Field(0.0, ge=0, description="Not of biases and norms.")
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
        """Linear warm-up, then the schedule; `step` counts from 0."""
        warmup = int(self.warmup_ratio * num_steps)
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        if self.schedule == "constant":
            return self.learning_rate
        return self.learning_rate * (num_steps - step) / max(1, num_steps - warmup)


def batch_too_large(batch_size: int, num_rows: int) -> UserError:
    """The error of a batch that the corpus cannot fill."""
    return UserError(
        f"train.batch_size is {batch_size}, but there are only {num_rows} sentences; lower it or "
        "give more text"
    )
