"""The recipe: the whole truth of a run, from YAML, strictly checked.

    plugins:    packages that add parts              stages/plugins.py
    sentences:  where the text comes from             stages/sentences/settings.py
    perturb:    rewrites of the sentences             stages/rewrite/settings.py
    teachers:   encoders to learn from                below, stages/embed
    ranks:      the corpus of rank vectors            stages/ranks/settings.py
    student:    the encoder to train                  stages/train/student_settings.py
    train:      objectives, schedule, engine          stages/train/settings.py
    evaluate:   tests of student and teachers         stages/evaluate/settings.py
    export:     further variants of the student       stages/export/settings.py
    search:     what `sentray tune` searches          tune/settings.py

An encoder may be the student of another recipe (`model: recipe:simcse.yaml`, relative to this
file). What that student needs is then made in the same run, and made once.

What does not go together is refused by stages/combinations.py.
pipeline/recipe/ turns a file into a recipe. Strings may use ${VARIABLES}; saved files name them
and never show their values.
"""

from typing import Any

from pydantic import Field, PrivateAttr, ValidationInfo, field_validator, model_validator

from stages.combinations import check_combinations, without_effect
from stages.embed.endpoint import EmbeddingEndpoint
from stages.embed.given import VectorsSettings
from stages.encoder.settings import EncoderSettings
from stages.evaluate.settings import EvaluateSettings
from stages.export.settings import ExportSettings
from stages.fields import ModelName, Slug, StoragePath
from stages.plain import as_yaml
from stages.ranks.settings import RanksSettings
from stages.rewrite.settings import PerturbSettings
from stages.sentences.settings import SentencesSettings
from stages.settings import Extensible, added, execution
from stages.train.settings import DevSettings, TrainSettings
from stages.train.student_settings import StudentSettings
from stages.variables import Texts, with_texts


class TeacherSettings(EncoderSettings):
    model: ModelName = Field(
        "",
        description="As for any encoder; none for `vectors` and `endpoint`, and teachers of a "
        "plug-in may need none.",
    )
    vectors: VectorsSettings | None = added(
        None, description="Vectors of the sentences that are there already, instead of a model."
    )
    endpoint: EmbeddingEndpoint | None = added(
        None,
        description="An OpenAI-compatible embeddings endpoint that is asked for the vectors of the "
        "sentences, instead of a model.",
    )
    name: Slug = Field(description="Name in tables, node names and artifact names.")
    weight: float = Field(
        1.0,
        gt=0,
        description="alpha: weight of this teacher's similarities. Weights are scaled to sum to 1.",
    )
    similarity: str = Field(
        "cosine",
        description="What the teacher teaches. cosine: the cosines of its vectors. ranks: "
        "Spearman's rho of the ranks that it gives the corpus under `ranks`; it is then "
        "RankEncoder's base encoder. Plug-ins may add others.",
    )
    factor_width: int | None = added(
        None,
        ge=1,
        description="Reduce its vectors to this many principal dimensions before they are stored; "
        "a sentence then takes 2 bytes for each. How far cosines are off is measured, printed and "
        "kept. null: whole vectors.",
    )

    @field_validator("similarity")
    @classmethod
    def _is_known(cls, similarity: str, info: ValidationInfo) -> str:
        extensions = (info.context or {}).get("extensions")
        if extensions is not None and similarity not in extensions.similarities:
            known = ", ".join(extensions.similarities)
            raise ValueError(f"there is no similarity '{similarity}'; there are {known}")
        return similarity

    @property
    def is_encoder(self) -> bool:
        """Whether a model makes its vectors here, so that it can embed other sentences too."""
        return self.vectors is None and self.endpoint is None

    @model_validator(mode="after")
    def _has_a_model(self, info: ValidationInfo) -> "TeacherSettings":
        extensions = (info.context or {}).get("extensions")
        source = extensions.similarities.get(self.similarity) if extensions else None
        if self.is_encoder and not self.model and (source is None or source.encodes):
            raise ValueError(f"teacher '{self.name}': the setting `model` is missing")
        return self

    @model_validator(mode="after")
    def _is_reduced_as_cosines(self) -> "TeacherSettings":
        if self.factor_width is not None and self.similarity != "cosine":
            instead = "; ranks.dimensions does" if self.similarity == "ranks" else ""
            raise ValueError(
                f"teacher '{self.name}': factor_width reduces vectors whose cosines are taught, "
                f"and does nothing for similarity: {self.similarity}{instead}; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _has_nothing_else(self) -> "TeacherSettings":
        if self.is_encoder:
            return self
        if self.vectors is not None and self.endpoint is not None:
            raise ValueError(
                f"teacher '{self.name}': its vectors are given (`vectors`) or asked for "
                "(`endpoint`); leave one of them out"
            )
        how = "are given" if self.endpoint is None else "come from its endpoint"
        if self.model or self.similarity != "cosine":
            raise ValueError(
                f"teacher '{self.name}': its vectors {how}, so leave out `model` and `similarity`"
            )
        for key in self.given(*(key for key in EncoderSettings.model_fields if key != "model")):
            raise ValueError(
                f"teacher '{self.name}': its vectors {how}, so `{key}` has no effect; leave it out"
            )
        return self


class Recipe(Extensible):
    additions = "sections"

    name: Slug = Field(description="Name of the student, its folder and its report.")
    plugins: list[str] = execution(
        [], description="Python packages that add stages, objectives, evaluations and more."
    )
    storage: StoragePath = execution(
        "runs",
        description="Storage root: a folder, s3://..., or gs://...",
        validate_default=True,  # made absolute: Ray's workers may run in another folder
    )
    sentences: SentencesSettings
    perturb: list[PerturbSettings] = []
    teachers: list[TeacherSettings] = []
    ranks: RanksSettings | None = None
    student: StudentSettings
    train: TrainSettings
    evaluate: EvaluateSettings = EvaluateSettings()
    export: ExportSettings | None = added(
        None, description="Variants of the exported student, beside its folder."
    )
    _texts: Texts = PrivateAttr(default_factory=dict)

    @field_validator("teachers")
    @classmethod
    def _names_differ(cls, teachers: list[TeacherSettings]) -> list[TeacherSettings]:
        names = [teacher.name for teacher in teachers]
        for name in names:
            if names.count(name) > 1 or name in ("before", "after"):
                raise ValueError(f"the teacher name '{name}' is taken; choose another")
        return teachers

    @field_validator("perturb")
    @classmethod
    def _sources_differ(cls, sources: list[PerturbSettings]) -> list[PerturbSettings]:
        names = [source.name for source in sources]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"the name '{name}' of rewrites is taken; choose another")
        return sources

    @model_validator(mode="after")
    def _fits_together(self) -> "Recipe":
        check_combinations(self)
        return self

    @property
    def holdout(self) -> int | None:
        """As `sentences.holdout`, once teachers and `train.dev` are known; 0: there is no agreement
        to be measured."""
        asked, dev = self.sentences.holdout, self.train.dev
        if not self.train.objectives.needs_teacher:
            return 0
        return 0 if asked is None and (dev is None or dev.sets) else asked

    @property
    def dev(self) -> DevSettings | None:
        """As `train.dev`; None where there is nothing to choose the checkpoint on."""
        dev = self.train.dev
        return None if dev is None or not (dev.sets or self.holdout != 0) else dev

    def unexpanded(self, value: Any) -> Any:
        """Identity as it is saved: strings that came from ${VARIABLES} as they were written."""
        if isinstance(value, dict):
            return {key: self.unexpanded(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.unexpanded(item) for item in value]
        texts = {filled: text for filled, text in self._texts.values() if filled}
        return texts.get(value, value) if isinstance(value, str) else value

    def plain(self) -> dict[str, Any]:
        """All settings as plain data, defaults included, ${VARIABLES} as they were written."""
        return dict(with_texts(self.model_dump(), self._texts))

    def warnings(self) -> list[str]:
        """Settings that have no effect together, said whenever the recipe is planned or run."""
        return [*without_effect(self)]

    def summary(self) -> str:
        """What the model card tells of the recipe, as YAML (see `Settings.public`)."""
        return as_yaml(with_texts(self.public(), self._texts))
