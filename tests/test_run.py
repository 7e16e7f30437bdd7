"""The whole path on a real cluster of two Ray nodes: run, plan, rerun, show, use the student."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipeline.plan.plan import make_plan
from pipeline.recipe.read import load_recipe
from stages.encoder.model import load_for_inference
from stages.encoder.settings import EncoderSettings
from tests.support.command import made
from tests.support.models import make_sentences
from tests.support.recipes import setting, write_recipe


def test_a_teacher_that_is_named_twice_is_tested_once(sentray, tiny_recipe, inputs_made):
    """Its tests are the same artifacts, made by one process, which must not wait for itself."""
    (known,) = tiny_recipe()["teachers"]
    recipe = tiny_recipe(
        setting("teachers", [known, known | {"name": "again"}]), "train.max_steps=2",
        "evaluate.num_bootstrap=21", "evaluate.speed=false",
    )  # fmt: skip
    out = sentray("run", sentray.recipe_file(recipe))
    assert "evaluate:again:made-up  is the same as evaluate:t:made-up" in out
    rows = dict(line.rsplit(maxsplit=1) for line in out.splitlines() if line[:2] in ("t ", "ag"))
    assert len(rows) == 2 and len(set(rows.values())) == 1


def test_run_makes_everything_once_and_only_what_changed_again(sentray, tiny_recipe):
    recipe = tiny_recipe("sentences.rows_per_shard=64")
    file = sentray.recipe_file(recipe)
    plan = sentray("plan", file)
    assert "12 of 12 to do" in plan

    out = sentray("run", file)
    assert "student after" in out
    before = made(recipe["storage"])
    assert len([name for name in before if name.endswith("manifest.json")]) == 12
    card = Path(recipe["storage"]) / "students/tiny/README.md"
    told = card.read_text()

    # a second run does nothing, quickly because neither torch nor Ray is imported
    code = (
        "import sys; from pipeline.cli import main; assert main(['run', sys.argv[1]]) == 0; "
        "assert not {'torch', 'ray', 'transformers'} & set(sys.modules)"
    )
    again = subprocess.run(
        [sys.executable, "-c", code, file], capture_output=True, text=True, check=True,
        cwd=sentray.folder,
    )  # fmt: skip
    assert "nothing to do" in again.stdout
    assert made(recipe["storage"]) == before
    assert card.read_text() == told

    # a teacher's setting: its factors and what follows are stale, sentences and tokens are not
    change = "teachers.0.max_length=24"
    plan = sentray("plan", file, "--set", change)
    assert "stale because teachers[0].max_length was 32 and is 24" in plan
    node = make_plan(load_recipe(file, [change])).nodes["embed:t"]
    left = Path(recipe["storage"], node.folder, "shards/.tmp-00000.json-1a2b3c4d")
    left.parent.mkdir(parents=True)
    left.touch()  # by an attempt that was killed while it wrote
    sentray("run", file, "--set", change)
    assert not left.exists()
    kinds = {name.partition("/")[0] for name in made(recipe["storage"]).keys() - before.keys()}
    assert kinds == {"embed", "train", "evaluate", "export", "speed"}
    assert before.items() <= made(recipe["storage"]).items()

    # back to the first variant: nothing to do, and its own student is handed out again
    link = Path(recipe["storage"]) / "students" / "tiny"
    changed = link.resolve()
    assert "nothing to do" in sentray("run", file)
    assert link.resolve() != changed
    # a copy that followed the links is not overwritten, and nothing is left beside it
    shutil.copytree(link, link.with_name("copy"))
    link.unlink()
    link.with_name("copy").rename(link)
    beside = sorted(os.listdir(link.parent))
    assert "move it away and run again" in sentray("run", file, code=2)
    assert sorted(os.listdir(link.parent)) == beside
    shutil.rmtree(link)
    assert "nothing to do" in sentray("run", file)
    assert (link / "model.safetensors").is_file()

    # execution settings are not identity: nothing to do
    for change in ("student.tokens_per_batch=64", "train.checkpoint_every_steps=3"):
        assert "nothing to do" in sentray("plan", file, "--set", change)

    shown = sentray("show", "tiny")
    assert "student after" in shown
    for line in shown.splitlines()[1:13]:
        artifact = line.split()[1]
        assert "made " in sentray("show", artifact), artifact

    # what is gone and was needed for what is there is not made again, nor missed
    shutil.rmtree(Path(recipe["storage"]) / "sentences")
    sentray("run", file, "--force", "evaluate:after:made-up")
    assert not (Path(recipe["storage"]) / "sentences").exists()


def test_the_exported_student_gives_our_vectors(sentray, tiny_recipe, inputs_made):
    from sentence_transformers import SentenceTransformer

    for pooling in ("mean", "cls"):
        recipe = tiny_recipe(setting("student.pooling", pooling), "evaluate.speed=false")
        sentray("run", sentray.recipe_file(recipe))
        (model,) = (Path(recipe["storage"]) / "students").glob("tiny")
        theirs = SentenceTransformer(str(model), device="cpu").encode(texts := make_sentences(50))
        ours = load_for_inference(
            EncoderSettings(model=str(model), pooling=pooling, max_length=48, device="cpu")
        ).encode(texts)
        ours /= np.linalg.norm(ours, axis=1, keepdims=True)
        assert (theirs * ours).sum(1).min() > 0.9999
        card = (model / "README.md").read_text()
        assert "student after" in card
        assert "listnet" in card
        assert "sentences.txt" in card and str(sentray.folder) not in card


def test_rankencoder_trains_its_own_base_and_is_used_with_ranks(
    sentray, tiny_recipe, inputs_made, tmp_path
):
    """Base recipe -> vectors -> rank factors -> student -> Eq. 7, in one run; then shared."""
    from scipy.stats import spearmanr
    from sentence_transformers import SentenceTransformer

    base = tiny_recipe("name=base", "teachers=[]", "train.objectives={infonce: {}}")
    base.pop("evaluate")
    write_recipe(tmp_path / "base.yaml", base | {"storage": "elsewhere"})
    teachers = [{"name": "b", "model": "recipe:base.yaml", "similarity": "ranks", "max_length": 32}]
    recipe = tiny_recipe(
        setting("teachers", teachers), "ranks={corpus_size: 100}",
        "train.objectives={infonce: {}, rank_regression: {weight: 10.0, low: 0.0}}",
        "evaluate.speed=false",
        setting("evaluate.geometry", {"name": "made-up", "path": str(tmp_path / "sts.tsv"),
                            "positives_above": 0.5}),
    )  # fmt: skip
    file = sentray.recipe_file(recipe)
    plan = sentray("plan", file)
    assert "base/train" in plan and "base/sentences" not in plan  # the same sentences: shared
    out = sentray("run", file)
    for title in ("b ", "b + ranks", "student after", "student after + ranks", "uniformity"):
        assert title in out
    root = Path(recipe["storage"])
    assert not (tmp_path / "elsewhere").exists()
    assert len(list(root.glob("train/*/manifest.json"))) == 2
    assert "nothing to do" in sentray("plan", file)

    # who needs the same base finds it trained
    other = sentray("plan", file, "--set", "train.seed=7", "--set", "name=other")
    assert " = base/train" in other and " = ranks:b" in other
    changed = base | {"train": base["train"] | {"seed": 9}}
    write_recipe(tmp_path / "base.yaml", changed)
    plan = sentray("plan", file)
    assert " + base/train" in plan and "teachers[0].model is another student" in plan

    student = root / "students" / "tiny"
    sentences = make_sentences(5, seed=8)
    plain = SentenceTransformer(str(student), device="cpu").encode(sentences)
    corpus = np.load(student / "corpus.npy").astype(np.float32)
    assert corpus.shape == (100, 32)
    rho = spearmanr(plain @ corpus.T, axis=1).statistic
    expected = 0.1 * rho + 0.9 * plain @ plain.T
    found = float(sentray("similarity", student, sentences[0], sentences[1]))
    assert found == pytest.approx(expected[0, 1], abs=2e-3)
    cosine = float(sentray("similarity", student, *sentences[:2], "--rank-weight", "0"))
    assert cosine == pytest.approx((plain @ plain.T)[0, 1], abs=1e-3)
    (tmp_path / "texts.txt").write_text("\n".join(sentences) + "\n")
    sentray("encode", student, tmp_path / "texts.txt", tmp_path / "vectors.npy")
    vectors = np.load(tmp_path / "vectors.npy")
    np.testing.assert_allclose(vectors @ vectors.T, expected, atol=2e-3)
    error = sentray("similarity", student, "a", "b", "--rank-weight", "2", code=2)
    assert "between 0 and 1" in error


def test_one_stage_at_a_time_with_relative_paths(sentray, tiny_recipe, tmp_path):
    """Paths are relative to the command's folder, where the cluster's workers do not run."""
    tiny_recipe()
    relative = ["storage=runs", "sentences.path=sentences.txt"]
    recipe = tiny_recipe("evaluate.speed=false", *relative)
    file = sentray.recipe_file(recipe)
    recipe["storage"] = str(tmp_path / "runs")
    error = sentray("run", file, "--only", "train", code=2)
    assert "reads tokens, embed:t, which must be made first" in error
    assert "no stage 'trane'" in sentray("run", file, "--force", "trane", code=2)
    sentray("run", file, "--only", "sentences")
    assert {n.partition("/")[0] for n in made(recipe["storage"])} == {"sentences"}
    sentray("run", file)
    before = made(recipe["storage"])
    sentray("run", file, "--from", "train")
    after = made(recipe["storage"])
    assert before.keys() == after.keys()
    again = {name.partition("/")[0] for name in before if before[name] != after[name]}
    assert again == {"train", "evaluate", "export"}
