"""Every field of every settings class with values that nobody should write.

Of a recipe, of a search and of a cluster's file. A case is accepted, or refused in one message that
can be printed; nothing else may happen, and soon, and in little memory.
`python -m tests.hostile.test_fields` counts them.
"""

import datetime
from collections import Counter
from pathlib import Path

import pytest

from stages.errors import UserError
from tests.hostile.conftest import RIGHT
from tests.hostile.subjects import outcome, subjects, use, written

# The test tries one of so many cases, which of them changes with the code
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
    "zero": 0, "-1": -1, "16 digits": 10**15, "half": 0.5, "1e308": 1e308, "true": True,
    "null": None, "empty": "",
    "newline": "a\nb", "long": "a" * 5000, "~user": "~nobody-here/x", "~": "~", "..": "../../..",
    "package:": "package:", "recipe:": "recipe:", "s3://": "s3://", "uri": "s3://b/x#y?z",
    "format": "{sentence:>10}", "conversion": "{sentence!x}", "$": "${", "list": [],
    "lists": [[[]]], "mapping": {}, "strings": ["a"] * 3, "many": [0] * 100_000,
}  # fmt: skip
VALUES = NEVER | STRANGE


def cases(subject):
    return [(path, value) for path, _ in subject.fields for value in VALUES]


def check(subject, path, value):
    message = outcome(subject, path, VALUES[value])
    # what JSON cannot hold, or no machine word, is nobody's setting
    assert message or value not in NEVER
    return message


@pytest.mark.parametrize(("kind", "path", "value"), RIGHT)
def test_what_is_tried_is_right_but_for_one_value(files, kind, path, value):
    """Else all would be refused for something else."""
    use(files[kind], path, value)


@pytest.mark.parametrize(("kind", "fewest"), [("recipe", 300), ("search", 28), ("cluster", 52)])
def test_a_value_is_accepted_or_refused_in_one_message(files, kind, fewest):
    every = cases(files[kind])
    assert len(every) > fewest * len(VALUES)
    for path, value in every[::SHARE]:
        try:
            check(files[kind], path, value)
        except Exception as error:
            raise AssertionError(f"{'.'.join(path)} = {value}") from error


@pytest.mark.parametrize("value", [*NO_NUMBERS, *TOO_LARGE])
def test_the_message_names_the_setting(files, value):
    message = outcome(files["recipe"], ("train", "learning_rate"), VALUES[value])
    assert "train.learning_rate" in message and "\n" not in message


@pytest.mark.parametrize("value", ["dict of inf", "list of nan", "list of dates"])
def test_values_inside_free_sections_are_looked_at(files, value):
    given = VALUES[value] if isinstance(VALUES[value], dict) else {"a": VALUES[value]}
    recipe = files["recipe"]
    place = ("perturb", "0", "rewriting", "extra")
    with written(recipe, place, given), pytest.raises(UserError, match="extra: .*(finite|nor a n)"):
        recipe.use()


if __name__ == "__main__":
    import tempfile

    from tests.support.models import make_model

    here = Path(tempfile.mkdtemp())
    for kind, subject in subjects(
        here, make_model(here / "teacher"), make_model(here / "student")
    ).items():
        counts, failed = Counter(), []
        every = cases(subject)
        for case in every:
            try:
                counts["refused" if check(subject, *case) else "accepted"] += 1
            except Exception as error:
                failed.append(f"{'.'.join(case[0])} = {case[1]}: {error!r:.200}")
        number = len(every) // len(VALUES)
        print(f"{kind}: {number} settings, {len(every)} cases: {dict(counts)}")
        print(*failed, sep="\n", end="\n" * bool(failed))
