"""Saved recipes and fingerprints hold what was written: variables, not what they stand for."""

import json
import pickle

import pytest
import yaml

from pipeline.plan.graph import build_graph
from pipeline.plan.plan import make_plan, plan_text
from pipeline.recipe.read import dump_recipe, load_recipe
from pipeline.run.runner import record_start
from tests.support import REPOSITORY
from tests.support.models import make_model
from tests.support.recipes import setting
from tests.support.secrets import EXTRA, SECRET, chat, left_by
from tune.definition import Search


def test_a_saved_recipe_names_its_variables_and_is_the_same_recipe(load, tmp_path):
    recipe = load()
    assert recipe.sentences.path == str(tmp_path / "sentences.txt")
    text = dump_recipe(recipe)
    raw = yaml.safe_load(text)
    assert raw["sentences"]["path"] == "${FOLDER}/sentences.txt"
    assert raw["evaluate"]["sts"][0]["path"] == "${FOLDER}/sts.tsv"
    assert raw["perturb"][0]["rewriting"]["extra"] == EXTRA
    assert raw["train"]["dev"]["sts"][0]["path"] == str(tmp_path / "sts.tsv")  # written like that
    assert SECRET not in text
    again = tmp_path / "again.yaml"
    again.write_text(text)
    assert load_recipe(str(again)) == recipe


def test_copies_of_a_recipe_keep_its_variables_and_their_own_changes(load, monkeypatch):
    monkeypatch.setenv("WHO", "tiny")
    recipe = load("name=${WHO}")
    there = pickle.loads(pickle.dumps(recipe))
    assert dump_recipe(there) == dump_recipe(recipe)
    renamed = yaml.safe_load(dump_recipe(recipe.model_copy(update={"name": "tiny-best"})))
    assert renamed["name"] == "tiny-best"
    assert renamed["sentences"]["path"] == "${FOLDER}/sentences.txt"


def test_a_search_keeps_variables_in_its_recipes_and_its_own_file(load, tmp_path, student_folder):
    load()
    file = tmp_path / "search.yaml"
    space = {"student.model": {"grid": ["${FOLDER}/a", str(student_folder)]}}
    make_model(tmp_path / "a", seed=7)
    space["train.learning_rate"] = {"grid": [0.1, 0.2]}
    file.write_text(yaml.safe_dump({"recipe": "recipe.yaml", "search": {"space": space}}))
    search = Search(str(file))
    values = {"train.learning_rate": 0.1, "student.model": "${FOLDER}/a"}
    best = search.recipe_of(values, 3)
    assert best.student.model == str(tmp_path / "a")
    raw = yaml.safe_load(dump_recipe(best))
    assert raw["sentences"]["path"] == "${FOLDER}/sentences.txt"
    assert raw["student"]["model"] == "${FOLDER}/a"
    assert search.plain_settings["space"]["student.model"]["grid"][0] == "${FOLDER}/a"


def test_the_value_of_a_secret_is_no_identity_and_its_name_is(load, monkeypatch):
    first = build_graph(load()).nodes["perturb:chat"]
    monkeypatch.setenv("GATEWAY_TOKEN", "another")
    assert build_graph(load()).nodes["perturb:chat"].fingerprint == first.fingerprint
    other = {"extra_headers": {"Authorization": "Bearer ${OTHER}"}}
    assert build_graph(load(setting("perturb", chat(extra=other)))).nodes[
        "perturb:chat"
    ].fingerprint != (first.fingerprint)
    assert SECRET not in json.dumps(first.identity)


def test_a_teachers_endpoint_keeps_the_names_of_its_secrets(load, monkeypatch):
    teacher = {"name": "far", "endpoint": {"model": "m", "extra": EXTRA}}
    changes = setting("teachers", [teacher]), "train.objectives={similarity_regression: {}}"
    recipe = load(*changes)
    assert recipe.teachers[0].endpoint.extra == EXTRA
    assert SECRET not in dump_recipe(recipe) + recipe.summary()
    first = build_graph(recipe).nodes["endpoint:far"]
    assert first.stage.resources().secrets == ("OPENAI_API_KEY", "GATEWAY_TOKEN")
    monkeypatch.setenv("GATEWAY_TOKEN", "another")
    assert build_graph(load(*changes)).nodes["endpoint:far"].fingerprint == first.fingerprint


def test_other_variables_count_by_value_and_are_saved_by_name(load, tmp_path, monkeypatch):
    literal = build_graph(load("train.dev=null", "evaluate.sts.0.name=Planted")).nodes
    monkeypatch.setenv("TITLE", "Planted")
    recipe = load("train.dev=null", "evaluate.sts.0.name=${TITLE}")
    nodes = build_graph(recipe).nodes
    prints = {name: node.fingerprint for name, node in nodes.items()}
    assert prints.keys() != literal.keys()  # nodes of tests are named by the variable
    assert set(prints.values()) == {node.fingerprint for node in literal.values()}
    record_start(make_plan(recipe))
    files = left_by(recipe.storage)
    assert files and not [path for path, data in files.items() if b"Planted" in data]
    # a value that changes is told without showing either
    monkeypatch.setenv("TITLE", "Other")
    text = plan_text(make_plan(load("train.dev=null", "evaluate.sts.0.name=${TITLE}")))
    assert "Planted" not in text and "Other" not in text


def test_recipes_that_it_builds_on_are_saved_alike(load, tmp_path, tiny_recipe):
    base = tiny_recipe("name=base", "teachers=[]", "train.objectives={infonce: {}}")
    base["sentences"]["path"] = "${FOLDER}/sentences.txt"
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    teacher = {"name": "b", "model": "recipe:base.yaml", "max_length": 32}
    recipe = load("storage=${FOLDER}/runs", setting("teachers", [teacher]))
    found = build_graph(recipe).recipes["base"]
    assert found.storage == recipe.storage == str(tmp_path / "runs")
    raw = yaml.safe_load(dump_recipe(found))
    assert raw["storage"] == "${FOLDER}/runs"
    assert raw["sentences"]["path"] == "${FOLDER}/sentences.txt"


@pytest.mark.parametrize("name", ["minilm", "rankcse", "ranks", "simcse", "denosent"])
def test_shipped_recipes_keep_their_variables(name, monkeypatch):
    monkeypatch.setenv("SENTRAY_DATA", "/data-of-mine")
    file = REPOSITORY / "recipes" / f"wiki-{name}.yaml"
    written = file.read_text().count("${SENTRAY_DATA}")
    saved = dump_recipe(load_recipe(str(file)))
    assert saved.count("${SENTRAY_DATA}") == written > 0
    assert "/data-of-mine" not in saved
