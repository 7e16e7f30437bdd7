"""Settings of student and training. Imports no torch.

Defaults are RankCSE's BERT-base ListNet row (Table 9) where the paper gives a number.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from stages.encoder.settings import EncoderSettings
from stages.errors import UserError
from stages.evaluate.geometry import check_positives
from stages.evaluate.sets import StsSettings, check_names_differ, load_sts
from stages.fields import Seed
from stages.settings import Extensible, Settings, added, execution
from stages.train.objectives.base import Objective, View
from stages.train.objectives.consistency import Consistency
from stages.train.objectives.denoising import Denoising
from stages.train.objectives.infonce import InfoNce
from stages.train.objectives.listmle import ListMle
from stages.train.objectives.listnet import ListNet
from stages.train.objectives.masked_language import MaskedLanguage
from stages.train.objectives.rank_regression import RankRegression
from stages.train.objectives.replaced_token import ReplacedToken
from stages.train.objectives.similarity_regression import SimilarityRegression
from stages.train.objectives.soft_negative import SoftNegative
from stages.train.objectives.vector_regression import VectorRegression
from stages.vocabulary.settings import VocabularySettings


class StudentSettings(EncoderSettings):
    trained = True

    max_length: int = Field(
        32, ge=3, le=8192, description="Most tokens of a training sentence; the template counts."
    )
    second_template: str | None = Field(
        None,
        description="Template of the second view and of soft negatives; null: the same as "
        "`template`.",
    )
    template_denoising: bool = Field(
        False,
        description="While training, subtract the vector of the template alone, at the sentence's "
        "positions (PromptBERT).",
    )
    head: Literal["tanh", "linear", "batchnorm", "none"] = Field(
        "tanh",
        description="Layer between pooling and loss while training; it is dropped afterwards. "
        "tanh: tanh(Wx + b) as in SimCSE. linear: Wx + b as in DenoSent. batchnorm: DiffCSE's two "
        "layers with batch norm.",
    )
    dropout: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="Dropout rate everywhere in the encoder; null: the model's own.",
    )
    freeze_embeddings: bool = added(
        False,
        description="Keep the word embeddings as they are: faster, and as good where they are the "
        "teacher's own.",
    )
    freeze_layers: int = added(
        0,
        ge=0,
        description="Keep that many of the first layers as they are, and what is no layer "
        "(embeddings): faster still. For a student whose first layers are its teacher's own.",
    )

    aligned: bool = added(
        False,
        description="Keep the linear map to the teacher's width: the student's vectors are then in "
        "the teacher's space, so that what the teacher has embedded is searched with the student "
        "(LEAF). For one teacher and the objective vector_regression.",
    )

    dimensions: list[Annotated[int, Field(ge=1)]] = added(
        [],
        description="Further widths (Matryoshka): that many leading coordinates are trained to be "
        "good vectors too, so that vectors may be cut. The whole width is always trained.",
    )

    vocabulary: VocabularySettings | None = added(
        None,
        description="Keep only the tokens that the recipe's texts use, and their embeddings: "
        "{min_count: 1}. null: the whole vocabulary.",
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

    @model_validator(mode="after")
    def _makes_sense(self) -> "StudentSettings":
        if len(set(self.dimensions)) < len(self.dimensions):
            raise ValueError(f"dimensions {self.dimensions} names a width twice")
        for name in ("aligned", "dimensions"):
            if getattr(self, name) and self.head != "none":
                raise ValueError(
                    f"{name} is about the student's own vectors, and head: {self.head} is between "
                    "them and the loss; set head: none"
                )
        if self.aligned and self.template_denoising:
            raise ValueError(
                "aligned: with template_denoising other vectors are trained than are used; leave "
                "one of them out"
            )
        if self.pooling == "first-last":
            raise ValueError(
                "pooling: first-last is no student's, as sentence-transformers could not load it; "
                "set mean"
            )
        if self.is_static and self.dropout:
            raise ValueError("layers: 0 has no dropout; leave it out")
        if self.is_static and (self.freeze_embeddings or self.freeze_layers):
            raise ValueError(
                "layers: 0 has nothing but embeddings, so freeze_embeddings and freeze_layers must "
                "be off"
            )
        return self

    @property
    def is_cut(self) -> bool:
        """Whether its vectors may be cut, and so have coordinates of their own (see `aligned`)."""
        return bool(self.dimensions) and not self.aligned

    @property
    def views_differ(self) -> bool:
        """Whether dropout or a template of its own tells the second view from the first."""
        drops = self.dropout != 0 and not self.is_static
        return drops or self.second_template not in (None, self.template)

    def view_settings(self) -> list[EncoderSettings]:
        """The encoder of view 1 and that of view 2 (and soft negatives): templates may differ."""
        first = self.encoder()
        second = self.second_template or self.template
        return [first, first.model_copy(update={"template": second})]


class Objectives(Extensible):
    """The list of objectives. Their losses are summed with their weights; a method is a choice of
    them. Objectives of plug-ins join the list."""

    additions = "objectives"

    infonce: InfoNce | None = None
    consistency: Consistency | None = None
    listnet: ListNet | None = None
    listmle: ListMle | None = None
    vector_regression: VectorRegression | None = added(
        None, description="Regression on the teachers' vectors."
    )
    similarity_regression: SimilarityRegression | None = added(
        None, description="Regression on the teachers' similarities."
    )
    rank_regression: RankRegression | None = None
    soft_negative: SoftNegative | None = None
    masked_language: MaskedLanguage | None = None
    replaced_token: ReplacedToken | None = None
    denoising: Denoising | None = None

    @model_validator(mode="after")
    def _some(self) -> "Objectives":
        chosen = self.chosen
        if not chosen:
            raise ValueError(f"name at least one objective: {', '.join(type(self).model_fields)}")
        for name, one in chosen.items():
            if one.replaces_contrastive and not any(o.contrastive for o in chosen.values()):
                raise ValueError(
                    f"{name} has no other to take the maximum with: add infonce, or set "
                    f"{name}.combine: sum"
                )
        return self

    @property
    def chosen(self) -> dict[str, Objective]:
        """The objectives that are named, by key."""
        own = {name: getattr(self, name) for name in type(self).model_fields}
        everyone = own | self.added_sections
        return {name: one for name, one in everyone.items() if isinstance(one, Objective)}

    @property
    def needs_teacher(self) -> bool:
        return any(one.needs_teacher for one in self.chosen.values())

    @property
    def needs_second(self) -> bool:
        return any(one.needs_second for one in self.chosen.values())

    @property
    def needs_negatives(self) -> bool:
        return any(one.needs_negatives for one in self.chosen.values())

    @property
    def views(self) -> list[View]:
        """Further views of the sentences that objectives ask for, each once."""
        found = {view.name: view for one in self.chosen.values() for view in one.views}
        return list(found.values())


class DevSettings(Settings):
    sts: list[StsSettings] = Field(
        [],
        description="STS sets. The checkpoint with the best mean over them is the result. None: "
        "the one that agrees best with its teachers on held-out sentences (`sentences.holdout`), "
        "on the 1% of their pairs that are nearest.",
    )
    every_steps: int = Field(125, ge=1, description="Steps between evaluations.")
    patience: int | None = Field(
        None,
        ge=1,
        description="Stop after this many evaluations without a better one; null: never.",
    )

    positives_above: float | None = added(
        None,
        description="Log alignment and uniformity of the STS sets too: pairs with a higher gold "
        "score count as meaning the same (4 of 5 in the papers). null: they are not measured.",
    )

    @model_validator(mode="after")
    def _names_differ(self) -> "DevSettings":
        check_names_differ(self.sts)
        if self.positives_above is not None and not self.sts:
            raise ValueError("positives_above is about pairs with gold scores; name sets in `sts`")
        return self

    @property
    def measures(self) -> list[str]:
        """Names of what it measures."""
        return [one.name for one in self.sts] or ["near pairs"]

    def check(self) -> None:
        """Reads the sets that are files.

        Raises:
            UserError: what is wrong with one, or none of its pairs is above `positives_above`.
        """
        for one in self.sts:
            one.check()
            if self.positives_above is not None and one.path is not None:
                check_positives(load_sts(one), self.positives_above, "train.dev")


class TrainSettings(Settings):
    objectives: Objectives
    batch_size: int = Field(
        128, ge=2, description="Sentences in the global batch, over all workers."
    )
    epochs: int = Field(1, ge=1, description="Passes over the sentences.")
    max_steps: int | None = Field(
        None, ge=1, description="Steps in all, instead of `epochs`: fewer or more."
    )
    rewritten_view: Literal["second", "first", "none"] = Field(
        "second",
        description="Which view of a sentence is one of its rewrites, where there are any "
        "(`perturb`). none: train on the same sentences without their rewrites, as an ablation.",
    )
    learning_rate: float = Field(3e-5, gt=0, description="Peak learning rate of AdamW.")
    schedule: Literal["linear", "constant"] = Field(
        "linear",
        description="Learning rate after the warm-up. linear: falls to 0. constant: stays.",
    )
    warmup_ratio: float = Field(
        0.05,
        ge=0,
        lt=1,
        description="Share of the steps in which the learning rate rises to its peak.",
    )
    weight_decay: float = Field(
        0.0, ge=0, description="Weight decay of AdamW; biases and norms have none."
    )
    clip_norm: float = Field(1.0, gt=0, description="Clip the norm of the global gradient to this.")
    precision: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="bfloat16: autocast; weights, optimizer, head and losses stay float32. On a "
        "CPU without instructions for it all is float32.",
    )
    seed: Seed = Field(
        42, description="Seed of the order of sentences, of dropout and of new weights."
    )
    seeds: list[Seed] = added(
        [],
        description="Train a student with each of these seeds, instead of `seed`. Figures are "
        "means over them; the first one's student is exported.",
    )
    dev: DevSettings | None = Field(
        DevSettings(),
        description="What the checkpoint is chosen on; null: the last step's weights are the "
        "result.",
    )
    engine: Literal["auto", "plain", "deepspeed"] = execution(
        "auto",
        description="plain: PyTorch on one device. deepspeed: DeepSpeed under Ray Train. auto: "
        "plain for one worker, else deepspeed.",
    )
    num_workers: int = execution(1, ge=1, description="Number of training processes.")
    zero_stage: int = execution(0, ge=0, le=3, description="Stage of DeepSpeed's ZeRO: 0 to 3.")
    cpus_per_worker: int | None = execution(
        None,
        ge=1,
        description="Cores of a worker; null: divide the cluster's cores among the workers.",
    )
    gpus_per_worker: int | None = execution(
        None,
        ge=0,
        description="GPUs of a worker; null: 1 if the cluster has one for each worker, else 0.",
    )
    checkpoint_every_seconds: float = execution(
        180.0,
        gt=0,
        description="Seconds between checkpoints, to the next logged metrics: what a kill can cost "
        "at most.",
    )
    checkpoint_every_steps: int | None = execution(
        None, ge=1, description="Steps between further checkpoints; null: none."
    )
    max_failures: int = execution(3, ge=0, description="How often a lost worker is replaced.")
    log_every_steps: int = execution(10, ge=1, description="Steps between logged metrics.")

    @model_validator(mode="after")
    def _consistent(self) -> "TrainSettings":
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds {self.seeds}: one of them is there twice")
        if self.seeds and self.seed != type(self).model_fields["seed"].default:
            raise ValueError("give seed or seeds, not both")
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
    def of_each_seed(self) -> list["TrainSettings"]:
        """The settings of each training; a training with one of several seeds is the same as one
        with that seed alone."""
        return [
            self.model_copy(update={"seed": seed, "seeds": []})
            for seed in self.seeds or [self.seed]
        ]

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


def check_widths(widths: list[int], dimension: int) -> None:
    """Compares widths that vectors may be cut to with their own.

    Raises:
        UserError: one that is not less.
    """
    if max(widths, default=0) >= dimension:
        raise UserError(
            f"student.dimensions: {max(widths)} is no less than the {dimension} of the student's "
            "vectors, which are trained in any case; leave it out"
        )


def check_frozen(settings: StudentSettings, num_layers: int | None) -> None:
    """Compares the layers that stay as they are with all of the student's, where that is known.

    Raises:
        UserError: none is left to train.
    """
    if num_layers is not None and settings.freeze_layers >= max(1, num_layers):
        raise UserError(
            f"student.freeze_layers is {settings.freeze_layers}, but the student has {num_layers} "
            "layers, so none would be trained; lower it"
        )


def batch_too_large(batch_size: int, num_rows: int) -> UserError:
    """The error of a batch that the corpus cannot fill."""
    return UserError(
        f"train.batch_size is {batch_size}, but there are only {num_rows} sentences; lower it or "
        "give more text"
    )
