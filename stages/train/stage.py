"""Training of a student: what it reads, what decides its weights, and where it runs."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stages.contract import Artifact, Fingerprinted, Resources, Stage, Work, Workers
from stages.encoder.config import is_on_hub, local_folder, num_layers
from stages.encoder.files import read_json
from stages.encoder.source import EncoderSource
from stages.errors import UserError
from stages.packages import need
from stages.planning import Graph
from stages.sentences.settings import num_held_out
from stages.train.settings import TrainSettings, batch_too_large
from stages.train.student_settings import StudentSettings, check_frozen, check_widths

if TYPE_CHECKING:
    from stages.embed.basis import VectorSource


@dataclass(frozen=True)
class Teacher:
    """A teacher whose vectors are taught, as far as their width is known before they are there."""

    name: str
    source: "VectorSource"
    factor_width: int | None

    def width(self) -> int | None:
        if self.factor_width is not None:
            return self.factor_width
        try:
            return self.source.width()
        except UserError:  # which its own stage says, unless all is there already
            return None


@dataclass(frozen=True)
class Train(Stage):
    """Tokens and factors to a student: `model/` (best weights) and `metrics/`.

    factors: inputs with teacher factors, and the share of each.
    rewrites, negatives: inputs with tokens of rewrites and of their hard negatives.
    views: inputs with tokens of further views, by the view's name.
    holdout: as `Recipe.holdout`: so many of the first sentences are not trained on.
    teachers: those whose vectors are taught.
    """

    student: EncoderSource[StudentSettings]
    settings: TrainSettings
    rows_per_shard: int
    factors: tuple[tuple[str, float], ...] = ()
    rewrites: tuple[str, ...] = ()
    negatives: tuple[str, ...] = ()
    views: tuple[tuple[str, str], ...] = ()
    holdout: int | None = 0
    teachers: tuple[Teacher, ...] = ()

    kind = "train"
    # 4: InfoNCE and consistency keep their precision when small; factors are renormalised when
    # read; head and pooling are float32 under autocast
    # 5: a second view that would equal the first is not computed; on a CPU attention is float32 and
    # rows of like length go together
    # 6: on a CPU batches have no padding, so sums are rounded and dropout drawn otherwise
    version = 6

    def identity(self, inputs: Mapping[str, Fingerprinted]) -> dict[str, Any]:
        found = self.student.identity(inputs, "student")
        for key, value in self.settings.identity("train").items():
            found[f"train.{key}"] = value
        for number, (_, weight) in enumerate(self.factors):
            found[f"teachers[{number}].weight"] = weight
        student, regression = self.student.settings, self.settings.objectives.vector_regression
        if regression and len(self.factors) > 1:
            # 2: a wide teacher's mean over coordinates is not the smaller for its width
            # 3: only the first teacher of the student's width is met without a map
            if regression.projection == "auto":
                found["train.objectives.vector_regression.mixed"] = 3
            elif regression.distance == "mse":
                found["train.objectives.vector_regression.mixed"] = 2
        changed = student.layers is not None or student.dropout is not None
        if changed and _is_longformer(student):
            found["student.longformer"] = 2  # 2: no dropout is left out; it can be loaded when cut
        return found if self.holdout == 0 else found | {"sentences.holdout": self.holdout}

    @property
    def packages(self) -> tuple[str, ...]:
        found = ("deepspeed",) if self.settings.resolved_engine == "deepspeed" else ()
        tasks = self.settings.dev.transfer if self.settings.dev else []
        return (*found, *(tasks[0].packages if tasks else ()))

    def resources(self) -> Resources:
        settings = self.settings
        grouped = settings.resolved_engine == "deepspeed"
        return Resources(
            workers=Workers(
                settings.num_workers, settings.cpus_per_worker, settings.gpus_per_worker, grouped
            )
        )

    def check(self) -> None:
        if self.settings.resolved_engine == "deepspeed":
            need("deepspeed", "train.engine: deepspeed (also chosen by train.num_workers over 1)")
        self.student.check()
        self._check_widths()
        self._check_frozen()
        for objective in self.settings.objectives.chosen.values():
            objective.check()
        if self.settings.dev is not None:
            self.settings.dev.check()

    def _check_widths(self) -> None:
        width = self.output_width()
        if width is not None:
            check_widths(self.student.settings.dimensions, width)
        self._check_aligned()
        regression = self.settings.objectives.vector_regression
        if regression is None or regression.projection != "none" or width is None:
            return
        for teacher in self.teachers:  # before a corpus is embedded; others training looks at
            if teacher.width() not in (None, width):
                raise UserError(
                    "train.objectives.vector_regression.projection: none, but the student's "
                    f"vectors have {width} dimensions and those of teacher '{teacher.name}' "
                    f"{teacher.width()}; set projection: auto"
                )

    def _check_aligned(self) -> None:
        """What builds on token embeddings has no use for vectors of a teacher's width."""
        width = self.student.width()
        aligned = self.student.settings.aligned and width is not None
        mapped = aligned and any(t.width() not in (None, width) for t in self.teachers)
        for name in ("denoising", "replaced_token"):
            if mapped and name in self.settings.objectives.chosen:
                raise UserError(
                    f"student.aligned: train.objectives.{name} needs vectors as wide as the token "
                    f"embeddings ({width}), and they are to be as wide as the teacher's; leave one "
                    "of the two out"
                )

    def _check_frozen(self) -> None:
        settings, config = self.student.settings, self.output_config()
        if settings.freeze_layers and config.get("num_hidden_groups"):
            raise UserError(
                f"student.freeze_layers: the layers of model '{settings.model}' share their "
                "weights, so none can be frozen alone; leave freeze_layers out"
            )
        if settings.freeze_layers:
            check_frozen(settings, num_layers(config) or None)

    def check_rows(self, num_rows: int) -> None:
        held_out, dev = num_held_out(self.holdout, num_rows), self.settings.dev
        if dev and not held_out and not dev.sets and dev.patience is not None:
            raise UserError(
                f"train.dev.patience: of {num_rows:,} sentences none are held out, so there is "
                "nothing to judge the student by; set sentences.holdout, or name sets with labels "
                "under train.dev"
            )
        num_rows -= held_out
        if self.settings.batch_size > num_rows:
            raise batch_too_large(self.settings.batch_size, num_rows)

    def unfinished(self, names: list[str]) -> str:
        steps = [name for name in names if name.startswith("step-")]
        return "unfinished, continues at its newest checkpoint" if steps else ""

    def output_config(self) -> dict[str, Any]:
        """What the trained model's config.json will say."""
        layers = self.student.settings.layers
        if self.student.settings.is_static:  # which has no positions either
            return {"num_hidden_layers": 0}
        count = len(layers) if isinstance(layers, list) else layers
        return self.student.config() | ({} if count is None else {"num_hidden_layers": count})

    def output_width(self) -> int | None:
        """Width of the trained student's vectors, of an aligned one its teacher's; None where only
        training knows it."""
        if not self.student.settings.aligned:
            return self.student.width()
        return self.teachers[0].width() if len(self.teachers) == 1 else None

    def report(self, artifact: Artifact) -> dict[str, str | list[dict[str, Any]]]:
        lines = artifact.file_path("metrics/metrics.jsonl").read_text().splitlines()
        return {"Training": [json.loads(line) for line in lines]}

    def make(self, work: Work, loaded: Any) -> None:
        from stages.train.run import train

        train(self, work)


def plan(graph: Graph) -> None:
    recipe = graph.recipe
    objectives, student = recipe.train.objectives, graph.student()
    names = [source.name for source in recipe.perturb]
    rewrites = [f"tokens:{name}" for name in names]
    negatives = [f"tokens:{name}+negatives" for name in names if objectives.needs_negatives]
    views = [(view.name, f"tokens:{view.name}") for view in objectives.views]
    # regression's first teacher gives the student its coordinates: the one that it is cut from
    order = recipe.teachers
    if objectives.vector_regression is not None:
        order = sorted(order, key=lambda teacher: teacher.model != student.settings.model)
    factors = [(graph.factors[t.name], t.weight) for t in order if graph.factors]
    settings = recipe.train.model_copy(update={"dev": recipe.dev})
    teachers = []
    for teacher in order:
        if graph.factors and teacher.similarity == "cosine":
            source: Any = graph.stage(graph.factors[teacher.name])
            teachers.append(Teacher(teacher.name, source, teacher.factor_width))
    owned = [f"tokens:{name}{suffix}" for name in names for suffix in
             ("", *["+negatives"] * objectives.needs_negatives)]  # fmt: skip
    inputs = ["tokens", *owned, *(name for _, name in views), *(name for name, _ in factors)]
    for number, one in enumerate(settings.of_each_seed):
        stage = Train(
            student,
            one,
            recipe.sentences.rows_per_shard,
            tuple(factors),
            tuple(rewrites),
            tuple(negatives),
            tuple(views),
            recipe.holdout,
            tuple(teachers),
        )
        name = f"train:seed-{one.seed}" if number else "train"
        graph.add(name, stage, [*inputs, *student.inputs], where="student")
        graph.trainings.append(name)


def _is_longformer(student: StudentSettings) -> bool:
    """By what its folder says, wherever that lies; a hub model is judged before it is read."""
    folder = local_folder(student)
    if folder is None:
        return is_on_hub(student) and "longformer" in student.model.lower()
    return read_json(folder / "config.json").get("model_type") == "longformer"
