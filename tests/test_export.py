"""A run with variants of its student: in the folder, on the card, in the table, or refused."""

import json
from pathlib import Path

import numpy as np

from cluster.pull import pull
from stages.export.convert import FILES
from tests.support.models import make_sentences
from tests.support.recipes import setting


def test_variants_are_published_or_refused_by_the_gate(sentray, tiny_recipe, inputs_made, tmp_path):
    from sentence_transformers import SentenceTransformer

    quick = ("evaluate.speed=false", setting("export.variants", ["bf16"]))
    recipe = tiny_recipe(*quick, "export.gate={cosine: 0.99, points: 50}")
    root = Path(recipe["storage"])
    out = sentray("run", sentray.recipe_file(recipe))
    student = root / "students" / "tiny"
    assert "student after, bf16" in out and "bf16: cosine to the float32 student" in out
    card = (student / "README.md").read_text()
    assert "student after, bf16" in card and '{"variant": "bf16"' in card
    assert "- base model (student): unknown" in card and "- teacher t (teacher): unknown" in card
    options = {"variant": "bf16", "dtype": "bfloat16"}
    texts = make_sentences(20)
    theirs = SentenceTransformer(str(student), device="cpu", model_kwargs=options).encode(texts)
    plain = SentenceTransformer(str(student), device="cpu").encode(texts)
    assert (theirs * plain).sum(1).min() > 0.99
    assert np.abs(theirs - plain).max() > 0
    pull("tiny", str(root), tmp_path / "pulled")
    assert (tmp_path / "pulled" / "student" / FILES["bf16"]).is_file()

    # a gate that nothing can pass: made anew, taken out of the folder, said at the end
    strict = tiny_recipe(*quick, "export.gate={cosine: 1.0, lowest_cosine: 1.0, points: 0}")
    strict["evaluate"]["num_bootstrap"] = 0  # another test: the student's own export stays
    file = sentray.recipe_file(strict)
    plan = sentray("plan", file)
    assert "export.gate.cosine was 0.99 and is 1.0" in plan
    for _ in range(2):  # and again where nothing is to do
        error = sentray("run", file, code=2)
        assert "none of the variants under export.variants passed export.gate" in error
        assert "bf16 is not published: " in error and "under export.gate.lowest_cosine 1" in error
        assert sentray.said.count("student after, bf16") > 1  # the table comes before it
    assert not (student / FILES["bf16"]).exists()
    assert (student / "model.safetensors").is_file()
    card = (student / "README.md").read_text()
    assert "bf16 is not published: " in card and "## Variants" not in card
    (record,) = sorted((root / "history" / "tiny").glob("*/student.json"))[-1:]
    assert json.loads(record.read_text())["more"] == []
