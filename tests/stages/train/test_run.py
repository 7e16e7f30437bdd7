"""A training's own work: what it writes while it runs."""

import errno

import pytest

from pipeline.run.work import NodeWork
from stages.errors import StorageError
from stages.recipe import Recipe
from stages.train.metrics import MetricWriter
from tests.support.here import make_here
from tests.support.models import make_model
from tests.support.recipes import tiny


@pytest.mark.parametrize("method", ["__init__", "add", "close"])
def test_live_metrics_that_cannot_be_written_are_one_message(
    tmp_path, teacher_folder, student_folder, monkeypatch, method
):
    def fail(*_):
        raise OSError(errno.EROFS, "Read-only file system", "live/events")

    monkeypatch.setattr(MetricWriter, method, fail)
    recipe = Recipe.model_validate(tiny(tmp_path, teacher_folder, student_folder))
    with pytest.raises(StorageError, match="cannot be read or written .*Read-only file system"):
        make_here(recipe, "train")


@pytest.mark.parametrize(
    ("rate", "changes", "warned"),
    [
        (0.0, {}, True), (0.1, {}, False), (0.0, {"dropout": 0.1}, False),
        (0.0, {"dropout": 0.0}, False),
    ],
)  # fmt: skip
def test_views_that_a_models_own_dropout_does_not_tell_apart_are_said(
    tmp_path, teacher_folder, monkeypatch, rate, changes, warned
):
    """As ModernBERT's, whose rates are 0. With `dropout: 0` the recipe is warned of instead."""
    rates = {"hidden_dropout_prob": rate, "attention_probs_dropout_prob": rate}
    student = make_model(tmp_path / "student", **rates)
    recipe = tiny(tmp_path, teacher_folder, student)
    recipe["student"] |= changes
    recipe["train"] |= {"objectives": {"infonce": {}}, "max_steps": 1, "dev": None}
    said = []
    monkeypatch.setattr(NodeWork, "say", lambda self, text, *_, **__: said.append(text))
    make_here(Recipe.model_validate(recipe), "train")
    assert any("both views of a sentence are the same" in text for text in said) is warned
