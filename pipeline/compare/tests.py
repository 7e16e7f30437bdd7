"""What `--on` names: tests of a YAML file, or tables whose columns say what they test."""

from pathlib import Path
from typing import Any

from pipeline.recipe.document import Document
from pipeline.recipe.read import recipe_context
from stages.errors import UserError
from stages.evaluate.settings import EvaluateSettings
from stages.evaluate.tables import TableSettings, columns_of

# The list under `evaluate` that a table belongs to, by columns that it must have
KINDS = {
    "sts": ("sentence1", "sentence2", "score"),
    "reranking": ("query", "candidate", "label"),
    "pairs": ("sentence1", "sentence2", "label"),
    "transfer": ("text", "label"),
}
# That a table may be said to be, as KIND:FILE, where its columns leave it open
NAMED = (*KINDS, "ranking", "classification", "clustering")


def read_tests(files: list[str], max_length: int | None = None) -> EvaluateSettings:
    """All that the files name.

    Args:
        max_length: tokens of a test sentence, instead of `evaluate.max_length`.

    Raises:
        UserError: a file that is neither, nothing to test, or what only a recipe can test.
    """
    recipes = [file for file in files if Path(file).suffix in (".yaml", ".yml")]
    if len(recipes) > 1:
        raise UserError(f"--on {recipes[1]}: one YAML file at most; put all tests into one")
    document = Document(recipes[0], what="tests") if recipes else Document.of("--on", {})
    context = recipe_context(document)
    if "evaluate" in document.raw:
        document = document.split("evaluate")
    elif "student" in document.raw:
        raise UserError(f"--on {recipes[0]}: the recipe has no section `evaluate`, so no tests")
    if not isinstance(document.raw, dict | None):
        raise UserError(
            f"--on {recipes[0]}: `evaluate` must hold lists of tests by kind, as `sts:`"
        )
    whole: dict[str, Any] = dict(document.raw or {})
    for file in files:
        if file not in recipes:
            kind, path = _kind_of(file)
            if whole.get(kind) is None:
                whole[kind] = []
            if isinstance(whole[kind], list):  # else the settings are refused below
                whole[kind] = [*whole[kind], {"name": Path(path).stem, "path": path}]
    document.raw = whole | ({} if max_length is None else {"max_length": max_length})
    settings = document.read(EvaluateSettings, context, section="evaluate")
    if not any(not test.reads and test.title != "size" for test in settings.tests):
        raise UserError(
            f"--on {' '.join(files)}: there are no tests that need no recipe (lists under "
            "`evaluate`: sts, transfer, ranking, corpora, reranking, classification, ...)"
        )
    return settings


def _kind_of(file: str) -> tuple[str, str]:
    """The list that a table belongs to, and its path."""
    named, _, path = file.partition(":")
    if named in NAMED and not Path(file).exists():
        if not path:
            raise UserError(f"--on {file}: name a table after the colon, as in {file}my.tsv")
        return named, path
    table = TableSettings(name=Path(file).stem, path=file)
    rows = table.rows(())
    if not rows:
        raise UserError(f"--on {file}: there are no rows in it")
    there = columns_of(rows)
    for kind, columns in KINDS.items():
        if set(columns) <= set(there):
            return kind, file
    wanted = "; ".join(f"{kind}: {', '.join(columns)}" for kind, columns in KINDS.items())
    raise UserError(
        f"--on {file}: its columns are {', '.join(there) or 'none'}, which is no test by itself "
        f"({wanted}). Say which by KIND:{file} ({', '.join(NAMED)}), or name it under `evaluate` "
        "in a YAML file"
    )
