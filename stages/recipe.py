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

pipeline/recipe/ turns a file into a recipe. Strings may use ${VARIABLES}; saved files name them
and never show their values.
"""

from typing import Any

import yaml
from pydantic import Field, PrivateAttr, ValidationInfo, field_validator, model_validator

from stages.embed.endpoint import EmbeddingEndpoint
from stages.embed.given import VectorsSettings
from stages.encoder.settings import EncoderSettings
from stages.evaluate.settings import EvaluateSettings
from stages.export.settings import ExportSettings
from stages.fields import ModelName, Slug, StoragePath
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
        objectives = self.train.objectives
        if objectives.needs_teacher and not self.teachers:
            wanting = [name for name, one in objectives.chosen.items() if one.needs_teacher]
            raise ValueError(
                f"objectives that need a teacher ({', '.join(wanting)}): add one under `teachers`"
            )
        ranked = [t.name for t in self.teachers if t.similarity == "ranks"]
        if objectives.vector_regression and ranked:
            raise ValueError(
                f"vector_regression needs its teachers' vectors, and '{ranked[0]}' teaches ranks: "
                "use similarity_regression"
            )
        deep = [name for name, one in objectives.chosen.items() if one.needs_layers]
        if self.student.is_static and deep:
            raise ValueError(
                f"{deep[0]} reads states of the student's layers, and student.layers: 0 has none"
            )
        if self.student.vocabulary and objectives.replaced_token:
            raise ValueError(
                "replaced_token: its generator has the whole vocabulary of the student's model; "
                "leave student.vocabulary out"
            )
        if self.student.is_static and self.export:
            raise ValueError(
                "export.variants are of a transformer, and student.layers: 0 has none; leave "
                "`export` out"
            )
        if self.student.aligned:
            self._check_aligned()
        if self.ranks is None and ranked:
            raise ValueError(
                "a teacher with similarity: ranks needs a corpus: add `ranks: {corpus_size: 10000}`"
            )
        if objectives.needs_negatives and not (
            self.perturb and all(source.gives_negatives for source in self.perturb)
        ):
            raise ValueError(
                "infonce.hard_negatives needs rewrites that come with negatives: `rewriting` with "
                "a negative_field, or `pairs` with a negative_column, in all of `perturb`"
            )
        taken = {view.name for view in objectives.views}
        for source in self.perturb:
            if source.name in taken:
                raise ValueError(
                    f"rewrites are called '{source.name}' like a view of an objective; rename them"
                )
        limit = self.sentences.limit
        if self.ranks is not None and limit is not None and self.ranks.corpus_size > limit:
            raise ValueError(
                f"ranks.corpus_size {self.ranks.corpus_size} is more than sentences.limit {limit}; "
                "lower it or raise the limit"
            )
        baselines = [one.name for one in self.evaluate.baselines]
        names = [*baselines, *(teacher.name for teacher in self.teachers)]
        for name in baselines:
            if names.count(name) > 1 or name in ("before", "after"):
                raise ValueError(f"the name '{name}' of a baseline is taken; choose another")
        retrieval, columns = self.evaluate.retrieval, self.sentences.columns
        if retrieval and not self.sentences.holdout_pairs:
            raise ValueError(
                "evaluate.retrieval needs held-out pairs: set sentences.holdout_pairs, with "
                "sentences.source: python-docs, sentences.columns or sentences.split_sentences"
            )
        kind = "python-docs"
        if self.sentences.holds_out_pairs:
            kind = "columns" if columns else "first-sentence"
        if retrieval and retrieval.kind != kind:
            pairs = {"python-docs": "documented functions", "columns": "pairs of a table",
                     "first-sentence": "texts with their first sentences"}[kind]  # fmt: skip
            raise ValueError(
                f"evaluate.retrieval.kind is {retrieval.kind}, but what `sentences` holds out is "
                f"{pairs}: set kind: {kind}"
            )
        self._check_kinds()
        if self.dev is None and self.train.dev not in (None, DevSettings()):
            instead = "" if objectives.needs_teacher else ", and no objective reads a teacher"
            raise ValueError(
                "train.dev has nothing to choose the checkpoint on: name sets with labels under "
                f"train.dev.sts or transfer, or hold sentences out (sentences.holdout is "
                f"{self.sentences.holdout or 'null'}{instead})"
            )
        gate = self.export.gate if self.export else None
        tested = any(not test.reads_model for test in self.evaluate.tests) or self.holdout != 0
        if gate and gate.points is not None and not tested:
            raise ValueError(
                "export.gate.points needs tests on which points can be lost: add some under "
                "`evaluate`, or leave it out"
            )
        return self

    def _check_kinds(self) -> None:
        """What sentences of one kind have no use for, and what does not work with two."""
        if self.sentences.columns is None:
            places: list[tuple[str, Any]] = [("student", self.student)]
            for number, teacher in enumerate(self.teachers):
                where = f"teachers[{number}]"
                places += [(where, teacher), (f"{where}.endpoint", teacher.endpoint)]
            for where, settings in places:
                for name in ("prompts", "prompt_names"):
                    if getattr(settings, name, None):
                        raise ValueError(
                            f"{where}.{name} is for sentences of two kinds, and these are of one: "
                            "set sentences.columns, or leave it out and set prompt"
                        )
            return
        by_text = [f"teacher '{t.name}'" for t in self.teachers
                   if t.vectors is not None and t.vectors.sentence_column]  # fmt: skip
        by_text += [f"perturb '{source.name}'" for source in self.perturb
                    if source.pairs is not None and source.pairs.sentence_column]  # fmt: skip
        if by_text:
            raise ValueError(
                f"{by_text[0]} is joined to the sentences by their text, and with "
                "sentences.columns a text may be there as a query and as a document: set id_column "
                "instead of sentence_column"
            )

    def _check_aligned(self) -> None:
        regression = self.train.objectives.vector_regression
        if regression is None:
            raise ValueError("student.aligned needs train.objectives.vector_regression")
        if len(self.teachers) > 1:
            raise ValueError(
                f"student.aligned: a student lives in one teacher's space, and there are "
                f"{len(self.teachers)} teachers; keep one"
            )
        if self.teachers[0].factor_width is not None:
            raise ValueError(
                "student.aligned: the student lives in its teacher's space, and "
                f"teachers[0].factor_width keeps {self.teachers[0].factor_width} dimensions of "
                "it; leave one of them out"
            )
        if regression.projection == "learned":
            raise ValueError(
                "vector_regression.projection: learned is dropped after training, and "
                "student.aligned keeps its map; leave one of them out"
            )

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

    def summary(self) -> str:
        """What the model card tells of the recipe, as YAML (see `Settings.public`)."""
        return as_yaml(with_texts(self.public(), self._texts))

    def warnings(self) -> list[str]:
        """Settings that have no effect together, said whenever the recipe is planned or run."""
        found = []
        student = self.student
        rewritten = self.perturb and self.train.rewritten_view != "none"
        objectives = self.train.objectives
        if not (student.views_differ or rewritten):
            why = (
                "student.layers: 0 has no dropout" if student.is_static else "student.dropout is 0"
            )
            then = ["train.objectives.consistency is exactly 0"] * bool(objectives.consistency)
            then += ["infonce only spreads vectors apart"] * bool(objectives.infonce)
            if then:
                alike = "so both views of a sentence are the same vector"
                found.append(f"{why}, {alike}: {', and '.join(then)}")
        if objectives.vector_regression and student.head != "none":
            found.append(
                f"student.head: {student.head} is between the student and its teachers' vectors "
                "(train.objectives.vector_regression), and is dropped after training; use none"
            )
        if rewritten and self.train.rewritten_view == "second" and not objectives.needs_second:
            found.append(
                "perturb has no effect but to choose sentences: the objectives read one view; set "
                "train.rewritten_view: first, or name another objective"
            )
        if student.second_template and not (objectives.needs_second or objectives.needs_negatives):
            found.append(
                "student.second_template has no effect: the objectives read one view; leave it out"
            )
        if self.sentences.holdout and not objectives.needs_teacher:
            found.append(
                "sentences.holdout has no effect: agreement is measured with teachers that an "
                "objective reads, and there is none"
            )
        if self.train.rewritten_view == "first" and not self.perturb:
            found.append("train.rewritten_view has no effect: there are no rewrites (`perturb`)")
        if not objectives.needs_teacher and any(t.factor_width for t in self.teachers):
            found.append("factor_width has no effect: no objective reads a teacher's vectors")
        ranks = self.ranks
        if (
            ranks
            and ranks.inference_weight is None
            and not any(teacher.similarity == "ranks" for teacher in self.teachers)
        ):
            found.append(
                "ranks has no effect: no teacher has similarity: ranks, and ranks.inference_weight "
                "is null"
            )
        return found


def as_yaml(raw: Any) -> str:
    """Plain data as YAML, in its own order."""
    return str(yaml.safe_dump(raw, sort_keys=False, allow_unicode=True, width=100))
