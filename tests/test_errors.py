"""Errors of workers and of the command, as their user sees them."""

from pathlib import Path

import pytest

from tests.support.models import make_model
from tests.support.recipes import setting


def damaged_weights(tmp_path):
    folder = make_model(tmp_path / "damaged")
    (folder / "model.safetensors").write_bytes(b"\x00" * 100)
    return str(folder)


# one for each way in which an error travels: Ray Data actor, Ray task, Ray Train, none of them
BAD = {
    "damaged weights": (
        lambda tmp: [setting("teachers.0.model", damaged_weights(tmp))], "cannot be loaded"),
    "a file of blanks": (lambda tmp: ["sentences.min_chars=900"], "nothing is left of 300 texts"),
    "a loss that becomes NaN": (lambda tmp: ["train.learning_rate=1e+30"], "became nan"),
    "the same under Ray Train": (
        lambda tmp: ["train.learning_rate=1e+30", "train.num_workers=2"],
        "became nan",
    ),
    "a rank corpus larger than the text": (
        lambda tmp: ["ranks={corpus_size: 5000}"], "only 300 sentences"),
    "a batch larger than the corpus": (
        lambda tmp: ["train.batch_size=4096"], "only 300 sentences"),
    "more workers than the cluster has": (
        lambda tmp: ["train.num_workers=16", "train.cpus_per_worker=2"],
        "do not fit into this cluster"),
}  # fmt: skip


SLOW = {"the same under Ray Train"}  # two workers start


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.long] * (case in SLOW)) for case in BAD]
)
def test_errors_of_workers_reach_the_user_as_one_message(
    sentray, tiny_recipe, inputs_made, tmp_path, case
):
    make, expected = BAD[case]
    recipe = tiny_recipe("evaluate.speed=false", *make(tmp_path))
    error = sentray("run", sentray.recipe_file(recipe), code=2)
    assert expected in error
    assert "Traceback" not in error
    assert error.count("sentray:") == 1
    assert not list(Path(recipe["storage"]).glob("export/*/manifest.json"))


def test_a_shard_changed_on_disk_stops_training_and_force_mends_it(
    sentray, tiny_recipe, inputs_made
):
    recipe = tiny_recipe("evaluate.speed=false")
    file = sentray.recipe_file(recipe)
    shard = next(Path(recipe["storage"]).glob("embed/*/shards/00001.factors.*.npy"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    error = sentray("run", file, "--only", "train", code=2)
    assert "has changed since it was published. Make it again: sentray run" in error
    assert "--force embed:t\n" in error
    sentray("run", file, "--only", "embed:t", "--force", "embed:t")
    sentray("run", file, "--only", "train")


def test_the_command_itself_says_what_is_wrong_and_ends_with_2(sentray, tiny_recipe, inputs_made):
    """In a process of its own: an address where nobody is, and a worker's error."""
    recipe = tiny_recipe("train.learning_rate=1e+30")
    file = sentray.recipe_file(recipe)
    failing = sentray.start("run", file, "--only", "train")
    sentray.address = "127.0.0.1:1"
    nowhere = sentray.start("run", file)
    for process, expected in ((failing, "became nan"), (nowhere, "no Ray cluster can be joined")):
        _, error = process.communicate(timeout=400)
        assert process.returncode == 2
        assert expected in error and error.count("sentray:") == 1 and "Traceback" not in error
