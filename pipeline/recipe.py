"""The recipe: the whole truth of a run, from YAML, strictly checked.

    sentences:  where the text comes from           stages/sentences_settings.py
    perturb:    rewrites of the sentences           stages/perturb/settings.py
    teachers:   encoders to learn from              stages/encoder/settings.py
    ranks:      the corpus of rank vectors          stages/ranks/settings.py
    student:    the encoder to train                stages/train/settings.py
    train:      objectives, schedule, engine        stages/train/settings.py
    evaluate:   what the table at the end shows     stages/evaluate/settings.py
    search:     what `sentray tune` searches        tune/settings.py

An encoder may be the student of another recipe (`model: recipe:simcse.yaml`, relative to this
file): what it needs is then made in the same run, and shared with whoever needs the same.

Strings may use ${VARIABLES}; whatever is saved names them. `key.sub=value` overrides one setting;
lists are addressed by number (`teachers.0.weight=2`).
"""

import os
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, PrivateAttr, field_validator, model_validator

from pipeline.document import Document, Texts, with_texts
from stages.encoder.settings import RECIPE_PREFIX, EncoderSettings
from stages.evaluate.settings import EvaluateSettings
from stages.perturb.settings import PerturbSettings
from stages.ranks.settings import RanksSettings
from stages.sentences_settings import SentencesSettings
from stages.settings import Settings, execution
from stages.train.settings import StudentSettings, TrainSettings

# Settings that name a file, a folder or a model, and those that no model card shows.
PLACES = ("path", "dataset", "model")
PRIVATE = ("storage", "base_url", "key_variable", "extra", "engine_options")
NAME = r"^[a-z0-9][a-z0-9._-]*$"


class TeacherSettings(EncoderSettings):
    name: str = Field(description="Name in tables and artifact names.", pattern=NAME)
    weight: float = Field(
        1.0, gt=0, description="alpha: share of this teacher's similarities, scaled to sum to 1."
    )
    similarity: Literal["cosine", "ranks"] = Field(
        "cosine",
        description="What it teaches: cosines of its vectors, or Spearman's rho of the ranks it "
        "gives the corpus under `ranks` (it is then RankEncoder's base encoder).",
    )


class Recipe(Settings):
    name: str = Field(description="Names the student and its report.", pattern=NAME)
    storage: str = execution("runs", description="Storage root: a path, s3://..., gs://...")
    sentences: SentencesSettings
    perturb: list[PerturbSettings] = []
    teachers: list[TeacherSettings] = []
    ranks: RanksSettings | None = None
    student: StudentSettings
    train: TrainSettings
    evaluate: EvaluateSettings = EvaluateSettings()
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
            if names.count(name) > 1 or name == "negated":
                raise ValueError(f"the name '{name}' of rewrites is taken; choose another")
        return sources

    @model_validator(mode="after")
    def _fits_together(self) -> "Recipe":
        if self.train.objectives.needs_teacher and not self.teachers:
            raise ValueError(
                "listnet, listmle and rank_regression need a teacher: add one under `teachers`"
            )
        if self.ranks is None and any(t.similarity == "ranks" for t in self.teachers):
            raise ValueError(
                "a teacher with similarity: ranks needs a corpus: add `ranks: {corpus_size: 10000}`"
            )
        if self.train.objectives.needs_negatives and not (
            self.perturb and all(source.gives_negatives for source in self.perturb)
        ):
            raise ValueError(
                "infonce.hard_negatives needs rewrites that come with negatives: `rewriting` with "
                "a negative_field, or `pairs` with a negative_column, in all of `perturb`"
            )
        limit = self.sentences.limit
        if self.ranks is not None and limit is not None and self.ranks.corpus_size > limit:
            raise ValueError(
                f"ranks.corpus_size {self.ranks.corpus_size} is more than sentences.limit {limit}; "
                "lower it or raise the limit"
            )
        if self.evaluate.retrieval and not self.sentences.holdout_pairs:
            raise ValueError(
                "evaluate.retrieval needs held-out pairs: set sentences.source: python-docs and "
                "sentences.holdout_pairs"
            )
        return self

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
        found = []
        student = self.student
        one_template = student.second_template in (None, student.template)
        rewritten = self.perturb and self.train.rewritten_view != "none"
        views_alike = student.dropout == 0 and one_template and not rewritten
        if views_alike and self.train.objectives.consistency:
            found.append(
                "student.dropout is 0, so both views of a sentence are the same vector: "
                "train.objectives.consistency is exactly 0, and infonce only spreads vectors apart"
            )
        if self.train.rewritten_view == "first" and not self.perturb:
            found.append("train.rewritten_view has no effect: there are no rewrites (`perturb`)")
        if self.evaluate.speed and not self.teachers:
            found.append("evaluate.speed compares with teachers, and there are none")
        ranks = self.ranks
        if (
            ranks
            and ranks.inference_weight is None
            and not any(teacher.similarity == "ranks" for teacher in self.teachers)
        ):
            found.append("ranks is not used: no teacher has it, and inference_weight is null")
        return found


def load_recipe(path: str, overrides: list[str] | None = None) -> Recipe:
    """Reads, overrides and checks a recipe.

    Raises:
        UserError: with the file, the line where there is one, and what to change.
    """
    document = Document(str(path), overrides)
    document.split("search")  # tune/settings.py reads that
    return read_recipe(document)


def read_recipe(document: Document) -> Recipe:
    """The recipe that a document holds; relative paths are relative to the working folder."""
    recipe = document.read(Recipe, lambda raw: _absolute(raw, document.folder))
    recipe._texts = document.texts(recipe)
    return recipe


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML, defaults included, ${VARIABLES} as they were written."""
    return _yaml(recipe.plain())


def public_recipe(recipe: Recipe) -> str:
    """What a reader of the model card needs: methods and their settings, as YAML.

    Nothing of this machine or its accounts: no storage or other execution settings, no endpoint
    and what is sent to it beside the prompt, no folders (a file's or model's bare name only).
    """
    return _yaml(_public(with_texts(recipe.identity(), recipe._texts)))


def _public(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        kept = {k: _public(item, k) for k, item in value.items() if k not in PRIVATE}
        return {k: item for k, item in kept.items() if item not in (None, [], {})}
    if isinstance(value, list):
        return [_public(item, key) for item in value]
    if key in PLACES and isinstance(value, str):
        prefix = RECIPE_PREFIX if value.startswith(RECIPE_PREFIX) else ""
        place = value.removeprefix(prefix)
        if prefix or place[:1] in ("/", "~", ".", "$") or "://" in place:
            return prefix + place.partition("?")[0].rstrip("/").rpartition("/")[2]
    return value


def _yaml(raw: Any) -> str:
    return str(yaml.safe_dump(raw, sort_keys=False, allow_unicode=True, width=100))


def _absolute(value: Any, here: Path) -> Any:
    """Local paths made absolute: Ray's workers do not run in the folder of the command line.

    Other recipes are looked up from `here`, the folder of this one.
    """
    if isinstance(value, list):
        return [_absolute(item, here) for item in value]
    if not isinstance(value, dict):
        return value
    found = {}
    for key, item in value.items():
        if key == "model" and isinstance(item, str) and item.startswith(RECIPE_PREFIX):
            other = Path(item.removeprefix(RECIPE_PREFIX)).expanduser()
            found[key] = RECIPE_PREFIX + os.path.normpath(here / other)
        elif isinstance(item, str) and item and "://" not in item:
            place = Path(item).expanduser()
            local = key in ("path", "storage") or (
                key in ("model", "dataset") and (item[0] in ".~" or place.is_dir())
            )
            found[key] = str(place.absolute()) if local else item
        else:
            found[key] = _absolute(item, here)
    return found
