"""Every field of every settings class of a recipe with values that nobody should write.

A case is accepted, or refused in one message that can be printed; nothing else may happen, and
soon. `python -m tests.hostile.test_fields` counts them.
"""

import copy
import datetime
import itertools
import signal
import typing
from collections import Counter
from contextlib import contextmanager

import pytest
from pydantic import BaseModel

from pipeline.plan.plan import make_plan, plan_text
from pipeline.recipe.document import Document
from pipeline.recipe.read import dump_recipe, read_recipe
from stages.errors import UserError
from stages.plain import UNPRINTABLE, for_people
from stages.recipe import Recipe
from tests.support.recipes import tiny

# Ten, and what a cold machine takes to import what the first case needs
SECONDS = 30
# In `make test` one of so many cases is tried, which of them changes with the code
SHARE = 12


def deep():
    whole = last = {}
    for _ in range(900):
        last["a"] = {}
        last = last["a"]
    return whole


NO_NUMBERS = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}
TOO_LARGE = {"20 digits": 10**20, "-20 digits": -(10**20)}
UNREADABLE = {"null byte": "a\0b", "surrogate": "a\ud800b", "escape": "\x1b[31mred"}
NEVER = {
    **NO_NUMBERS, **TOO_LARGE, **UNREADABLE, "a million": "x" * 10**6, "nested": deep(),
    "date": datetime.date(2020, 1, 1), "set": {"a"}, "bytes": b"abc", "list of nan": [float("nan")],
    "list of dates": [datetime.date(2020, 1, 1)], "keys": {"a\0": 1}, "dict of inf": {"a": 1e999},
}  # fmt: skip
STRANGE = {
    "zero": 0, "-1": -1, "half": 0.5, "1e308": 1e308, "true": True, "null": None, "empty": "",
    "newline": "a\nb", "long": "a" * 5000, "~user": "~nobody-here/x", "~": "~", "..": "../../..",
    "package:": "package:", "recipe:": "recipe:", "s3://": "s3://", "uri": "s3://b/x#y?z",
    "format": "{sentence:>10}", "conversion": "{sentence!x}", "$": "${", "list": [],
    "lists": [[[]]], "mapping": {}, "strings": ["a"] * 3, "many": [0] * 100_000,
}  # fmt: skip
VALUES = NEVER | STRANGE


def settings_paths(model=Recipe, where=(), seen=()):
    """Every setting below a class, by path; of lists the first place."""
    for name, field in model.model_fields.items():
        yield (*where, name)
        for inner, in_list in settings_classes(field.annotation):
            if inner not in seen:
                below = (*where, name, *["0"] * in_list)
                yield from settings_paths(inner, below, (*seen, inner))


def settings_classes(annotation, in_list=False):
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, in_list
    for inner in typing.get_args(annotation):
        yield from settings_classes(inner, in_list or typing.get_origin(annotation) is list)


PATHS = list(settings_paths())
CASES = [(path, value) for path in PATHS for value in VALUES]


def with_value(raw, path, value):
    """A copy with a setting at a path; sections that are not there are made."""
    whole = place = copy.deepcopy(raw)
    for part, after in itertools.pairwise(path):
        if part == "0":
            place = place[0]
        else:
            if not place.get(part):
                place[part] = [{}] if after == "0" else {}
            place = place[part]
    place[path[-1]] = value
    return whole


@contextmanager
def limited():
    """Raises TimeoutError after SECONDS."""

    def ring(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def outcome(raw, path, value):
    """Whether the recipe is accepted, else the message; anything else is raised."""
    document = Document.of("recipe x.yaml", with_value(raw, path, VALUES[value]))
    with limited():
        try:
            recipe = read_recipe(document)
            plan_text(make_plan(recipe))
            dump_recipe(recipe).encode()
        except UserError as error:
            return str(error)
    return ""


def check(raw, path, value):
    message = outcome(raw, path, value)
    told = for_people(message)
    assert len(told) < 3100 and not UNPRINTABLE.search(told)
    assert "Traceback" not in message
    # what JSON cannot hold, or no machine word, is nobody's setting
    assert message or value not in NEVER
    return message


@pytest.fixture(scope="module")
def raw(tmp_path_factory, teacher_folder, student_folder):
    return tiny(tmp_path_factory.mktemp("hostile"), teacher_folder, student_folder)


@pytest.mark.parametrize("part", [pytest.param(n, marks=[pytest.mark.thorough] * (n > 0))
                                  for n in range(SHARE)])  # fmt: skip
def test_a_value_is_accepted_or_refused_in_one_message(raw, part):
    assert len(PATHS) > 300
    for path, value in CASES[part::SHARE]:
        try:
            check(raw, path, value)
        except Exception as error:
            raise AssertionError(f"{'.'.join(path)} = {value}") from error


@pytest.mark.parametrize("value", [*NO_NUMBERS, *TOO_LARGE])
def test_the_message_names_the_setting(raw, value):
    message = outcome(raw, ("train", "learning_rate"), value)
    assert "train.learning_rate" in message and "\n" not in message


@pytest.mark.parametrize("value", ["dict of inf", "list of nan", "list of dates"])
def test_values_inside_free_sections_are_looked_at(raw, value):
    given = VALUES[value] if isinstance(VALUES[value], dict) else {"a": VALUES[value]}
    document = Document.of("x", with_value(raw, ("perturb", "0", "rewriting", "extra"), given))
    with pytest.raises(UserError, match="extra: .*(no finite number|nor a number)"):
        read_recipe(document)


if __name__ == "__main__":
    import tempfile
    from pathlib import Path

    from tests.support.models import make_model

    folder = Path(tempfile.mkdtemp())
    base = tiny(folder, make_model(folder / "teacher"), make_model(folder / "student"))
    counts = Counter("refused" if check(base, *case) else "accepted" for case in CASES)
    print(f"{len(PATHS)} settings, {len(CASES)} cases: {dict(counts)}")
