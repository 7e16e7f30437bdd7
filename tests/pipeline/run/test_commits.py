"""Models of the hub: a run reads one commit, whatever a revision becomes meanwhile."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from pipeline.compare.models import evaluate_models
from pipeline.plan.plan import make_plan, plan_text
from pipeline.run.commits import commits_for
from stages.encoder.hub import COMMITS, reading, settled
from stages.encoder.model import load_for_inference
from stages.encoder.settings import EncoderSettings
from stages.errors import UserError
from stages.evaluate.settings import EvaluateSettings
from stages.recipe import Recipe
from tests.support.data import write_sts
from tests.support.here import make_here
from tests.support.hub import put_on_hub
from tests.support.models import make_model, make_sentences
from tests.support.recipes import tiny, write_recipe

OLD, NEW = "a" * 40, "b" * 40
MODEL = "tiny/teacher"


@pytest.fixture
def place(tmp_path):
    """Where the hub's cache is; and what `main` can be."""
    for commit, seed in ((OLD, 1), (NEW, 2)):
        make_model(tmp_path / commit, layers=1, width=48, seed=seed)
    return tmp_path


def move_main(place, commit):
    put_on_hub(place / "hub", MODEL, place / commit, commit)


def recipe_of(place, student_folder, **changes):
    recipe = tiny(place, place / OLD, student_folder)
    recipe["teachers"][0] |= {"model": MODEL} | changes
    return recipe


def vectors(model):
    settings = EncoderSettings(model=model, pooling="mean", max_length=32)
    return load_for_inference(settings).encode_unit(make_sentences(4))


def test_what_is_made_later_reads_the_commit_of_what_is_there(place, student_folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(place / "hub"))
    move_main(place, OLD)
    recipe = Recipe.model_validate(recipe_of(place, student_folder))
    plan = make_plan(recipe)
    read = commits_for(plan, plan.graph.values())
    assert read == {f"{MODEL}@main": OLD}
    with reading(read):
        make_here(recipe, "embed:t", "tokens")
    plan = make_plan(recipe)
    assert plan.nodes["embed:t"].manifest.versions[f"{MODEL}@main"] == OLD
    assert f"{MODEL}@main" not in plan.nodes["tokens"].manifest.versions
    assert "note:" not in plan_text(plan)

    move_main(place, NEW)
    plan = make_plan(recipe)
    assert f"made with {MODEL}@main {OLD}, and now {NEW} is here: embed:t;" in plan_text(plan)
    to_do = [one.node for one in plan.nodes.values() if one.to_do]
    read = commits_for(plan, to_do)
    assert read == {f"{MODEL}@main": OLD}
    old, new = vectors(str(place / OLD)), vectors(str(place / NEW))
    with reading(read):
        np.testing.assert_array_equal(vectors(MODEL), old)
    np.testing.assert_array_equal(vectors(MODEL), new)
    assert np.abs(old - new).max() > 0.01
    assert settled() == {} and COMMITS not in os.environ

    again = commits_for(plan, [plan.graph["embed:t"]], again={"embed:t"})
    assert again == {f"{MODEL}@main": NEW}


def test_models_without_a_recipe_are_read_at_the_commit_of_their_figures(place, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(place / "hub"))
    sets = []
    for name in ("one", "other"):
        write_sts(place / f"{name}.tsv")
        sets.append({"name": name, "path": str(place / f"{name}.tsv")})
    for commit, number in ((OLD, 1), (NEW, 2)):
        move_main(place, commit)
        tests = EvaluateSettings.model_validate({"sts": sets[:number], "max_length": 32})
        evaluate_models([MODEL], tests, str(place / "runs"), lambda line: None, "mean")
    files = [*(place / "runs").glob("evaluate/*/manifest.json")]
    read = [json.loads(file.read_text())["versions"][f"{MODEL}@main"] for file in files]
    assert len(read) > 1 and set(read) == {OLD}


def test_a_commit_is_one_already_and_no_model_is_said(place, student_folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(place / "hub"))
    pinned = Recipe.model_validate(recipe_of(place, student_folder, revision=NEW))
    plan = make_plan(pinned)
    assert commits_for(plan, plan.graph.values()) == {f"{MODEL}@{NEW}": NEW}
    plan = make_plan(Recipe.model_validate(recipe_of(place, student_folder)))
    with pytest.raises(UserError, match=f"model '{MODEL}': not in the Hugging Face cache"):
        commits_for(plan, plan.graph.values())


def test_a_data_set_of_the_hub_is_read_at_one_commit(place, student_folder, monkeypatch):
    pytest.importorskip("datasets")
    import datasets
    import huggingface_hub

    asked = []

    def dataset_info(hub, name, revision):
        return SimpleNamespace(sha={"some/text": NEW, "some/pairs": OLD}[name])

    def load(name, config, *, revision, **how):
        asked.append((name, revision))
        return iter([{"text": line} for line in make_sentences(40)])

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr(datasets, "load_dataset", load)
    raw = recipe_of(place, student_folder, model=str(place / OLD))
    raw["sentences"] = {"dataset": "some/text"}
    raw["evaluate"]["sts"] = [{"name": "far", "dataset": "some/pairs", "split": "test"}]
    recipe = Recipe.model_validate(raw)
    plan = make_plan(recipe)
    read = commits_for(plan, plan.graph.values())
    assert read == {"datasets/some/text@main": NEW, "datasets/some/pairs@main": OLD}
    with reading(read):
        make_here(recipe, "sentences")
    assert asked == [("some/text", NEW)]
    manifest = make_plan(recipe).nodes["sentences"].manifest
    assert manifest.versions["datasets/some/text@main"] == NEW


def test_a_data_set_that_the_hub_does_not_know(place, student_folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    raw = recipe_of(place, student_folder, model=str(place / OLD))
    raw["sentences"] = {"dataset": "some/text"}
    plan = make_plan(Recipe.model_validate(raw))
    with pytest.raises(UserError, match="data set 'some/text': the hub does not say what it is"):
        commits_for(plan, plan.graph.values())


@pytest.mark.thorough
def test_workers_read_the_commit_that_the_run_has_settled_on(place, student_folder):
    """A teacher is embedded, `main` moves, and its test runs on Ray."""
    move_main(place, OLD)
    file = write_recipe(place / "recipe.yaml", recipe_of(place, student_folder))
    environment = os.environ | {"HF_HUB_CACHE": str(place / "hub")}
    for node in ("sentences", "embed:t", "evaluate:t:made-up"):
        command = [sys.executable, "-m", "pipeline.cli", "run", file, "--only", node]
        subprocess.run(command, check=True, env=environment)
        if node == "embed:t":
            move_main(place, NEW)
    (found,) = place.glob("runs/evaluate/t-made-up-*/manifest.json")
    assert json.loads(found.read_text())["versions"][f"{MODEL}@main"] == OLD
