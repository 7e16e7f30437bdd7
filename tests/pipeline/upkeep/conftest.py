import pytest

from pipeline.plan.plan import make_plan
from pipeline.run.runner import finish, record_start
from stages.recipe import Recipe
from tests.support.here import make_here
from tests.support.recipes import tiny


@pytest.fixture
def storage(tmp_path, teacher_folder, student_folder):
    """Runs recipes that differ in name, seed and what they evaluate; `storage.root`."""

    class Storage:
        root = str(tmp_path / "runs")
        path = tmp_path / "runs"

        def run(self, name, seed=42, only=None):
            raw = tiny(tmp_path, teacher_folder, student_folder) | {"name": name}
            raw["evaluate"] |= {"speed": False}
            raw["train"] |= {"seed": seed}
            recipe = Recipe.model_validate(raw)
            record = record_start(make_plan(recipe))
            make_here(recipe, *(only or ()))
            if only is None:
                finish(make_plan(recipe), record)
            return make_plan(recipe), record

    return Storage()
