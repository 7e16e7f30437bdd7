"""What publishing looks at."""

import pytest

from pipeline.plan.plan import make_plan
from pipeline.recipe.read import load_recipe
from pipeline.run.work import works_of
from stages.errors import UserError
from tests.support.models import make_sentences
from tests.support.recipes import setting, write_recipe


@pytest.mark.parametrize("folder", [False, True])
def test_what_changes_after_it_was_looked_at_is_not_published(tiny_recipe, tmp_path, folder):
    """An artifact would be found by what the file was; what changes after is another artifact."""
    texts, part = tmp_path / "texts", tmp_path / "texts/part/a.txt"
    part.parent.mkdir(parents=True)
    part.write_text("\n".join(make_sentences(50)))
    path = texts if folder else part
    recipe = load_recipe(
        write_recipe(tmp_path / "r.yaml", tiny_recipe(setting("sentences.path", str(path))))
    )

    def make():
        plan = make_plan(recipe)
        work = works_of([plan.graph["sentences"]], recipe.storage, plan.folders)["sentences"]
        return plan, lambda: work.node.stage.make(work, None)

    plan, made = make()
    before = part.read_text()
    if folder:
        (texts / "part/b.txt").write_text("Another sentence that came late.\n")
    else:
        part.write_text(before.replace("a", "e"))
    with pytest.raises(
        UserError, match=r"sentences.path: .*texts.* is not what it was .*run again"
    ):
        made()
    assert plan.store.manifest(plan.folders["sentences"]) is None
    part.write_text(before)
    (texts / "part/b.txt").unlink(missing_ok=True)
    made()
    assert plan.store.open(plan.folders["sentences"]).num_rows == 50
