"""From a YAML file to a recipe, and back."""

from typing import Any

from pipeline.recipe.document import Document
from stages.builtin import BUILTIN
from stages.errors import UserError
from stages.plain import as_yaml
from stages.plugins import load_extensions
from stages.recipe import Recipe


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
    recipe = document.read(Recipe, recipe_context(document))
    recipe._texts = document.texts(recipe)
    return recipe


def recipe_context(document: Document) -> dict[str, Any]:
    """What validators look things up in: parts of plug-ins, and where other recipes lie.

    Raises:
        UserError: a plug-in that cannot be used; names its line.
    """
    plugins = document.raw.get("plugins") or []
    if not (isinstance(plugins, list) and all(isinstance(name, str) for name in plugins)):
        plugins = []  # refused when the settings are checked
    try:
        extensions = load_extensions(BUILTIN, plugins)
    except UserError as error:
        place = str(error).partition(":")[0]
        number = place.removeprefix("plugins[").removesuffix("]")
        line = document.line_of(("plugins", number))
        raise UserError(f"{document.title}: {line}{error}") from error.__cause__
    return {"extensions": extensions, "folder": document.folder}


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML, defaults included, ${VARIABLES} as they were written."""
    return as_yaml(recipe.plain())
