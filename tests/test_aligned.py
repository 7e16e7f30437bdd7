"""Students that stay in their teacher's space, with layers and without."""

import json
from pathlib import Path

import pytest
from scipy.stats import spearmanr

from stages.evaluate.sets import StsSettings, load_sts
from tests.support.models import make_sentences
from tests.support.pipelines import dense, make_decoder, make_pipeline, normalize, pooling
from tests.support.recipes import setting, write_recipe


def test_an_aligned_student_is_compared_with_its_teachers_documents(sentray, tiny_recipe, tmp_path):
    """A decoder with a prompt and a Dense module teaches; both ways are in the table."""
    from sentence_transformers import SentenceTransformer

    teacher = make_pipeline(
        tmp_path / "qwen", pooling("lasttoken"), dense(40), normalize, model=make_decoder,
        prompts={"topic": "the city: "},
    )  # fmt: skip
    teachers = [{"name": "t", "model": str(teacher), "prompt_name": "topic", "max_length": 32}]
    recipe = tiny_recipe(
        setting("teachers", teachers), "student.aligned=true", "student.head=none",
        "train.objectives={vector_regression: {}}", "train.max_steps=40",
        "train.learning_rate=5e-3", "evaluate.speed=false",
    )  # fmt: skip
    out = sentray("run", sentray.recipe_file(recipe))
    rows = [line.split("  ")[0] for line in out.splitlines()]
    place = rows.index("student after")  # its intervals are below it
    assert [rows[place + 1], rows[place + 2]] == ["", "student after to t"]
    model = Path(recipe["storage"]) / "students" / "tiny"
    assert "in the space of its teacher t" in (model / "README.md").read_text()
    modules = json.loads((model / "modules.json").read_text())
    kinds = [one["type"].rpartition(".")[2] for one in modules]
    assert kinds == ["Transformer", "Pooling", "Dense", "Normalize"]
    texts = make_sentences(60)
    student = SentenceTransformer(str(model), device="cpu").encode(texts)
    theirs = SentenceTransformer(str(teacher), device="cpu").encode(texts, prompt_name="topic")
    assert student.shape == theirs.shape == (60, 40)
    assert (student * theirs).sum(1).mean() > 0.6  # 0 where the map was lost


def test_a_static_student_is_trained_exported_and_compared(sentray, tiny_recipe, inputs_made):
    """No layers; the teacher's space, through a map that is part of the exported table."""
    from sentence_transformers import SentenceTransformer

    recipe = tiny_recipe(
        "student.layers=0", "student.aligned=true", "student.head=none",
        "train.objectives={vector_regression: {}}", "train.learning_rate=0.01",
        "train.max_steps=60", "evaluate.speed=false", "student.dimensions=[16]",
    )  # fmt: skip
    out = sentray("run", sentray.recipe_file(recipe))
    (row,) = [line.split() for line in out.splitlines() if line.startswith("student after  ")]
    assert "0" in row  # layers
    assert "student after, 16 dimensions" in out
    storage = Path(recipe["storage"])
    model = SentenceTransformer(str(storage / "students" / "tiny"), device="cpu")
    assert [type(one).__name__ for one in model] == ["StaticEmbedding", "Normalize"]
    (results,) = storage.glob("history/tiny/*/results.json")
    (figure,) = [
        figure["value"]
        for one in json.loads(results.read_text())["measurements"]
        if one["encoder"]["dimensions"] == 16
        for figure in one["figures"]
        if figure["name"] == "made-up"
    ]
    pairs = load_sts(StsSettings.model_validate(recipe["evaluate"]["sts"][0]))
    cut = SentenceTransformer(str(storage / "students" / "tiny"), device="cpu", truncate_dim=16)
    one, other = (
        cut.encode(sentences, normalize_embeddings=True)
        for sentences in (pairs.sentence1, pairs.sentence2)
    )
    assert one.shape[1] == 16
    assert 100 * spearmanr((one * other).sum(1), pairs.gold).statistic == pytest.approx(
        figure, abs=0.1
    )

    texts = (sentray.folder / "sentences.txt").read_text().splitlines()[:60]
    teacher = SentenceTransformer(recipe["teachers"][0]["model"], device="cpu")
    theirs = teacher.encode(texts, normalize_embeddings=True)
    found = model.encode(texts)
    assert found.shape == theirs.shape == (60, 48)
    assert (found * theirs).sum(1).mean() > 0.8


def test_a_table_cannot_be_trained_further(sentray, tiny_recipe, tmp_path):
    """Said before the first recipe is trained."""
    base = tiny_recipe(
        "name=base", "student.layers=0", "student.head=none",
        "train.objectives={vector_regression: {}}",
    )  # fmt: skip
    write_recipe(tmp_path / "base.yaml", base)
    file = sentray.recipe_file(tiny_recipe("student={model: recipe:base.yaml}"))
    assert "is a static table (student.layers: 0)" in sentray("run", file, code=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["train.objectives={listnet: {}}"], "student.aligned needs train.objectives.vector_regr"),
        (["train.objectives.vector_regression.projection=learned"], "leave one of them out"),
        (["student.head=tanh"], "aligned is about the student's own vectors, and head: tanh is"),
        (
            ["student.aligned=false", "student.dimensions=[33]"],
            "student.dimensions: 33 is more than the 32",
        ),
        (
            ["student.layers=0", "export={variants: [bf16]}"],
            "export.variants are of a transformer, and student.layers: 0 has none",
        ),
        (
            ["student.layers=0", "train.objectives.masked_language={}"],
            "masked_language reads states of the student's layers",
        ),
        (["teachers=two"], "in one teacher's space, and there are 2 teachers"),
    ],
)
def test_what_an_aligned_student_cannot_be(sentray, tiny_recipe, changes, message):
    recipe = tiny_recipe()
    teacher = recipe["teachers"][0]
    changes = [setting("teachers", [teacher, teacher | {"name": "u"}])
               if change == "teachers=two" else change for change in changes]  # fmt: skip
    recipe = tiny_recipe(
        "student.aligned=true", "student.head=none", "train.objectives={vector_regression: {}}",
        *changes,
    )  # fmt: skip
    assert message in sentray("run", sentray.recipe_file(recipe), code=2)
