"""Figures of encoders as a table: read by type, never by name."""

import json
import math

import pytest

from pipeline.report.figures import Results
from pipeline.report.table import results_table
from stages.contract import EncoderLabel, Figure, Measurement
from stages.evaluate.settings import EvaluateSettings

BEFORE, TEACHER = EncoderLabel("before", "before"), EncoderLabel("teacher", "after+ranks")
AFTER = EncoderLabel("after", "after")
WITH_RANKS = EncoderLabel("after", "after", ranks=True)


def sts(name, value, **more):
    return Figure(name, value, percent=True, averaged="mean", **more)


def table_of(*measurements, notes=()):
    return results_table(Results(list(measurements), list(notes), {})).splitlines()


def test_rows_stand_in_order_whatever_encoders_are_called():
    """A teacher may be called like anything: roles are fields, not parts of names."""
    lines = table_of(
        Measurement(WITH_RANKS, [sts("A", 4.0)]),
        Measurement(AFTER, [sts("A", 3.0)]),
        Measurement(TEACHER, [sts("A", 2.0)]),
        Measurement(BEFORE, [sts("A", 1.0)]),
    )
    assert [line.rsplit(maxsplit=1) for line in lines[2:]] == [
        ["student before", "1.00"], ["after+ranks", "2.00"],
        ["student after", "3.00"], ["student after + ranks", "4.00"],
    ]  # fmt: skip


def test_a_mean_stands_behind_the_figures_that_ask_for_it():
    size = Measurement(AFTER, [Figure("MB", 69.4, "lower", decimals=0)])
    tests = Measurement(AFTER, [sts("A", 10.0), sts("B", 20.0)])
    speed = Measurement(AFTER, [Figure("sentences/s", 1234.6, decimals=0)])
    heading, _, row, *_ = table_of(size, tests, speed)
    assert heading.split() == ["MB", "A", "B", "mean", "sentences/s"]
    assert row.split()[2:] == ["69", "10.00", "20.00", "15.00", "1,235"]


def test_intervals_stand_below_and_notes_come_once():
    lines = table_of(
        Measurement(AFTER, [sts("A", 10.0, interval=(9.0, 11.0)), sts("B", 20.0)]),
        notes=["STS: Spearman x 100."],
    )
    assert lines[3].split() == ["95%", "interval", "9.0-11.0"]
    assert lines[-1] == "STS: Spearman x 100."


def test_what_differs_clearly_is_marked_on_either_side():
    limits = {"above": (0.1, 2.0), "below": (-2.0, -0.1), "alike": (-0.1, 2.0)}
    teachers = {name: EncoderLabel("teacher", name) for name in limits}
    rows = [Measurement(label, [sts("A", 5.0)]) for label in (*teachers.values(), AFTER)]
    apart = [
        Measurement(teachers[name], [Figure("A", 1.0, interval=ends)])
        for name, ends in limits.items()
    ]
    lines = results_table(Results(rows, [], {}, differences=apart)).splitlines()
    assert [line.rsplit(maxsplit=1)[-1] for line in lines[2:6]] == [
        "5.00*",
        "5.00*",
        "5.00",
        "5.00",
    ]
    assert lines[-1].startswith("* differs from student after")
    assert "*" not in results_table(Results(rows, [], {}))


def test_what_is_no_number_is_shown_as_such():
    lines = table_of(Measurement(AFTER, [sts("A", math.nan), sts("B", 1.0)]))
    assert lines[2].split()[2:] == ["nan", "1.00", "nan"]


def test_results_survive_being_written_down():
    one = Measurement(AFTER, [sts("A", 10.0, interval=(9.0, 11.0), parts={"x": 1.0})])
    whole = Results([one], ["note"], {"train": "train/x-1"})
    assert Results.read(json.loads(whole.json())) == whole
    assert whole.complete and not Results([], [], {}).complete


@pytest.mark.parametrize(
    "name", ["size", "retrieval", "layers", "MB", "mean", "sentences/s", "R@1", "alignment"]
)
def test_a_set_cannot_be_called_like_another_test_or_column(name):
    sets = [{"name": name, "path": "x.tsv"}]
    with pytest.raises(ValueError, match=f"the name '{name}' of a test is taken"):
        EvaluateSettings.model_validate({"sts": sets, "retrieval": {}})
