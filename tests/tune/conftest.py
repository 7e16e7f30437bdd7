"""Searches over the tiny recipe."""

import pytest

from tests.support.recipes import write_recipe
from tune.definition import Search


@pytest.fixture
def make_search(tmp_path, tiny_recipe):
    """Builds a search over the tiny recipe; keywords are settings of the search."""

    def build(space, recipe=None, **settings):
        whole = (recipe or tiny_recipe()) | {"search": {"space": space, **settings}}
        return Search(write_recipe(tmp_path / "search.yaml", whole))

    return build
