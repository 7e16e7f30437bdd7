"""Two workers under Ray Train train as one does."""

import json
from pathlib import Path

import numpy as np
import pytest
import ray

from pipeline.plan.plan import make_plan
from pipeline.recipe.read import load_recipe
from pipeline.run.board import start_board
from pipeline.run.hosts import make_on_workers
from pipeline.run.work import works_of
from stages.contract import Workers
from stages.errors import UserError
from stages.recipe import Recipe
from tests.support.command import student_file, student_weights
from tests.support.here import make_here
from tests.support.models import make_model, make_sentences
from tests.support.recipes import setting


def trained(recipe, keys):
    """Figures of every metric row under `keys`, and weights by name.

    Key biases are left out: attention does not depend on them, so their gradient is rounding
    noise, which AdamW scales up to full steps.
    """
    from safetensors.numpy import load

    lines = student_file(recipe["storage"], "metrics/metrics.jsonl")
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    figures = [row[key] for row in rows for key in keys if key in row]
    weights = load(student_weights(recipe["storage"]))
    return figures, {n: x for n, x in weights.items() if not n.endswith("key.bias")}


def versions(recipe):
    """Packages that the manifest of the storage's only training has versions of."""
    (manifest,) = Path(recipe["storage"]).glob("train/*/manifest.json")
    return set(json.loads(manifest.read_text())["versions"])


def write_pairs(file, sentences):
    """Two made-up rewrites and a negative for each sentence, as an entry of `perturb`."""
    made_up = make_sentences(3 * len(sentences), seed=4)
    lines = ["sentence1\tsentence2\tnegative"]
    for number, sentence in enumerate(sentences):
        first, second, negative = made_up[3 * number : 3 * number + 3]
        lines += [f"{sentence}\t{first}\t{negative}", f"{sentence}\t{second}\t{negative}"]
    file.write_text("\n".join(lines) + "\n")
    return {"name": "mine", "pairs": {"path": str(file), "negative_column": "negative"},
            "filters": {"min_growth": 0.0, "max_growth": 100.0, "max_repeats": 100}}  # fmt: skip


def test_two_workers_train_every_method_as_one_does(sentray, tiny_recipe, inputs_made, tmp_path):
    """Ranks, soft and hard negatives, rewrites, prompts, batch norm, all auxiliary losses."""
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = make_model(tmp_path / "student", head="ForMaskedLM", seed=6, **quiet)
    generator = make_model(tmp_path / "generator", head="ForMaskedLM", layers=1, seed=7, **quiet)
    student = {
        "model": str(model), "pooling": "mask", "dropout": 0.0, "max_length": 24,
        "template": 'The book : "{sentence}" means{mask}.', "template_denoising": True,
        "second_template": "A red {sentence} means {mask}.", "head": "batchnorm",
        "final_period": "promptbert",
    }  # fmt: skip
    objectives = {
        "infonce": {"hard_negatives": True}, "masked_language": {},
        "rank_regression": {"low": 0.0, "combine": "sum"}, "soft_negative": {"weight": 0.5},
        "denoising": {"layers": 1, "noise": 0.0, "dropout": 0.0, "target": "memory"},
        "replaced_token": {"weight": 0.1, "generator": {"model": str(generator)}},
    }  # fmt: skip
    recipe = tiny_recipe(
        setting("student", student), "teachers.0.similarity=ranks", "ranks={corpus_size: 100}",
        setting("perturb", [write_pairs(tmp_path / "pairs.tsv", make_sentences(300)[::2])]),
        setting("train.objectives", objectives),
        "train.log_every_steps=1", "train.max_steps=4", "train.learning_rate=0.0001",
        "train.dev.every_steps=2", "evaluate.speed=false",
    )  # fmt: skip
    make_here(Recipe.model_validate(recipe), "train")

    keys = ("loss", "infonce", "rank_regression", "soft_negative", "masked_language",
            "replaced_token", "denoising", "gradient_norm", "dev_spearman",
            "agreement")  # fmt: skip
    expected, weights = trained(recipe, keys)
    before = versions(recipe)
    sentray(
        "run", sentray.recipe_file(recipe), "--only", "train", "--force", "train",
        "--set", "train.num_workers=2", "--set", "train.zero_stage=3",
        "--set", "train.cpus_per_worker=1",
    )  # fmt: skip
    figures, found = trained(recipe, keys)
    assert "deepspeed" in versions(recipe) - before
    np.testing.assert_allclose(figures, expected, rtol=2e-4, atol=2e-4)
    for name in weights:
        np.testing.assert_allclose(found[name], weights[name], atol=2e-5, err_msg=name)


def test_an_error_that_is_the_users_to_mend_is_met_once(sentray, tiny_recipe, tmp_path):
    """Ray Train would start the workers `max_failures` times again, each time for nothing."""
    plan = make_plan(load_recipe(sentray.recipe_file(tiny_recipe("train.max_failures=3"))))
    node = plan.graph["train"]
    assert node.retries == 3
    work = works_of([node], plan.recipe.storage, plan.folders)["train"]
    starts = tmp_path / "starts"

    def refuse(work):
        with starts.open("a") as file:
            file.write("start\n")
        raise UserError("mend this")

    with pytest.raises(UserError, match="mend this"):
        make_on_workers(work, Workers(2, cpus=1, grouped=True), start_board(), refuse, work.say)
    assert 1 <= len(starts.read_text().splitlines()) <= 2  # once a worker


def test_the_board_is_on_the_drivers_machine(ray_cluster):
    """Elsewhere it would be lost with a machine, and the wish to stop with it."""
    here = ray.get_runtime_context().get_node_id()
    for _ in range(3):
        asked = start_board().__ray_call__.remote(
            lambda board: ray.get_runtime_context().get_node_id()
        )
        assert ray.get(asked) == here
