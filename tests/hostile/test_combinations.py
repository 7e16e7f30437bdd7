"""Whole files whose settings are drawn: several at once, most of them nearly right.

tests/hostile/test_fields.py has one wrong value in a right file; here what has the right type meets
others of its kind, at bounds and a little beyond. `python -m tests.hostile.test_combinations 600`
tries more.
"""

import sys
import tempfile
import typing
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import NoneType, UnionType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from tests.hostile.subjects import outcome, subjects, with_value
from tests.hostile.test_fields import STRANGE
from tests.support.models import make_model

DEEPEST = 4
# What was drawn for a section above a setting is none
NO_SECTION = (AttributeError, IndexError, KeyError, TypeError)
WORDS = ("", "a", "text", "mean", "auto", "{sentence}", "train.seed", "runs", "x.tsv", "s3://b/x")
BOUNDS = ("ge", "gt", "le", "lt", "min_length", "max_length")


def bounds_of(metadata):
    return [x for one in metadata for name in BOUNDS if (x := getattr(one, name, None)) is not None]


@st.composite
def values(draw, annotation, metadata=(), depth=0):
    """What a setting of that type may be given."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return draw(values(inner[0], (*metadata, *inner[1:]), depth))
    if origin is typing.Literal:
        return draw(st.sampled_from(inner))
    if origin in (typing.Union, UnionType):
        return draw(values(draw(st.sampled_from(inner)), metadata, depth))
    if origin in (list, tuple) and inner:
        return draw(st.lists(values(inner[0], (), depth + 1), max_size=3))
    if origin is dict:
        return draw(st.dictionaries(st.sampled_from(WORDS), values(inner[1], (), depth + 1)))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return draw(sections(annotation, depth))
    around = [x + step for x in bounds_of(metadata) for step in (-1, 0, 1)]
    near = st.sampled_from(around) if around else st.nothing()
    plain = {
        bool: st.booleans(), NoneType: st.none(), str: st.sampled_from(WORDS) | st.text(max_size=9),
        int: near | st.integers(0, 9) | st.integers(-9, 2**64),
        float: near | st.floats(0, 1) | st.floats(),
    }  # fmt: skip
    return draw(plain.get(annotation, st.sampled_from([*STRANGE.values()])))


@st.composite
def sections(draw, model, depth):
    if depth > DEEPEST:
        return {}
    names = draw(st.lists(st.sampled_from([*model.model_fields]), max_size=3, unique=True))
    fields = {name: model.model_fields[name] for name in names}
    return {n: draw(values(one.annotation, one.metadata, depth + 1)) for n, one in fields.items()}


@st.composite
def changes(draw, subject):
    """One to five settings and their new values, those that hold others first."""
    chosen = draw(st.lists(st.sampled_from(subject.fields), min_size=1, max_size=5))
    chosen.sort(key=lambda one: len(one[0]))
    return [(path, draw(values(field.annotation, field.metadata))) for path, field in chosen]


def outcome_of(subject, changed):
    """The last of them, in a file with the others."""
    *others, (path, value) = changed
    raw = subject.raw
    for other, instead in others:
        with suppress(*NO_SECTION):
            tried = with_value(raw, other, instead)
            with_value(tried, path, value)
            raw = tried
    return outcome(replace(subject, raw=raw, adapt=lambda raw, path: None), path, value)


def attempts(subject, number, **how):
    """How many drawn files were accepted and refused."""
    counts = Counter[str]()

    @settings(max_examples=number, deadline=None, suppress_health_check=[*HealthCheck], **how)
    @given(changes(subject))
    def attempt(changed):
        counts["refused" if outcome_of(subject, changed) else "accepted"] += 1

    attempt()
    return counts


@pytest.mark.parametrize(("kind", "number"), [("recipe", 400), ("search", 100), ("cluster", 50)])
def test_settings_that_were_drawn_are_accepted_or_refused(files, kind, number):
    counts = attempts(files[kind], number, derandomize=True)
    assert min(counts["accepted"], counts["refused"]) > number // 20


if __name__ == "__main__":
    place = Path(tempfile.mkdtemp())
    made = subjects(place, make_model(place / "teacher"), make_model(place / "student"))
    for kind, subject in made.items():
        print(f"{kind}: {dict(attempts(subject, int(sys.argv[1])))}", flush=True)
