"""A YAML file of settings: read, overridden, checked against its class, with errors for people.

Strings may use ${VARIABLES}. What they stand for is neither saved nor printed: files and messages
name the variable. An error names the file, the line where there is one, the setting and
what to change; an unknown setting is met with the nearest one that exists.
"""

import copy
import difflib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from pipeline.recipe.loader import LONGEST, read_yaml
from stages.errors import UserError
from stages.fields import RECIPE_PREFIX
from stages.plain import shortened
from stages.settings import Extensible
from stages.variables import FILLED_IN, VARIABLE, Texts, hide_values, value_at

M = TypeVar("M", bound=BaseModel)

MOST_ERRORS = 10


class Document:
    """The settings of one file as plain data, and the line of each.

    Args:
        what: the kind of file, for messages.

    Raises:
        UserError: no such file, not UTF-8, not YAML, or not a mapping.
    """

    def __init__(self, path: str, overrides: list[str] | None = None, what: str = "recipe") -> None:
        self.title = f"{what} {path}"
        self.folder = Path(path).absolute().parent
        try:
            with open(path, encoding="utf-8") as file:
                text = file.read(LONGEST + 1)
        except (FileNotFoundError, IsADirectoryError):
            raise UserError(f"{self.title}: there is no such file") from None
        except UnicodeDecodeError:
            raise UserError(f"{self.title}: not a UTF-8 text file") from None
        except (OSError, ValueError) as error:  # ValueError: a null character in its name
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"{self.title}: cannot be read ({reason})") from None
        if len(text) > LONGEST:
            raise UserError(f"{self.title}: has more than {LONGEST:,} characters")
        self.raw, self._lines = read_yaml(text, self.title)
        if not isinstance(self.raw, dict):
            raise UserError(f"{self.title}: is empty, or not a mapping of settings")
        for override in overrides or []:
            key, equals, text = override.partition("=")
            if not equals or not key:
                raise UserError(f"--set {override}: write it as key.sub=value")
            value, _ = read_yaml(text, f"--set {key}")
            assign(self.raw, key, value, f"--set {override}")
            self._lines[tuple(key.split("."))] = f"--set {key}"

    @classmethod
    def of(cls, title: str, raw: dict[str, Any]) -> "Document":
        """Settings that are in no file."""
        document = cls.__new__(cls)
        document.title, document.folder, document.raw = title, Path.cwd(), raw
        document._lines = {}
        return document

    def changed(self, values: dict[str, Any], who: str) -> "Document":
        """A copy with other values, by setting path; sections must be there."""
        other = copy.copy(self)
        other.raw = copy.deepcopy(self.raw)
        for key, value in values.items():
            assign(other.raw, key, copy.deepcopy(value), f"{who}{key}", create=False)
        return other

    def split(self, key: str) -> "Document":
        """The section `key` (a mapping, or nothing) as a document of its own, taken out of this."""
        other = copy.copy(self)
        other.raw = self.raw.pop(key, None)
        other._lines = {where[1:]: line for where, line in self._lines.items() if where[0] == key}
        return other

    def line_of(self, where: tuple[str, ...]) -> str:
        """`line 12: ` of a setting, or nothing where it has none."""
        return f"{self._lines[where]}: " if where in self._lines else ""

    def read(
        self, model: type[M], context: Mapping[str, Any] | None = None, section: str = ""
    ) -> M:
        """The settings, checked.

        Args:
            context: what validators look things up in (stages.settings.Extensible, stages.fields).
            section: where these settings are in the file, for messages.
        """
        context = context or {}
        try:
            raw = _expand(self.raw, (), model)
            return model.model_validate(raw, context=dict(context))
        except RecursionError:
            raise UserError(f"{self.title}: lists and mappings are nested too deep") from None
        except ValidationError as error:
            known = _KnownSettings(model, context.get("extensions"))
            errors = error.errors()
            messages = [self._message(one, known, section) for one in errors[:MOST_ERRORS]]
            if len(errors) > MOST_ERRORS:
                messages.append(f"and {len(errors) - MOST_ERRORS:,} more like these")
            raise UserError(f"{self.title}: " + "\n".join(messages)) from None

    def texts(self, settings: BaseModel) -> Texts:
        """Where this document has ${VARIABLES}, for settings that were read from it."""
        whole, found = settings.model_dump(), {}
        for path, text in _variables(self.raw):
            value = value_at(whole, path)
            if isinstance(value, dict):  # written as one of its settings alone
                alone = _expand(text, path, type(settings))
                path += tuple(key for key, inner in value.items() if inner == alone)[:1]
                value = alone
            found[path] = (value, self._from_anywhere(value, text))
        return found

    def _from_anywhere(self, value: Any, text: str) -> str:
        """The text, as it may be written into a file in another folder: what `recipe:` names is
        relative to the folder of the file."""
        file = text.removeprefix(RECIPE_PREFIX)
        names_one = str(value).startswith(RECIPE_PREFIX) and file != text
        if not names_one or value == text:  # the same: who uses it fills it in
            return text
        filled = VARIABLE.sub(lambda name: FILLED_IN[name[1]], file)
        is_relative = not Path(filled).expanduser().is_absolute()
        return f"{RECIPE_PREFIX}{self.folder / file}" if is_relative else text

    def _message(self, error: Any, settings: "_KnownSettings", section: str) -> str:
        where = tuple(str(part) for part in error["loc"])
        nearest = next(
            (where[:n] for n in range(len(where), 0, -1) if where[:n] in self._lines), None
        )
        place = f"{self._lines[nearest]}: " if nearest else ""
        path = setting_path((section, *where) if section else where)
        if error["type"] == "extra_forbidden":
            known = settings.names_at(where[:-1])
            close = difflib.get_close_matches(where[-1], known, n=1, cutoff=0.5)
            hint = f"did you mean '{close[0]}'?" if close else f"known here: {', '.join(known)}"
            return f"{place}{path}: unknown setting; {hint}"
        if error["type"] == "missing":
            return f"{place}{path}: this setting is missing"
        if error["type"] == "value_error":
            text = hide_values(str(error["ctx"]["error"]))
            return f"{place}{path}: {shortened(text, 1000)}"
        written = value_at(self.raw, where)
        given = written if isinstance(written, str) else error["input"]
        return f"{place}{path}: {error['msg']}, not {shortened(hide_values(repr(given)))}"


def assign(raw: Any, key: str, value: Any, who: str, create: bool = True) -> None:
    """Sets `key.sub` (lists by number) in plain data.

    Args:
        who: how errors begin.
        create: whether sections that are not there are made.
    """
    *parents, last = key.split(".")
    place: Any = raw
    for part in parents:
        if isinstance(place, list):
            place = place[_list_place(place, part, who)]
        else:
            if place.get(part) is None:
                if not create:
                    raise UserError(f"{who}: the recipe has no '{part}' there; add it first")
                place[part] = {}
            place = place[part]
        if not isinstance(place, dict | list):
            raise UserError(f"{who}: '{part}' has no settings below it")
    if isinstance(place, list):
        place[_list_place(place, last, who)] = value
    else:
        place[last] = value


def _list_place(items: list[Any], part: str, who: str) -> int:
    if not part.isdecimal() or int(part) >= len(items):
        raise UserError(f"{who}: '{part}' is not one of the list's numbers 0 to {len(items) - 1}")
    return int(part)


def _variables(value: Any, where: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Strings with ${VARIABLES}, with their setting paths."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _variables(item, (*where, str(key)))
    elif isinstance(value, str) and VARIABLE.search(value):
        yield where, value


def _expand(value: Any, where: tuple[str, ...], model: type[BaseModel]) -> Any:
    if isinstance(value, dict):
        return {key: _expand(item, (*where, str(key)), model) for key, item in value.items()}
    if isinstance(value, list):
        return [_expand(item, (*where, str(number)), model) for number, item in enumerate(value)]
    if isinstance(value, str) and not _is_late(model, where):
        for name in VARIABLE.findall(value):
            if name not in os.environ:
                raise UserError(
                    f"{setting_path(where)}: the environment variable {name} is not set; "
                    f"set it, or write the path itself instead of ${{{name}}}"
                )
            FILLED_IN[name] = os.environ[name]
            value = value.replace(f"${{{name}}}", os.environ[name])
    return value


def _is_late(model: type[BaseModel], where: tuple[str, ...]) -> bool:
    """Whether ${VARIABLES} there are filled in by who uses them (stages.settings.late)."""
    for part in where:
        field = model.model_fields.get(part)
        if field is None:  # the place in a list, the key of a mapping
            continue
        extra = field.json_schema_extra
        if isinstance(extra, dict) and extra.get("late"):
            return True
        found = _settings_class(field.annotation)
        if found is None:
            return False
        model = found
    return False


def setting_path(where: tuple[str, ...]) -> str:
    """("teachers", "0", "weight") as teachers[0].weight."""
    path = ""
    for part in where:
        path += f"[{part}]" if part.isdigit() else f".{part}"
    return path.removeprefix(".") or "recipe"


class _KnownSettings:
    """Which settings there are at a path: fields of classes, and what plug-ins add."""

    def __init__(self, model: type[BaseModel], extensions: Any) -> None:
        self._model, self._extensions = model, extensions

    def names_at(self, where: tuple[str, ...]) -> list[str]:
        model = self._model
        for part in where:
            more = self._added(model)
            if part in model.model_fields:
                found = _settings_class(model.model_fields[part].annotation)
                assert found is not None, f"{part} has no settings class"
                model = found
            elif part in more:  # else the place in a list, the key of a mapping
                model = more[part]
        return [*model.model_fields, *self._added(model)]

    def _added(self, model: type[BaseModel]) -> Mapping[str, type[BaseModel]]:
        if not issubclass(model, Extensible):
            return {}
        return getattr(self._extensions, model.additions, {})


def _settings_class(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        found = _settings_class(inner)
        if found is not None:
            return found
    return None
