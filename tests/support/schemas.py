"""Schemas of Kubernetes resources: what they refuse, and what they would drop without a word."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema

# Fields of any resource; CRDs say only that there is an object.
METADATA = {"name", "namespace", "labels", "annotations"}


class Schema:
    """A resource of KubeRay."""

    def __init__(self, file: Path) -> None:
        self.plain = json.loads(gzip.decompress(file.read_bytes()))
        self._validator = jsonschema.Draft202012Validator(_as_json_schema(self.plain))

    def problems(self, document: dict[str, Any]) -> list[str]:
        found = [
            f"{'.'.join(map(str, error.path))}: {error.message}"
            for error in self._validator.iter_errors(document)
        ]
        rest = {key: value for key, value in document.items() if key != "metadata"}
        found += [f"{place}: unknown" for place in unknown_fields(rest, self.plain)]
        return found + [
            f"metadata.{key}: unknown" for key in document["metadata"].keys() - METADATA
        ]


def unknown_fields(value: Any, schema: dict[str, Any], place: str = "") -> Iterator[str]:
    """Fields that the schema does not have: Kubernetes drops them."""
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from unknown_fields(item, schema.get("items", {}), f"{place}[{number}]")
    elif isinstance(value, dict):
        properties, others = schema.get("properties", {}), schema.get("additionalProperties")
        for key, item in value.items():
            if key in properties:
                yield from unknown_fields(item, properties[key], f"{place}.{key}".lstrip("."))
            elif isinstance(others, dict):
                yield from unknown_fields(item, others, f"{place}.{key}".lstrip("."))
            else:
                yield f"{place}.{key}".lstrip(".")


def _as_json_schema(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_as_json_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        key: _as_json_schema(value)
        for key, value in schema.items()
        if not key.startswith("x-kubernetes-")
    }
    if schema.get("x-kubernetes-int-or-string") is True:
        found |= {"type": ["integer", "string"]}
        found.pop("anyOf", None)
    return found
