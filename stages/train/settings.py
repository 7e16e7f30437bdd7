"""Settings of a training. Imports no torch.

Defaults are RankCSE's BERT-base ListNet row (Table 9) where the paper gives a number.
"""

from typing import Literal

from pydantic import Field, model_validator

from stages.errors import UserError
from stages.evaluate.geometry import check_positives
from stages.evaluate.sets import StsSettings, check_names_differ, load_sts
from stages.evaluate.tables import Labelled, columns_of
from stages.evaluate.transfer import TransferTest
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
        replacing = [name for name, one in chosen.items() if one.replaces_contrastive]
        if len(replacing) > 1:
            raise ValueError(
                f"{' and '.join(replacing)}: only one can take the maximum with the others; let "
                "the rest be added (combine: sum)"
            )
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


class DevTransfer(TransferTest):
    """A transfer task by whose rows for choosing penalties checkpoints are chosen too."""

    needs_tested = False

    protocol: Literal["full", "fast"] = Field(
        "fast",
        description="fast: five folds, RMSprop, as SimCSE does while it trains; full: ten, Adam, "
        "as papers' tables are made.",
    )

    @model_validator(mode="after")
    def _no_split(self) -> "DevTransfer":
        if self.split is not None:
            raise ValueError(
                f"transfer task '{self.name}': split says what is tested; the splits train and dev "
                "choose checkpoints, or all rows where there is no split. Leave it out"
            )
        return self

    def load(self) -> dict[str, Labelled]:
        found = super().load()
        if "train" not in found and "split" in columns_of(self.rows(["label"])):
            raise UserError(f"{self.where}: there is no split train to choose checkpoints by")
        return found


class DevSettings(Settings):
    sts: list[StsSettings] = Field(
        [],
        description="STS sets. The checkpoint with the best mean over them and `transfer` is the "
        "result. None of either: the one that agrees best with its teachers on held-out sentences "
        "(`sentences.holdout`), on the 1% of their pairs that are nearest.",
    )
    transfer: list[DevTransfer] = added(
        [],
        description="Transfer tasks: SentEval's accuracy on the rows by which penalties are "
        "chosen, not on the split test. Each evaluation trains their classifiers anew.",
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
        check_names_differ([*self.sts, *self.transfer])
        if self.positives_above is not None and not self.sts:
            raise ValueError("positives_above is about pairs with gold scores; name sets in `sts`")
        return self

    @property
    def sets(self) -> list[StsSettings | DevTransfer]:
        """All that has labels."""
        return [*self.sts, *self.transfer]

    @property
    def measures(self) -> list[str]:
        """Names of what it measures."""
        return [one.name for one in self.sets] or ["near pairs"]

    def check(self) -> None:
        """Reads the sets that are files.

        Raises:
            UserError: what is wrong with one, or none of its pairs is above `positives_above`.
        """
        for task in self.transfer:
            task.check()
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


def batch_too_large(batch_size: int, num_rows: int) -> UserError:
    """The error of a batch that the corpus cannot fill."""
    return UserError(
        f"train.batch_size is {batch_size}, but there are only {num_rows} sentences; lower it or "
        "give more text"
    )
