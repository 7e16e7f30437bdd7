"""Back-translation through the command line: killed and continued, and on a small machine."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stages.recipe import Recipe
from tests.support.command import Sentray
from tests.support.here import make_here
from tests.support.marian import make_pair
from tests.support.recipes import setting
from tests.support.rewrites import perturbed, sentences_of


@pytest.fixture(scope="module")
def marian(tmp_path_factory):
    """Translation models that have learned when to stop, and little else."""
    return make_pair(tmp_path_factory.mktemp("marian"), train_steps=150)


def translation(marian, **settings):
    there, back = marian
    settings = {"num_beams": 1, "rows_per_unit": 8} | settings
    return {
        "name": "pivot",
        "backtranslation": {"to_pivot": {"model": str(there)}, "from_pivot": {"model": str(back)}}
        | settings,
        "filters": {"min_growth": 0.0, "max_growth": 1000.0, "max_repeats": 1000, "script": None},
    }


@pytest.mark.thorough
def test_a_killed_translation_loses_no_finished_unit(sentray, tiny_recipe, marian, tmp_path):
    """Killed in each pass; units that were there stay as they are, and the result is the same."""
    recipe = tiny_recipe(setting("perturb", [translation(marian)]), "sentences.rows_per_shard=150")
    file = sentray.recipe_file(recipe)
    root = Path(recipe["storage"])
    sentray("run", file, "--only", "sentences")
    seen = {}
    for folder in ("pivot", "back"):
        process = sentray.start("run", file, "--only", "translate")
        units = f"work/translate/*/{folder}/*/*.json"
        sentray.wait(process, lambda units=units: len(list(root.glob(units))) >= 3)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        sentray.wait_for_idle()
        found = {f: f.stat().st_mtime_ns for f in root.glob("work/translate/*/*/*/*.json")}
        assert seen.items() <= found.items()
        seen = found
    assert any("back" in str(unit) for unit in seen)
    for name in ("translate", "perturb"):
        sentray("run", file, "--only", name)
    tables, _ = perturbed(recipe["storage"], "pivot")
    assert not list(root.glob("work/translate/*"))
    named = {(row["shard"], row["row"]) for rows in tables.values() for row in rows}
    assert named == set(sentences_of(recipe["storage"]))

    undisturbed = tiny_recipe(
        setting("perturb", [translation(marian)]), "sentences.rows_per_shard=150",
        f"storage={tmp_path}/undisturbed",
    )  # fmt: skip
    make_here(Recipe.model_validate(undisturbed), "perturb:pivot")
    assert perturbed(undisturbed["storage"], "pivot")[0] == tables
    # another filter translates nothing again
    plan = sentray("plan", file, "--set", "perturb.0.filters.max_similarity=0.5")
    assert "= translate:pivot" in plan and "+ perturb:pivot" in plan


@pytest.mark.long
def test_perturbing_beside_teachers_on_one_core_ends(tiny_recipe, marian, tmp_path):
    """Two back-translations (two passes each), a teacher and tokens ask for all cores at once."""
    second = translation(marian, no_repeat_ngram=3) | {"name": "second"}
    recipe = tiny_recipe(
        setting("perturb", [translation(marian), second]),
        "sentences.limit=120", "sentences.rows_per_shard=20", "evaluate.speed=false",
        "train.max_steps=4", "train.checkpoint_every_steps=100",
    )  # fmt: skip
    here = Sentray(tmp_path, None)
    environment = os.environ | {"RAY_OVERRIDE_RESOURCES": json.dumps({"CPU": 1})}
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.cli", "run", here.recipe_file(recipe)],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "student after" in done.stdout
