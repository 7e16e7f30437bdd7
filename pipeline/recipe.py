"""The recipe: the whole truth of a run, from YAML, strictly checked.

    sentences:  where the text comes from           stages/sentences_settings.py
    teachers:   encoders to learn from              stages/encoder/settings.py
    ranks:      the corpus of rank vectors          stages/ranks/settings.py
    student:    the encoder to train                stages/train/settings.py
    train:      objectives, schedule, engine        stages/train/settings.py
    evaluate:   what the table at the end shows     stages/evaluate/settings.py

An encoder may be the student of another recipe (`model: recipe:simcse.yaml`, relative to this
file): what it needs is then made in the same run, and shared with whoever needs the same.

Strings may use ${VARIABLES}. `key.sub=value` overrides one setting; lists are addressed by number
(`teachers.0.weight=2`).
"""

import difflib
import os
import re
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from stages.encoder.settings import RECIPE_PREFIX, EncoderSettings
from stages.errors import UserError
from stages.evaluate.settings import EvaluateSettings
from stages.ranks.settings import RanksSettings
from stages.sentences_settings import SentencesSettings
from stages.settings import Settings, execution
from stages.train.settings import StudentSettings, TrainSettings

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
    teachers: list[TeacherSettings] = []
    ranks: RanksSettings | None = None
    student: StudentSettings
    train: TrainSettings
    evaluate: EvaluateSettings = EvaluateSettings()

    @field_validator("teachers")
    @classmethod
    def _names_differ(cls, teachers: list[TeacherSettings]) -> list[TeacherSettings]:
        names = [teacher.name for teacher in teachers]
        for name in names:
            if names.count(name) > 1 or name in ("before", "after"):
                raise ValueError(f"the teacher name '{name}' is taken; choose another")
        return teachers

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

    def warnings(self) -> list[str]:
        """Settings that have no effect together, said whenever the recipe is planned or run."""
        found = []
        student = self.student
        one_template = student.second_template in (None, student.template)
        views_alike = student.dropout == 0 and one_template
        if views_alike and self.train.objectives.consistency:
            found.append(
                "student.dropout is 0, so both views of a sentence are the same vector: "
                "train.objectives.consistency is exactly 0, and infonce only spreads vectors apart"
            )
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
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError):
        raise UserError(f"recipe {path}: there is no such file") from None
    except UnicodeDecodeError:
        raise UserError(f"recipe {path}: not a UTF-8 text file") from None
    try:
        root = yaml.compose(text, Loader=_Loader)
        raw = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise UserError(f"recipe {path}{line}: not valid YAML ({problem})") from None
    if not isinstance(raw, dict):
        raise UserError(f"recipe {path}: is empty, or not a mapping of settings")
    lines = _lines_of(root)
    for override in overrides or []:
        _override(raw, override)
        key = override.partition("=")[0]
        lines[tuple(key.split("."))] = f"--set {key}"
    try:
        return Recipe.model_validate(_absolute(_expand(raw, ()), file.absolute().parent))
    except ValidationError as error:
        messages = [_message(one, lines) for one in error.errors()]
        raise UserError(f"recipe {path}: " + "\n".join(messages)) from None


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML, defaults included."""
    return str(yaml.safe_dump(recipe.model_dump(), sort_keys=False, allow_unicode=True, width=100))


class _Loader(yaml.SafeLoader):
    """YAML 1.2 numbers (3e-5 is a number, not a string), and no key twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(
                    None, None, "a setting's name must be text", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key '{key}' is there twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def _lines_of(node: Any, where: tuple[str, ...] = ()) -> dict[tuple[str, ...], str]:
    """`line 12` of every setting, by its path."""
    found = {where: f"line {node.start_mark.line + 1}"} if where else {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = (*where, str(key.value))
            found |= _lines_of(value, path) | {path: f"line {key.start_mark.line + 1}"}
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            found |= _lines_of(value, (*where, str(number)))
    return found


def _override(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"--set {override}: write it as key.sub=value")
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        raise UserError(f"--set {override}: the value is not valid YAML") from None
    *parents, last = key.split(".")
    place: Any = raw
    for part in parents:
        if isinstance(place, list):
            place = place[_list_place(place, part, override)]
        else:
            if place.get(part) is None:
                place[part] = {}
            place = place[part]
        if not isinstance(place, dict | list):
            raise UserError(f"--set {override}: '{part}' has no settings below it")
    if isinstance(place, list):
        place[_list_place(place, last, override)] = value
    else:
        place[last] = value


def _list_place(items: list[Any], part: str, override: str) -> int:
    if not part.isdigit() or int(part) >= len(items):
        raise UserError(
            f"--set {override}: '{part}' is not one of the list's numbers 0 to {len(items) - 1}"
        )
    return int(part)


def _expand(value: Any, where: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return {key: _expand(item, (*where, str(key))) for key, item in value.items()}
    if isinstance(value, list):
        return [_expand(item, (*where, str(number))) for number, item in enumerate(value)]
    if isinstance(value, str):
        for name in re.findall(r"\$\{(\w+)\}", value):
            if name not in os.environ:
                raise UserError(
                    f"{setting_path(where)}: the environment variable {name} is not set; "
                    f"set it, or write the path itself instead of ${{{name}}}"
                )
            value = value.replace(f"${{{name}}}", os.environ[name])
    return value


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


def setting_path(where: tuple[str, ...]) -> str:
    """("teachers", "0", "weight") as teachers[0].weight."""
    path = ""
    for part in where:
        path += f"[{part}]" if part.isdigit() else f".{part}"
    return path.removeprefix(".") or "recipe"


def _message(error: Any, lines: dict[tuple[str, ...], str]) -> str:
    where = tuple(str(part) for part in error["loc"])
    nearest = next((where[:n] for n in range(len(where), 0, -1) if where[:n] in lines), None)
    place = f"{lines[nearest]}: " if nearest else ""
    path = setting_path(where)
    if error["type"] == "extra_forbidden":
        known = list(_fields_at(where[:-1]))
        close = difflib.get_close_matches(where[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean '{close[0]}'?" if close else f"known here: {', '.join(known)}"
        return f"{place}{path}: unknown setting; {hint}"
    if error["type"] == "missing":
        return f"{place}{path}: this setting is missing"
    if error["type"] == "value_error":
        return f"{place}{path}: {error['ctx']['error']}"
    return f"{place}{path}: {error['msg']}, not {error['input']!r}"


def _fields_at(where: tuple[str, ...]) -> dict[str, Any]:
    """Fields of the settings class at a path of the recipe."""
    model: type[BaseModel] = Recipe
    for part in where:
        if part.isdigit():
            continue
        found = _settings_class(model.model_fields[part].annotation)
        assert found is not None, f"{part} has no settings class"
        model = found
    return model.model_fields


def _settings_class(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        found = _settings_class(inner)
        if found is not None:
            return found
    return None
