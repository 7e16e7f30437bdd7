"""Two commands at once on one storage: each stage is made once, and none is lost."""

import signal
from collections import Counter

import pytest

from stages.recipe import Recipe
from tests.support.command import student_weights, wait_until
from tests.support.here import make_here
from tests.support.recipes import setting, write_recipe


@pytest.fixture
def undisturbed(tiny_recipe, tmp_path):
    """Weights of the student of a recipe with these changes, made by one process without Ray."""

    def weights(*overrides):
        recipe = tiny_recipe(*overrides, f"storage={tmp_path}/alone")
        make_here(Recipe.model_validate(recipe), "train")
        return student_weights(recipe["storage"])

    return weights


def lines_until(process, text):
    """What the process prints, up to a line with the text."""
    found = []
    for line in process.stdout:
        found.append(line)
        if text in line:
            return found
    raise AssertionError(f"ended without '{text}': {''.join(found)}{process.stderr.read()}")


def end(process, before):
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, "".join(before) + out + err
    return [*before, *out.splitlines()]


def made_by(lines):
    words = (line.split() for line in lines)
    return [word[1] for word in words if word[2:] == ["started"]]


LONG = ("train.max_steps=120", "train.checkpoint_every_steps=5", "evaluate.speed=false")


@pytest.mark.thorough
def test_two_runs_make_each_stage_once(sentray, tiny_recipe, undisturbed):
    recipe = tiny_recipe("evaluate.speed=false")
    file = sentray.recipe_file(recipe)
    first = sentray.start("run", file)
    before = lines_until(first, "sentences         started")
    second = sentray.start("run", file)
    outputs = [end(first, before), end(second, [])]
    made = Counter(name for lines in outputs for name in made_by(lines))
    assert set(made.values()) == {1}, made
    assert {"sentences", "embed:t", "tokens", "train", "export"} <= made.keys()
    assert any("waits for" in line for line in outputs[1])
    assert any("student after" in line for line in outputs[1])
    assert student_weights(recipe["storage"]) == undisturbed("evaluate.speed=false")


@pytest.mark.thorough
def test_who_waits_takes_over_from_a_killed_run(sentray, tiny_recipe, inputs_made, undisturbed):
    recipe = tiny_recipe(*LONG)
    file = sentray.recipe_file(recipe)
    first = sentray.start("run", file)
    before = lines_until(first, "train             started")
    second = sentray.start("run", file)
    waiting = lines_until(second, "train             waits for")
    sentray.wait(first, lambda: list(sentray.folder.glob("runs/work/train/*/step-*/complete.json")))
    first.send_signal(signal.SIGKILL)
    first.communicate()
    lines = end(second, waiting)
    assert any("takes over from" in line for line in lines)
    assert "train" in made_by(before)
    assert "train" in made_by(lines)
    steps = [line.split("step ")[1] for line in lines if "train " in line and "step " in line]
    assert not steps[0].startswith("2/120"), "it began anew"
    assert student_weights(recipe["storage"]) == undisturbed(*LONG)


@pytest.mark.long
def test_a_search_waits_for_what_a_run_makes(sentray, tiny_recipe):
    """The inputs of its trials are what the run makes at this moment."""
    recipe = tiny_recipe("train.max_steps=4", "evaluate.speed=false", setting("evaluate.sts", []))
    run = sentray.start("run", sentray.recipe_file(recipe))
    before = lines_until(run, "sentences         started")
    search = recipe | {
        "search": {"space": {"train.learning_rate": {"grid": [1e-3, 2e-3]}}, "metric": "loss"}
    }
    out = sentray("tune", write_recipe(sentray.folder / "search.yaml", search))
    made = Counter([*made_by(end(run, before)), *made_by(out.splitlines())])
    assert {name: made[name] for name in ("sentences", "embed:t", "tokens")} == {
        "sentences": 1, "embed:t": 1, "tokens": 1,
    }  # fmt: skip


@pytest.mark.long
def test_a_second_search_waits_and_finds_what_the_first_has_found(sentray, tiny_recipe, tmp_path):
    recipe = tiny_recipe("train.max_steps=4", "evaluate.speed=false", setting("evaluate.sts", []))
    recipe["search"] = {"space": {"train.learning_rate": {"grid": [1e-3, 2e-3]}}, "metric": "loss"}
    file = sentray.recipe_file(recipe)
    first = sentray.start("tune", file)
    wait_until(lambda: (tmp_path / "runs" / "tune" / "tiny" / "search.yaml").exists())
    out = sentray("tune", file)
    end(first, [])
    assert "search tiny: waits for" in out
    lines = (tmp_path / "runs" / "tune" / "tiny" / "trials.jsonl").read_text().splitlines()
    assert len([line for line in lines if '"status": "finished"' in line]) >= 2


@pytest.mark.long
def test_recipes_of_other_names_share_what_they_both_need(sentray, tiny_recipe, undisturbed):
    """Artifacts bear the name of the recipe that made them; the other one finds them anyway."""
    overrides = ("evaluate.speed=false",)
    one = tiny_recipe(*overrides)
    other = tiny_recipe(*overrides, setting("name", "other"), "train.seed=5")
    first = sentray.start("run", write_recipe(sentray.folder / "one.yaml", one))
    before = lines_until(first, "sentences         started")
    second = sentray.start("run", write_recipe(sentray.folder / "other.yaml", other))
    outputs = [end(first, before), end(second, [])]
    made = Counter(name for lines in outputs for name in made_by(lines))
    for name in ("sentences", "tokens", "embed:t"):
        assert made[name] == 1
    assert made["train"] == 2
    assert any("student after" in line for line in outputs[1])
    assert "nothing to do" in sentray("plan", sentray.folder / "one.yaml")
    assert "nothing to do" in sentray("plan", sentray.folder / "other.yaml")
