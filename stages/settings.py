"""The base of every settings class: strict, frozen, and split into identity and execution.

A field is *identity* (it changes the result, so it is part of the fingerprint) unless it is
declared with `execution(...)`: devices, worker counts, paths and inference batch sizes. A field
that joins a class after its first release is declared with `added(...)`: at its default it is left
out of the identity, so artifacts made before it existed are still found. A default never changes
without a new version of the stage.

Settings classes import neither torch nor Ray, so that reading a recipe stays fast.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Protocol, Self, get_args, runtime_checkable

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails, PydanticCustomError

from stages.plain import check_plain, check_scalar
from stages.plugins import plugin_of


def execution(default: Any = ..., *, description: str, **constraints: Any) -> Any:
    """Declares a field that changes how or where the work is done, but not its result."""
    return Field(
        default, description=description, json_schema_extra={"execution": True}, **constraints
    )


def added(default: Any, *, description: str, **constraints: Any) -> Any:
    """Declares a field that came after its class: at `default` it changes no fingerprint."""
    return Field(default, description=description, json_schema_extra={"added": True}, **constraints)


def late(default: Any = ..., *, description: str, **constraints: Any) -> Any:
    """Declares a field whose ${VARIABLES} are filled in when the work is done, not when it is read.

    What they stand for is secret: the settings, and so everything that is saved or fingerprinted,
    hold the names only. No model card shows the field.
    """
    return Field(default, description=description, json_schema_extra={"late": True}, **constraints)


@runtime_checkable
class Content(Protocol):
    """Marks a field type whose identity is what the value names, not its spelling."""

    def describe(self, value: str, where: str) -> Any:
        """Plain data that stands for the content; `where` names the setting in errors."""


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @field_validator("*", mode="before")
    @classmethod
    def _scalar(cls, value: Any) -> Any:
        """Before types are looked at, and files on disk."""
        check_scalar(value)
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _plain_inside(cls, value: Any) -> Any:
        """What lists and mappings hold; nested settings have looked at their own."""
        items = value.values() if isinstance(value, dict) else value
        if isinstance(value, dict | list) and not any(isinstance(x, BaseModel) for x in items):
            check_plain(value)
        return value

    def identity(self, where: str = "") -> dict[str, Any]:
        """The settings that change the result, as plain values; files and models by content.

        Args:
            where: path of these settings in the recipe, for messages.
        """
        found: dict[str, Any] = {}
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
            value = getattr(self, name)
            if extra.get("execution"):
                continue
            if extra.get("added") and value == field.get_default(call_default_factory=True):
                continue
            place = f"{where}.{name}".lstrip(".")
            mark = _mark_of(field)
            if mark is not None and value is not None:
                found[name] = mark.describe(value, place)
            else:
                found[name] = _plain(value, place)
        return found

    def named(self, where: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
        """Files, folders, models and data sets that the settings name (stages/fields.py), by
        setting path below `where`."""
        for name, value in self:
            field = type(self).model_fields.get(name)
            if isinstance(value, str) and field is not None and _mark_of(field) is not None:
                yield (*where, name), value
            else:
                yield from _named(value, (*where, name))

    def public(self) -> dict[str, Any]:
        """What a reader of a model card may see of them: methods and their numbers.

        Nothing of this machine or its accounts: no execution settings, no request fields, and of
        files, folders and models the bare name only.
        """
        found: dict[str, Any] = {}
        fields = type(self).model_fields
        for name, value in self:
            field = fields.get(name)
            extra = field.json_schema_extra if field else None
            if isinstance(extra, dict) and (extra.get("execution") or extra.get("late")):
                continue
            mark = _mark_of(field) if field else None
            shown = bare_name(value) if mark and isinstance(value, str) else _public(value)
            if shown not in (None, [], {}):
                found[name] = shown
        return found


def bare_name(value: str) -> str:
    """`texts.gz` of `/data/texts.gz`; ids of a hub and `package:NAME` stay."""
    prefix, _, rest = value.rpartition(":") if value.startswith("recipe:") else ("", "", value)
    if prefix or rest[:1] in ("/", "~", ".", "$") or "://" in rest:
        rest = rest.partition("?")[0].rstrip("/").rpartition("/")[2]
    return f"{prefix}:{rest}" if prefix else rest


class Extensible(Settings):
    """Settings that a plug-in may add sections to.

    What may be added is looked up in the validation context, `{"extensions": Extensions}`: its
    attribute `additions`. The identity of a section names the plug-in that it comes from.
    """

    model_config = ConfigDict(extra="allow")
    additions: ClassVar[str]

    @model_validator(mode="wrap")
    @classmethod
    def _read_additions(cls, value: Any, handler: Any, info: ValidationInfo) -> Self:
        if not isinstance(value, dict):
            return handler(value)
        known: Mapping[str, type[Settings]] = getattr(
            (info.context or {}).get("extensions"), cls.additions, {}
        )
        found, errors = dict(value), []
        for name in [name for name in value if name not in cls.model_fields]:
            given = found.pop(name)
            if name not in known:
                errors.append(InitErrorDetails(type="extra_forbidden", loc=(name,), input=given))
            elif given is not None:
                try:
                    found[name] = known[name].model_validate(given, context=info.context)
                except ValidationError as error:
                    errors += _details(error, (name,))
        try:
            read = handler(found)
        except ValidationError as error:
            if not errors:
                raise
            errors += _details(error, ())
        if errors:
            raise ValidationError.from_exception_data(cls.__name__, errors)
        return read

    @property
    def added_sections(self) -> dict[str, Settings]:
        """What plug-ins added, by name."""
        return dict(self.model_extra or {})

    def identity(self, where: str = "") -> dict[str, Any]:
        found = super().identity(where)
        for name, section in self.added_sections.items():
            found[name] = section.identity(f"{where}.{name}".lstrip(".")) | plugin_of(type(section))
        return found


def _mark_of(field: FieldInfo) -> Content | None:
    return _content_mark(Annotated[field.annotation, *field.metadata, None])


def _content_mark(annotation: Any) -> Content | None:
    """The mark of a field type, also where the type is one of several (`InputPath | None`)."""
    for mark in getattr(annotation, "__metadata__", ()):
        if isinstance(mark, Content):
            return mark
    for inner in get_args(annotation):
        found = _content_mark(inner)
        if found is not None:
            return found
    return None


def _details(error: ValidationError, within: tuple[str, ...]) -> list[InitErrorDetails]:
    return [
        InitErrorDetails(
            type=PydanticCustomError(
                one["type"], one["msg"].replace("{", "{{").replace("}", "}}"), one.get("ctx") or {}
            ),
            loc=(*within, *one["loc"]),
            input=one["input"],
        )
        for one in error.errors()
    ]


def _named(value: Any, where: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(value, Settings):
        yield from value.named(where)
    elif isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _named(item, (*where, str(key)))


def _public(value: Any) -> Any:
    if isinstance(value, Settings):
        return value.public()
    if isinstance(value, dict):
        return {key: _public(item) for key, item in value.items()}
    return [_public(item) for item in value] if isinstance(value, list) else value


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, Settings):
        return value.identity(where)
    if isinstance(value, dict):
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, f"{where}[{number}]") for number, item in enumerate(value)]
    return value
