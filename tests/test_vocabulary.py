"""Students whose vocabulary is cut to the recipe's texts, from the plan to the exported folder."""

import json
from pathlib import Path

import numpy as np
import pytest

from pipeline.plan.graph import build_graph
from pipeline.recipe.read import load_recipe
from tests.support.models import make_sentences
from tests.support.recipes import setting, write_recipe
from tests.support.tokenizers import make_cuttable


@pytest.fixture
def cuttable(tmp_path):
    return str(make_cuttable(tmp_path / "bert", "WordPiece"))


def test_a_student_is_cut_trained_exported_and_told_of(sentray, tiny_recipe, cuttable):
    """Its own masked-language head trains with it, its embeddings stay."""
    from sentence_transformers import SentenceTransformer
    from transformers import AutoTokenizer

    from stages.encoder.model import load_for_inference
    from stages.encoder.settings import EncoderSettings

    recipe = tiny_recipe(
        setting("student.model", cuttable), "student.vocabulary={min_count: 1}",
        "student.freeze_embeddings=true", "train.objectives={listnet: {}, masked_language: {}}",
        "evaluate.speed=false",
    )  # fmt: skip
    file = sentray.recipe_file(recipe)
    out = sentray("run", file)
    storage = Path(recipe["storage"])
    (manifest,) = (storage / "vocabulary").glob("*/manifest.json")
    found = json.loads(manifest.read_text())["stats"]["vocabulary"]
    before, after = found["tokens"]
    assert after < 0.8 * before and found["corpus"]["changed"] == 0
    line = f"vocabulary: {before:,} -> {after:,} tokens"
    assert line in out and "though every token of them was kept" not in out
    assert "made-up with the cut vocabulary: 0 of " in out
    folder = storage / "students" / "tiny"
    assert line in (folder / "README.md").read_text()
    assert line in sentray("show", "tiny", "--storage", str(storage))
    shown = sentray("show", f"vocabulary/{manifest.parent.name}", "--storage", str(storage))
    assert f"vocabulary.tokens = [{before}, {after}]" in shown

    assert json.loads((folder / "config.json").read_text())["vocab_size"] == after
    assert len(AutoTokenizer.from_pretrained(folder)) == after
    kept = np.load(next(manifest.parent.rglob("kept.npy")))
    assert len(kept) == after
    texts = [*make_sentences(30, seed=9), "東京 cats"]
    theirs = SentenceTransformer(str(folder), device="cpu").encode(texts)
    ours = load_for_inference(EncoderSettings(model=str(folder), max_length=48, device="cpu"))
    np.testing.assert_allclose(ours.encode_unit(texts), theirs, atol=1e-5)
    assert "nothing to do" in sentray("plan", file)
    other = sentray("plan", file, "--set", "student.vocabulary={min_count: 3}")
    assert "stale because student.vocabulary.min_count was 1 and is 3" in other
    assert "student.model has another vocabulary" in other


def test_everything_that_a_student_reads_is_counted(tiny_recipe, tmp_path, cuttable):
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("sentence\trewrite\nA cat.\tThe cat.\n")
    recipe = tiny_recipe(
        setting("student.model", cuttable), "student.vocabulary={min_count: 2}",
        setting("perturb", [{"name": "mine", "pairs": {"path": str(pairs)}}]),
        "train.objectives={infonce: {}, soft_negative: {}}",
    )  # fmt: skip
    nodes = build_graph(load_recipe(write_recipe(tmp_path / "a.yaml", recipe))).nodes
    counts = [name for name in nodes if name.startswith("counts")]
    assert counts == ["counts", "counts:mine", "counts:negated"]
    assert [*nodes["vocabulary"].inputs] == ["sentences", *counts]
    readers = {name for name, node in nodes.items() if "vocabulary" in node.inputs.values()}
    assert {"tokens", "tokens:mine", "tokens:negated", "train", "evaluate:before:size"} <= readers
    assert not {"embed:t", "evaluate:t:size"} & readers


def test_a_teacher_with_the_same_settings_is_another_encoder(tiny_recipe, tmp_path, cuttable):
    """Tests of one encoder share one loaded model; these are two."""
    alike = {"model": cuttable, "pooling": "mean", "max_length": 16}
    recipe = tiny_recipe(setting("student", alike | {"vocabulary": {}}),
                         setting("teachers", [alike | {"name": "t"}]))  # fmt: skip
    nodes = build_graph(load_recipe(write_recipe(tmp_path / "a.yaml", recipe))).nodes
    before, teacher = (nodes[f"evaluate:{name}:size"] for name in ("before", "t"))
    assert before.stage.shares != teacher.stage.shares
    assert before.fingerprint != teacher.fingerprint


def test_what_depends_on_the_vocabulary(tiny_recipe, tmp_path, cuttable):
    """Another length, other layers: the same vocabulary. Another bound: the same counts."""
    start = setting("student.model", cuttable)

    def fingerprints(*changes):
        recipe = tiny_recipe(start, *changes)
        nodes = build_graph(load_recipe(write_recipe(tmp_path / "a.yaml", recipe))).nodes
        return {name: node.fingerprint for name, node in nodes.items()}

    whole, first, other, long = (
        fingerprints(*changes)
        for changes in (
            [],
            ["student.vocabulary={min_count: 1}"],
            ["student.vocabulary={min_count: 3}"],
            ["student.vocabulary={min_count: 1}", "student.max_length=20", "student.layers=1"],
        )
    )
    assert "vocabulary" not in whole and whole["tokens"] != first["tokens"]
    assert first["vocabulary"] == long["vocabulary"] and first["tokens"] != long["tokens"]
    assert first["counts"] == other["counts"] and first["vocabulary"] != other["vocabulary"]
    assert first["train"] != other["train"] and first["embed:t"] == whole["embed:t"]


def test_a_student_that_a_recipe_trained_is_cut(tiny_recipe, tmp_path, cuttable):
    """And the licence is that of the model at the beginning of it all."""
    from stages.export.licence import origin

    base = tiny_recipe("name=base", setting("student.model", cuttable),
                       "student.vocabulary={min_count: 1}")  # fmt: skip
    write_recipe(tmp_path / "base.yaml", base)
    recipe = tiny_recipe("student={model: recipe:base.yaml, vocabulary: {min_count: 4}}")
    graph = build_graph(load_recipe(write_recipe(tmp_path / "next.yaml", recipe)))
    inputs = graph.nodes["vocabulary"].inputs
    assert [*inputs.values()] == ["sentences", "counts", "base/train"]
    assert "base/vocabulary" in graph.nodes["base/train"].inputs.values()
    assert origin("base model", graph.student()).settings.model == cuttable


def test_merges_as_they_were_once_written(tiny_recipe, tmp_path):
    """Older files have them as `a b`, not as pairs."""
    folder = make_cuttable(tmp_path / "roberta", "BPE")
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["model"]["merges"] = [" ".join(pair) for pair in raw["model"]["merges"]]
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    recipe = tiny_recipe(setting("student.model", str(folder)), "student.vocabulary={}")
    graph = build_graph(load_recipe(write_recipe(tmp_path / "a.yaml", recipe)))
    graph.nodes["vocabulary"].stage.check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["student.vocabulary={size: 100000}"], "size: 100,000 is more than the"),
        (["student.vocabulary={min_count: 0}"], "greater than or equal to 1"),
        (["student.vocabulary={minimum: 1}"], "did you mean"),
        (["teachers.0.vocabulary={min_count: 1}"], "vocabulary"),
        (
            ["student.vocabulary={}", "train.objectives.replaced_token={}"],
            "replaced_token: its generator has the whole vocabulary",
        ),
        (["student.vocabulary={}", "student.model=word-level"], "is a WordLevel, and those that"),
    ],
)
def test_what_cannot_be_cut_is_said_before_the_run(
    sentray, tiny_recipe, cuttable, student_folder, changes, message
):
    recipe = tiny_recipe(setting("student.model", cuttable), *changes)
    if recipe["student"]["model"] == "word-level":
        recipe["student"]["model"] = str(student_folder)
    assert message in sentray("run", sentray.recipe_file(recipe), code=2)
    assert not Path(recipe["storage"], "sentences").exists()
