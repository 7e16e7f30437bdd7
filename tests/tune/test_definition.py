"""The search section: refused with the reason, in a file of its own, what it prepares."""

import datetime

import pytest
import yaml

from pipeline.recipe.read import dump_recipe, load_recipe
from stages.errors import UserError
from tests.support.hub import put_on_hub
from tests.support.trials import RATE, TAU2, TAU3
from tune.definition import Search
from tune.inputs import commits_of, preparations

BAD = [
    ({"space": {"train.lerning_rate": {"grid": [1e-3]}}}, "did you mean 'learning_rate'"),
    ({"space": {RATE: {"grid": []}}}, "line .*grid has no values"),
    ({"space": {RATE: {"uniform": [2, 1]}}}, "the least, 2.0, is not below 1.0"),
    ({"space": {RATE: {"integer": [3, 3]}}}, "is not below"),
    ({"space": {RATE: {"loguniform": [0, 1]}}}, "positive bounds, not 0.0"),
    ({"space": {RATE: {"uniform": [1]}}}, "is \\[least, greatest\\]"),
    ({"space": {RATE: {"gird": [1]}}}, "did you mean 'grid'"),
    ({"space": {RATE: {}}}, "exactly one of grid"),
    ({"space": {RATE: {"grid": [1], "choice": [2]}}}, "exactly one of grid"),
    ({"space": {}}, "search.space"),
    ({"space": {RATE: {"grid": [1e-3, -1]}}}, "greater than 0"),
    ({"space": {RATE: {"uniform": [-1, 1]}}, "trials": 3}, "greater than 0"),
    ({"space": {"train.objectives.rank_regression.low": {"grid": [0.1, 0.2]}}},
     "search.space.train.objectives.rank_regression.low: the recipe has no 'rank_regression'"),
    ({"space": {"teachers.3.weight": {"grid": [1]}}}, "not one of the list's numbers 0 to 0"),
    ({"space": {"train.max_failures": {"grid": [1, 2]}}}, "changes nothing in what training"),
    ({"space": {"evaluate.max_length": {"grid": [32, 48]}}}, "changes nothing in what training"),
    ({"space": {TAU2: {"tied": TAU3}}}, "depends on .*teacher_temperature, which is not another"),
    ({"space": {RATE: {"grid": [1e-3], "when": {"x": 1}}}}, "depends on x"),
    ({"space": {"student.pooling": {"grid": ["mean", "cls"]}, TAU2: {"tied": "student.pooling"}}},
     "no number"),
    ({"space": {RATE: {"uniform": [1, 2]}}}, "needs `trials`"),
    ({"space": {RATE: {"uniform": [1, 2]}}, "searcher": "grid"}, "searcher grid needs lists"),
    ({"space": {RATE: {"grid": [1]}}, "metric": "dev/other"}, "it measures dev_spearman, dev/dev"),
    ({"space": {RATE: {"grid": [1]}}, "metric": "made-up"}, "Test sets .* never take part"),
    ({"space": {RATE: {"grid": [1]}}, "seeds": []}, "search.seeds"),
    ({"space": {RATE: {"grid": [1]}}, "shceduler": "asha"}, "did you mean 'scheduler'"),
    ({"space": {"train.batch_size": {"grid": [16, 32]}}, "scheduler": "population"},
     "train.batch_size cannot change while a student trains"),
    ({"space": {RATE: {"grid": [1]}}, "scheduler": "population", "seeds": [1, 2]},
     "one of `seeds`"),
    ({"space": {RATE: {"grid": [1]}}, "scheduler": "population", "budget": {"steps": 9}},
     "it has no budget"),
    ({"space": {RATE: {"grid": [1]}}, "scheduler": "population", "searcher": "tpe", "trials": 2},
     "tpe proposes none"),
    ({"space": {RATE: {"uniform": [0.1, float("inf")]}}, "trials": 3}, "finite number"),
    ({"space": {RATE: {"grid": [float("nan")]}}}, "nan is no finite number"),
    ({"space": {RATE: {"grid": [datetime.date(2026, 1, 1)]}}}, "a date .* is neither text nor"),
    ({"space": {"train.batch_size": {"integer": [1, 2**60]}}, "trials": 3}, "2.53 are too large"),
    ({"space": {RATE: {"grid": [1], "factor": 2}}}, "factor belongs to tied"),
    ({"space": {RATE: {"grid": [1]}, TAU2: {"grid": [1], "when": {RATE: []}}}}, "never met"),
    ({"space": {RATE: {"grid": [1]}, TAU2: {"grid": [1], "when": {RATE: [1, 2]}}}},
     "train.learning_rate never is 2"),
    ({"space": {"storage": {"grid": ["elsewhere"]}}}, "storage cannot be searched: all trials"),
    ({"space": {"train.seed": {"grid": [1]}}}, "name several `search.seeds`"),
    ({"space": {RATE: {"grid": [1]}}, "seeds": [1, 1]}, "one of them is there twice"),
    ({"space": {"teachers.\u00b2.weight": {"grid": [1]}}}, "not one of the list's numbers"),
]  # fmt: skip


@pytest.mark.parametrize(("section", "message"), BAD)
def test_bad_searches_are_refused_with_the_reason(make_search, section, message):
    with pytest.raises(UserError, match=message) as caught:
        make_search(**section)
    assert "search" in str(caught.value)


def test_without_labelled_pairs_there_is_no_dev_score(make_search, tiny_recipe):
    with pytest.raises(UserError, match="no `train.dev` with labels"):
        make_search({RATE: {"grid": [1]}}, recipe=tiny_recipe("train.dev=null"))
    make_search({RATE: {"grid": [1]}}, recipe=tiny_recipe("train.dev=null"), metric="loss")


def test_a_search_may_be_a_file_of_its_own(tmp_path, tiny_recipe, monkeypatch):
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(tiny_recipe()))
    section = {"name": "mine", "space": {RATE: {"grid": [1e-3, 1e-2]}}}
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump({"recipe": "base.yaml", "search": section}))
    monkeypatch.chdir(tmp_path.parent)
    search = Search(str(file), ["train.batch_size=32", "search.seeds=[7, 8]"])
    assert (search.name, search.recipe.name, search.seeds) == ("mine", "tiny", [7, 8])
    recipe = search.recipe_of({RATE: 0.01}, 8)
    assert (recipe.train.batch_size, recipe.train.learning_rate, recipe.train.seed) == (32, 0.01, 8)
    file.write_text(yaml.safe_dump({"recipe": "base.yaml", "search": section, "train": {}}))
    with pytest.raises(UserError, match="nothing but `search` beside it"):
        Search(str(file))
    with pytest.raises(UserError, match="no `search` section"):
        Search(str(tmp_path / "base.yaml"))


def test_the_best_recipe_can_be_read_where_it_lies(make_search, tiny_recipe, tmp_path, monkeypatch):
    """Its folder is another one, to which what `recipe:` names would be relative."""
    recipe, folder = tiny_recipe(), tmp_path / "runs/tune/x"
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(tiny_recipe("name=base")))
    folder.mkdir(parents=True)
    for text, variable in (
        ("recipe:${WHICH}.yaml", "base"), ("recipe:${WHICH}/base.yaml", str(tmp_path)),
        ("recipe:base.yaml", ""),
    ):  # fmt: skip
        monkeypatch.setenv("WHICH", variable)
        recipe["teachers"][0] = {"name": "t", "model": text}
        search = make_search({RATE: {"grid": [1e-3]}}, recipe, name="a" * 95)
        (folder / "best.yaml").write_text(dump_recipe(search.best_recipe({RATE: 1e-3}, 1)))
        again = load_recipe(str(folder / "best.yaml"))
        assert again.teachers[0].model == f"recipe:{tmp_path}/base.yaml"
        assert ("${WHICH}" in again.plain()["teachers"][0]["model"]) == bool(variable)
    with pytest.raises(UserError, match="search.name: .* has 96 characters, .* give at most 95"):
        make_search({RATE: {"grid": [1e-3]}}, name="a" * 96)


def test_what_trials_read_is_prepared_for_all_of_them(make_search):
    listed = make_search({"student.max_length": {"grid": [8, 16]}, RATE: {"grid": [1e-3, 1e-2]}})
    assert sorted(r.student.max_length for r in preparations(listed)) == [8, 16]
    chosen = make_search(
        {"student.max_length": {"choice": [8, 12, 16]}, RATE: {"loguniform": [1e-4, 1e-2]}},
        searcher="tpe", trials=4,
    )  # fmt: skip
    assert sorted(r.student.max_length for r in preparations(chosen)) == [8, 12, 16]
    ranges = make_search({"student.max_length": {"integer": [8, 16]}}, searcher="tpe", trials=4)
    with pytest.raises(UserError, match="student.max_length changes what is made before training"):
        preparations(ranges)


def test_a_grid_whose_trials_read_the_same_is_not_checked_as_a_whole(make_search, monkeypatch):
    """A recipe takes 11 ms to check: a thousand would be eleven silent seconds."""
    search = make_search({
        RATE: {"grid": [10.0**-i for i in range(1, 11)]},
        "train.batch_size": {"grid": [16 * i for i in range(1, 11)]},
        "train.clip_norm": {"grid": [float(i) for i in range(1, 11)]},
    })  # fmt: skip
    checked = []
    real = search.recipe_of
    monkeypatch.setattr(search, "recipe_of", lambda *given: checked.append(given) or real(*given))
    assert len(preparations(search)) == 1
    assert len(checked) < 50


def test_what_a_setting_that_needs_preparing_depends_on_is_prepared_too(make_search):
    lengths = {"student.max_length": {"choice": [8, 16], "when": {"train.batch_size": 16}}}
    search = make_search(
        lengths | {"train.batch_size": {"choice": [16, 32]}}, searcher="tpe", trials=4
    )
    assert sorted(r.student.max_length for r in preparations(search)) == [8, 16]
    tied = {"student.max_length": {"tied": "train.batch_size", "factor": 0.5}}
    search = make_search(
        tied | {"train.batch_size": {"choice": [16, 32]}}, searcher="tpe", trials=4
    )
    assert sorted(r.student.max_length for r in preparations(search)) == [8, 16]
    # an end that the recipe's own value refuses is no reason to refuse the search
    low = "train.objectives.soft_negative.low"
    recipe = make_search({RATE: {"grid": [1]}}).recipe.model_dump(mode="json")
    recipe["train"]["objectives"]["soft_negative"] = {"low": 0.1, "high": 0.3}
    bounds = {low: {"uniform": [0.05, 0.5]}}
    assert len(preparations(make_search(bounds, recipe=recipe, searcher="tpe", trials=3))) == 1


@pytest.mark.parametrize("tuned", [
    {"grid": [1e-4, 1e-3]}, {"loguniform": [1e-4, 1e-2]}, {"choice": [1e-4, 1e-3]},
])  # fmt: skip
def test_what_is_written_of_a_search_can_be_read_again(make_search, tuned):
    """A job on a cluster reads it so, and people start from search.yaml."""
    more = {} if "grid" in tuned else {"trials": 3}
    search = make_search({"train.learning_rate": tuned}, **more)
    again = make_search(**search.plain_settings)
    assert again.plain_settings == search.plain_settings


def test_every_model_that_is_searched_is_read_at_one_commit(
    make_search, tiny_recipe, tmp_path, student_folder, monkeypatch
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for model, commit in (("tiny/a", "a" * 40), ("tiny/b", "b" * 40)):
        put_on_hub(tmp_path / "hub", model, student_folder, commit)
    recipe = tiny_recipe("student.model=tiny/a")
    search = make_search({"student.model": {"choice": ["tiny/a", "tiny/b"]}}, recipe, trials=2)
    assert commits_of(search) == {"tiny/a@main": "a" * 40, "tiny/b@main": "b" * 40}
