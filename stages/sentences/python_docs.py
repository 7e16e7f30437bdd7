"""English sentences from the documentation strings of installed packages.

Source files are parsed, never imported, so nothing of theirs runs. Held-out functions
(summary line and description) serve as a retrieval test that needs no labels: no sentence of
theirs, nor one equal to it elsewhere, is left in the training text.

Memory: the prose of all docstrings read (about 30 MB for 20 large packages).
"""

import ast
import gc
import hashlib
import re
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from stages.content import installed
from stages.errors import UserError
from stages.sentences.cleaning import cleaned
from stages.sentences.settings import SentencesSettings
from stages.sentences.sources import Row

ROLE = re.compile(r":[a-zA-Z:+-]+:`~?([^`<]+?)(?:\s*<[^`>]*>)?`")
TICKS = re.compile(r"`{1,2}~?([^`]+)`{1,2}_{0,2}")
# A paragraph that is code, a table, a field list, a heading or a directive, not prose.
NOT_PROSE = re.compile(
    r"^\s*(>>>|\.\.\s|:\w+|[-=~^*#+|]{3,}|\d+[.)]\s|[-*+•@]\s|\$)|::\s*$|[{}|\\]"
)
SECTION = re.compile(
    r"^(parameters|args|arguments|returns?|yields?|raises|notes?|examples?|see also|references|"
    r"attributes|warnings?|keyword arguments|shape|inputs?|outputs?|usage|warns|methods)\s*:?$",
    re.IGNORECASE,
)
MIN_SUMMARY_WORDS = 4
MIN_DESCRIPTION_WORDS = 8


@dataclass(frozen=True)
class Documented:
    """One docstring: its dotted name, and its prose paragraphs before the first section."""

    name: str
    is_function: bool
    paragraphs: list[str]


def read_python_docs(settings: SentencesSettings) -> tuple[Iterator[Row], list[dict[str, str]]]:
    """Paragraphs of all docstrings, without the held-out ones, and the held-out pairs.

    Returns:
        records: one paragraph each; split them into sentences downstream.
        holdout: `holdout_pairs` rows of name, summary, description, chosen by a keyed hash.

    Raises:
        UserError: a package is not installed, or there are fewer pairs than asked for.
    """
    documents = [
        document
        for name, files in sorted(package_files(settings.packages).items())
        for document in _documents(name, files)
    ]
    pairs: dict[str, dict[str, str]] = {}
    for document in documents:
        if document.is_function and len(document.paragraphs) >= 2:
            summary, description = document.paragraphs[0], document.paragraphs[1]
            if (
                MIN_SUMMARY_WORDS <= len(summary.split()) <= 25
                and len(description.split()) >= MIN_DESCRIPTION_WORDS
            ):
                pairs.setdefault(
                    summary, dict(name=document.name, summary=summary, description=description)
                )
    distinct = {pair["description"]: pair for pair in pairs.values()}
    if len(distinct) < settings.holdout_pairs:
        raise UserError(
            f"sentences.holdout_pairs is {settings.holdout_pairs}, but the packages document only "
            f"{len(distinct)} functions with summary and description; lower it or add packages"
        )

    def key(pair: dict[str, str]) -> bytes:
        text = pair["summary"].encode()
        return hashlib.blake2b(text, key=settings.seed.to_bytes(8, "little")).digest()

    holdout = sorted(distinct.values(), key=key)[: settings.holdout_pairs]
    # Compared as they will be read, in one Unicode form and without what cannot be seen.
    parts = ("summary", "description")
    held = {cleaned(pair[part], settings) for pair in holdout for part in parts}
    held_sentences = {sentence for paragraph in held for sentence in _sentences(paragraph)}

    def records() -> Iterator[Row]:
        for document in documents:
            paragraphs = [cleaned(paragraph, settings) for paragraph in document.paragraphs]
            if held.isdisjoint(paragraphs):
                for paragraph in paragraphs:
                    kept = [s for s in _sentences(paragraph) if s not in held_sentences]
                    if kept:
                        yield (" ".join(kept),)

    return records(), holdout


def package_files(packages: list[str] | None) -> dict[str, list[Path]]:
    """Python files of installed distributions, by distribution name.

    Raises:
        UserError: one of `packages` is not installed.
    """
    if packages is None:
        packages = installed()
    found = {}
    for name in packages:
        try:
            files = metadata.distribution(name).files or []
        except metadata.PackageNotFoundError:
            raise UserError(
                f"sentences.packages: '{name}' is not installed in this Python; "
                "install it or take it off the list"
            ) from None
        found[name] = [
            Path(str(file.locate()))
            for file in files
            if file.suffix == ".py" and not {"tests", "test", "testing"} & set(file.parts)
        ]
    return found


def _documents(package: str, files: list[Path]) -> Iterator[Documented]:
    for file in sorted(files):
        try:
            source = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue  # listed but not there, or not Python 3 text
        if '"""' not in source and "'''" not in source:
            continue
        try:
            tree = _parsed(source)
        except (SyntaxError, ValueError, RecursionError):
            continue  # templates and test data that only look like modules
        for node in statements(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    name = getattr(node, "name", file.stem)
                    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                    paragraphs = prose_paragraphs(text)
                    if paragraphs:
                        yield Documented(f"{package}:{name}", is_function, paragraphs)


def _parsed(source: str) -> ast.Module:
    """`ast.parse`, without the garbage collector: it would walk every node of a growing tree again
    and again, and there are no cycles in one. Half of the time of torch's files is that."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            return ast.parse(source)
    finally:
        if collecting:
            gc.enable()


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """The module and its statements, in the order of `ast.walk`, without their expressions: nine
    of ten nodes, and none has a docstring."""
    found: deque[ast.AST] = deque([tree])
    while found:
        node = found.popleft()
        for field in ("body", "handlers", "orelse", "finalbody", "cases"):
            found.extend(getattr(node, field, ()))
        yield node


def prose_paragraphs(docstring: str) -> list[str]:
    """The docstring's paragraphs of plain English, mark-up removed, up to its first section."""
    paragraphs = []
    for block in re.split(r"\n\s*\n", docstring):
        lines = [line for line in block.strip("\n").split("\n") if line.strip()]
        if not lines:
            continue
        if SECTION.match(lines[0].strip()):
            break
        indented = lines[0].startswith((" ", "\t"))
        if indented or any(NOT_PROSE.search(line) for line in lines):
            continue
        text = " ".join(" ".join(lines).split())
        text = TICKS.sub(r"\1", ROLE.sub(r"\1", text)).replace("*", "")
        words = text.split()
        if len(words) >= MIN_SUMMARY_WORDS and sum(w.isalpha() for w in words) > len(words) / 2:
            paragraphs.append(text)
    return paragraphs


def _sentences(paragraph: str) -> list[Any]:
    import sentencex

    return [piece.strip() for piece in sentencex.segment("en", paragraph)]
