"""Rows that teach nobody, against their slow twins."""

import math
import re

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from pipeline.plan.plan import make_plan
from pipeline.report.figures import collect
from stages.encoder.model import load_for_inference
from stages.encoder.settings import EncoderSettings
from stages.errors import UserError
from stages.evaluate.baselines import BaselineSettings, WordsSource, WordVectors
from stages.evaluate.bm25 import Bm25
from stages.evaluate.sts import spearman
from stages.evaluate.tables import products
from stages.recipe import Recipe
from stages.rows import unit_rows
from tests.support.here import make_here
from tests.support.models import make_sentences
from tests.support.recipes import tiny


def first_last(folder, texts):
    """Slow twin: one text at a time, in transformers."""
    model, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    rows = []
    for text in texts:
        inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=48)
        with torch.no_grad():
            states = model(**inputs, output_hidden_states=True).hidden_states
        rows.append(((states[1] + states[-1]) / 2)[0].mean(0).numpy())
    return np.stack(rows)


def test_first_and_last_layers_are_averaged(teacher_folder):
    texts = make_sentences(20)
    settings = EncoderSettings(model=str(teacher_folder), pooling="first-last", max_length=48)
    found = load_for_inference(settings).encode(texts)
    np.testing.assert_allclose(found, first_last(teacher_folder, texts), atol=2e-5)


def test_no_student_is_pooled_so(tmp_path, teacher_folder, student_folder):
    raw = tiny(tmp_path, teacher_folder, student_folder)
    raw["student"]["pooling"] = "first-last"
    with pytest.raises(ValueError, match="first-last is no student's"):
        Recipe.model_validate(raw)


WORDS = ["a 1 0 0", "cat 0 2 0", "old 0 0 4", ". . . 9 9 9", "! 0 1 1"]


def write_words(file, lines):
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.mark.parametrize("header", [[], ["5 3"]])
def test_word_vectors_are_averaged(tmp_path, header):
    vectors = WordVectors(write_words(tmp_path / "words.txt", [*header, *WORDS]))
    found = vectors.encode(["An old CAT!", "a", "nothing here"])
    expected = unit_rows(np.array([[0, 3, 5], [1, 0, 0], [0, 0, 0]]))
    np.testing.assert_allclose(unit_rows(found), expected, atol=1e-6)
    assert vectors.num_parameters == 15


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["a 1 0", "cat 1 x"], "line 2: not a word and 2 numbers"),
        (["a 1 0", "cat 1"], "line 2: not a word and 2 numbers"),
        (["a"], "line 1: not a word and its numbers"),
        ([""], "line 1"),
    ],
)
def test_files_that_are_no_word_vectors(tmp_path, lines, message):
    with pytest.raises(UserError, match=message):
        WordVectors(write_words(tmp_path / "words.txt", lines))


@pytest.mark.parametrize(
    ("baseline", "message"),
    [
        ({"name": "x"}, "give one of model, words and bm25"),
        ({"name": "x", "model": "m", "words": "w.txt"}, "give one of model, words and bm25"),
        ({"name": "x", "model": "m", "bm25": True}, "give one of model, words and bm25"),
        ({"name": "x", "bm25": True, "whitening": 8}, "`whitening` has no effect on bm25"),
        ({"name": "x", "bm25": True, "max_length": 8}, "`max_length` has no effect on bm25"),
        ({"name": "x", "words": "w.txt", "pooling": "cls"}, "`pooling` has no effect on words"),
        ({"name": "x", "model": "m", "whitening": 0}, "greater than or equal to 1"),
    ],
)
def test_bad_settings(baseline, message):
    with pytest.raises(ValueError, match=message):
        BaselineSettings.model_validate(baseline)


def test_word_vectors_are_looked_at_before_anything_is_made(tmp_path):
    broken = write_words(tmp_path / "words.txt", ["a 1 x"])
    for path, message in ((broken, "line 1: not a word"), (tmp_path, "is a folder; name the file")):
        with pytest.raises(UserError, match=message):
            WordsSource(BaselineSettings(name="x", words=str(path))).check(128)


def test_a_missing_file_is_said_before_anything_is_made(tmp_path):
    with pytest.raises(UserError, match="evaluate.baselines 'x': there is no file"):
        WordsSource(BaselineSettings(name="x", words=str(tmp_path / "no.txt"))).identity({})


def with_baselines(tmp_path, teacher_folder, student_folder, *baselines):
    raw = tiny(tmp_path, teacher_folder, student_folder)
    raw["evaluate"] |= {"speed": False, "baselines": list(baselines)}
    return raw


def test_names_are_not_taken_twice(tmp_path, teacher_folder, student_folder):
    for names in (["t"], ["x", "x"], ["after"], ["after+ranks"]):
        several = [{"name": name, "model": str(teacher_folder)} for name in names]
        raw = with_baselines(tmp_path, teacher_folder, student_folder, *several)
        with pytest.raises(ValueError, match="of a baseline is taken"):
            Recipe.model_validate(raw)


@pytest.mark.parametrize("name", ["BAAI/bge", "a/../../../x", "中文" * 40])
def test_a_name_is_no_path(tmp_path, teacher_folder, student_folder, name):
    """Else neither gc nor other recipes find its artifacts, and they may lie anywhere."""
    baseline = {"name": name, "model": str(teacher_folder), "pooling": "mean"}
    raw = with_baselines(tmp_path, teacher_folder, student_folder, baseline)
    plan = make_plan(Recipe.model_validate(raw))
    folder = plan.folders[f"evaluate:{name}:made-up"]
    assert re.fullmatch(r"evaluate/[a-z0-9]+(-[a-z0-9]+)*-[0-9a-f]{8}", folder)


def test_baselines_are_rows_of_the_table(tmp_path, teacher_folder, student_folder):
    words = write_words(tmp_path / "words.txt", WORDS)
    model = {"model": str(teacher_folder), "pooling": "first-last"}
    raw = with_baselines(
        tmp_path, teacher_folder, student_folder,
        {"name": "words", "words": str(words)}, {"name": "plain"} | model,
        {"name": "whitened", "whitening": 8} | model,
    )  # fmt: skip
    recipe = Recipe.model_validate(raw)
    plan = make_plan(recipe)
    make_here(recipe, *(name for name in plan.graph if name.startswith("evaluate:w")),
              "evaluate:plain:made-up")  # fmt: skip
    results = collect(make_plan(recipe))
    assert [label.title for label in results.encoders] == ["words", "plain", "whitened"]
    # slow twin of the whitened row: of the 300 sentences, by numpy's inverse square root
    lines = (tmp_path / "sts.tsv").read_text().splitlines()[1:]
    gold, left, right = zip(*(line.split("\t")[1:4] for line in lines), strict=True)
    corpus = first_last(teacher_folder, sentences_of(plan))
    mean, covariance = corpus.mean(0), np.cov(corpus.T.astype(np.float64), bias=True)
    values, directions = np.linalg.eigh(covariance)
    kernel = (directions / np.sqrt(values))[:, ::-1][:, :8]
    sides = [
        unit_rows((first_last(teacher_folder, texts) - mean) @ kernel) for texts in (left, right)
    ]
    expected = 100 * spearman((sides[0] * sides[1]).sum(1), np.array(gold, dtype=float))
    whitened = results.figures(results.encoders[2])["made-up"].value
    assert whitened == pytest.approx(expected, abs=0.1)
    assert whitened != pytest.approx(results.figures(results.encoders[1])["made-up"].value)


def sentences_of(plan):
    import pyarrow.parquet as pq

    paths = plan.store.open(plan.folders["sentences"]).shard_paths("rows.parquet")
    return [text for path in paths for text in pq.read_table(path)["text"].to_pylist()]


def test_whitening_to_more_dimensions_than_there_are(tmp_path, teacher_folder, student_folder):
    raw = with_baselines(
        tmp_path, teacher_folder, student_folder,
        {"name": "w", "model": str(teacher_folder), "pooling": "mean", "whitening": 49},
    )  # fmt: skip
    with pytest.raises(UserError, match="whitening is 49, but there are 48 dimensions"):
        make_here(Recipe.model_validate(raw), "evaluate:w:made-up")


DOCUMENTS = [
    "The old cat sat.", "A cat, a cat and a dog!", "Nothing of the kind", "the the the", "...",
    "Ein Hund läuft weit über die Felder und das Wasser",
]  # fmt: skip
QUERIES = ["cat", "the cat the", "HUND läuft", "unknown", ""]


def bm25_twin(query, texts):
    """The formula word by word."""
    split = [re.findall(r"\w+", text.lower()) for text in texts]
    mean = sum(map(len, split)) / len(split)
    scores = []
    for words in split:
        score = 0.0
        for word in re.findall(r"\w+", query.lower()):
            n, f = sum(word in other for other in split), words.count(word)
            idf = math.log(1 + (len(texts) - n + 0.5) / (n + 0.5))
            score += idf * f * 2.2 / (f + 1.2 * (0.25 + 0.75 * len(words) / mean))
        scores.append(score)
    return scores


def test_bm25_is_its_formula():
    bm25 = Bm25()
    documents = bm25.encode_documents(DOCUMENTS)
    found = products(bm25.encode_unit(QUERIES), documents)
    np.testing.assert_allclose(found, [bm25_twin(q, DOCUMENTS) for q in QUERIES], rtol=1e-5)
    with pytest.raises(UserError, match="none of 2 documents has a word"):
        bm25.encode_documents(["...", "!"])


def test_bm25_is_a_row_of_retrieval_and_nothing_else(tmp_path, teacher_folder, student_folder):
    raw = with_baselines(tmp_path, teacher_folder, student_folder, {"name": "bm25", "bm25": True})
    with pytest.raises(ValueError, match="baseline 'bm25': bm25 ranks documents, and there is no"):
        Recipe.model_validate(raw)
    texts = make_sentences(40)
    lines = [f"d{n}\t{text}" for n, text in enumerate(texts)]
    (tmp_path / "documents.tsv").write_text("\n".join(["id\ttext", *lines]))
    asked = {f"q{n}": " ".join(texts[n].split()[:2]) for n in range(10)}
    (tmp_path / "queries.tsv").write_text(
        "\n".join(["id\ttext", *(f"{one}\t{text}" for one, text in asked.items())])
    )
    (tmp_path / "relevance.tsv").write_text(
        "\n".join(["query\tdocument\tlabel", *(f"q{n}\td{n}\t1" for n in range(10))])
    )
    (tmp_path / "reranking.tsv").write_text("\n".join(["query\tcandidate\tlabel", *(
        f"{asked[f'q{n}']}\t{texts[m]}\t{int(m == n)}" for n in range(10) for m in (n, n + 10)
    )]))  # fmt: skip
    files = {n: str(tmp_path / f"{n}.tsv") for n in ("queries", "documents", "relevance")}
    raw["evaluate"] |= {
        "corpora": [{"name": "own"} | files],
        "reranking": [{"name": "few", "path": str(tmp_path / "reranking.tsv")}],
    }
    recipe = Recipe.model_validate(raw)
    names = [name for name in make_plan(recipe).graph if name.startswith("evaluate:bm25")]
    assert names == ["evaluate:bm25:retrieval-own", "evaluate:bm25:reranking-few"]
    make_here(recipe, *names)
    results = collect(make_plan(recipe))
    found = results.figures(results.encoders[0])
    reciprocal, reranked = [], []
    for n in range(10):
        scores = np.array(bm25_twin(asked[f"q{n}"], list(dict.fromkeys(texts))))
        of_text = dict(zip(dict.fromkeys(texts), scores, strict=True))
        ids = sorted(range(40), key=lambda m: (of_text[texts[m]], f"d{m}"), reverse=True)
        place = ids.index(n)
        reciprocal.append(1 / (1 + place) if place < 10 else 0)
        reranked.append(1.0 if of_text[texts[n]] > of_text[texts[n + 10]] else 0.5)
    assert found["MRR@10 own"].value == pytest.approx(100 * np.mean(reciprocal))
    assert found["MRR@10 few"].value == pytest.approx(100 * np.mean(reranked))
