"""A training's own work: what it writes while it runs."""

import errno

import pytest

from stages.errors import StorageError
from stages.recipe import Recipe
from stages.train.metrics import MetricWriter
from tests.support.here import make_here
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
