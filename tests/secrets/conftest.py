"""Recipes that name their folder and their secret by variables."""

import pytest

from pipeline.recipe.read import load_recipe
from tests.support.recipes import setting, write_recipe
from tests.support.secrets import EXTRA, SECRET, chat


@pytest.fixture(autouse=True)
def _variables(monkeypatch):
    monkeypatch.setenv("GATEWAY_TOKEN", SECRET)


@pytest.fixture
def load(tmp_path, tiny_recipe, monkeypatch):
    """Loads a recipe whose sentences and test set are named through ${FOLDER}."""
    monkeypatch.setenv("FOLDER", str(tmp_path))

    def read(*overrides):
        recipe = tiny_recipe(
            "sentences.path=${FOLDER}/sentences.txt", "evaluate.sts.0.path=${FOLDER}/sts.tsv",
            setting("perturb", chat(extra=EXTRA)), *overrides,
        )  # fmt: skip
        return load_recipe(write_recipe(tmp_path / "recipe.yaml", recipe))

    return read
