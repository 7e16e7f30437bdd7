"""A student for search: titles and bodies as queries and documents, in training as in export."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from sentence_transformers import SentenceTransformer

from pipeline.cli import main
from pipeline.recipe.read import load_recipe
from stages.encoder.settings import EncoderSettings
from stages.encoder.tokenizer import load_tokenizer
from stages.errors import UserError
from stages.evaluate import base
from stages.evaluate.retrieval import RetrievalSettings
from stages.export.running import encode_with
from stages.ranks.similarity import load_student
from stages.rows import unit_rows
from tests.support.embedding_client import expected
from tests.support.embedding_server import EmbeddingServer
from tests.support.here import make_here
from tests.support.kinds import make_pairs, write_pairs
from tests.support.models import make_model, make_sentences
from tests.support.pipelines import make_pipeline, pooling
from tests.support.recipes import setting, write_recipe
from tests.support.rewrites import perturbed

NUM_PAIRS, NUM_HELD_OUT = 80, 20
TEACHERS = {"query": "the old man sees ", "document": "a red house: "}
STUDENTS = {"query": "the small city ", "document": "book: "}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The recipe, its table and its models."""
    place = tmp_path_factory.mktemp("kinds")
    text = write_pairs(place / "pairs.tsv", make_pairs(NUM_PAIRS))
    teacher = make_pipeline(
        place / "teacher", pooling("mean"),
        prompts={"query": TEACHERS["query"], "passage": TEACHERS["document"]},
    )  # fmt: skip
    recipe = {
        "name": "search",
        "storage": str(place / "runs"),
        "sentences": {
            "path": str(text), "columns": {"query": "title", "document": "body"},
            "rows_per_shard": 50, "holdout_pairs": NUM_HELD_OUT,
        },
        "teachers": [{"name": "t", "model": str(teacher), "max_length": 24}],
        "student": {
            "model": str(make_model(place / "student", seed=3)), "pooling": "mean",
            "prompts": STUDENTS, "max_length": 12, "head": "none",
        },
        "train": {
            "objectives": {"similarity_regression": {}, "infonce": {}},
            "batch_size": 16, "max_steps": 6, "learning_rate": 1e-3,
        },
        "evaluate": {"retrieval": {"kind": "columns"}, "max_length": 24},
        "export": {"variants": ["bf16"], "gate": {"cosine": 0.99}},
    }  # fmt: skip
    write_recipe(place / "search.yaml", recipe)
    return place


@pytest.fixture(scope="module")
def made(folder):
    """Every artifact of the recipe, by its folder's name without the fingerprint."""
    recipe = load_recipe(str(folder / "search.yaml"), [])
    make_here(recipe)
    assert make_here(recipe) == []
    return artifacts(folder)


def artifacts(folder):
    found = (folder / "runs").glob("*/*/manifest.json")
    return {f"{one.parts[-3]}/{one.parts[-2].rpartition('-')[0]}": one.parent for one in found}


def shard_files(artifact, name):
    return sorted((artifact / "shards").glob(f"*.{name}.*"))


def rows_of(sentences):
    tables = [pq.read_table(file).to_pylist() for file in shard_files(sentences, "rows")]
    return [(row["text"], row["kind"]) for table in tables for row in table]


def model_of(made):
    return next(made["export/search"].glob("files/*/model"))


def held_out(sentences):
    table = pq.read_table(next(sentences.rglob("*holdout*.parquet")))
    return table.column("query").to_pylist(), table.column("document").to_pylist()


def tokens_of(artifact):
    for ids, offsets in zip(
        shard_files(artifact, "ids"), shard_files(artifact, "offsets"), strict=True
    ):
        flat, ends = np.load(ids), np.load(offsets)
        yield from (flat[a:b].tolist() for a, b in pairwise(ends))


def in_their_library(folder, max_length, prompts):
    """Slow twin: queries and documents to unit rows, in sentence-transformers."""
    model = SentenceTransformer(str(folder), device="cpu")
    model.max_seq_length = max_length

    def encode(texts, kind):
        way = {"query": model.encode_query, "document": model.encode_document}[kind]
        return unit_rows(way(texts, **({"prompt": prompts[kind]} if prompts else {})))

    return encode


def test_every_sentence_is_embedded_and_tokenised_with_the_prompt_of_its_kind(folder, made):
    rows = rows_of(made["sentences/search"])
    queries, documents = held_out(made["sentences/search"])
    assert len(rows) == 2 * (NUM_PAIRS - NUM_HELD_OUT) and len(queries) == NUM_HELD_OUT
    assert not {text for text, _ in rows} & {*queries, *documents}
    factors = np.concatenate([np.load(f) for f in shard_files(made["embed/t"], "factors")])
    encode = in_their_library(folder / "teacher" / "whole", 24, TEACHERS)
    theirs = np.concatenate([encode([text], kind) for text, kind in rows])
    np.testing.assert_allclose(factors, theirs, atol=1e-3)
    student = EncoderSettings(model=str(folder / "student"), pooling="mean", max_length=12)
    tokenizer = load_tokenizer(student)
    wanted = [tokenizer([STUDENTS[kind] + text])[0].tolist()[1:-1] for text, kind in rows]
    assert [*tokens_of(made["tokens/search"])] == wanted


def test_the_student_loads_as_a_search_model(made, tmp_path, capsys):
    """encode_query and encode_document, our own encoder, and the card."""
    model = model_of(made)
    config = json.loads((model / "config_sentence_transformers.json").read_text())
    assert config["prompts"] == STUDENTS and config["default_prompt_name"] is None
    texts = [text for text, _ in rows_of(made["sentences/search"])[:40]]
    ours, encode = load_student(model), in_their_library(model, 24, {})
    found = {kind: ours.encode(texts, kind) for kind in STUDENTS}
    for kind, vectors in found.items():
        np.testing.assert_allclose(vectors, encode(texts, kind), atol=1e-5)
    assert np.abs(found["query"] - found["document"]).max(1).min() > 1e-3
    theirs = SentenceTransformer(str(model), device="cpu")
    kinds = [kind for _, kind in rows_of(made["sentences/search"])[:40]]
    wanted = np.stack([found[kind][row] for row, kind in enumerate(kinds)])
    np.testing.assert_allclose(encode_with(theirs)(texts, kinds), wanted, atol=1e-5)
    plain = unit_rows(theirs.encode(texts))
    np.testing.assert_allclose(ours.encode(texts), plain, atol=1e-5)  # of no kind: no prompt
    (tmp_path / "a.txt").write_text("\n".join(texts) + "\n")
    files = str(tmp_path / "a.txt"), str(tmp_path / "a.npy")
    assert main(["encode", str(model), *files, "--kind", "document"]) == 0
    np.testing.assert_allclose(np.load(files[1]), found["document"], atol=1e-6)
    assert capsys.readouterr().err == ""
    narrow = [*files, "--kind", "document", "--precision", "bfloat16"]
    assert main(["encode", str(model), *narrow]) == 0
    told = capsys.readouterr().err  # how that was computed
    error = np.abs(np.load(files[1]) - found["document"]).max()
    assert error < 1e-6 if "no instructions for bfloat16" in told else 1e-6 < error < 0.05
    bare = str(make_pipeline(tmp_path / "bare", pooling("mean")))
    assert main(["encode", bare, *files, "--kind", "document"]) == 0
    assert "has no prompts, so --kind changes nothing" in capsys.readouterr().err
    card = (model / "README.md").read_text()
    assert "model.encode_query(" in card and "`'the small city '`" in card and "`'book: '`" in card
    proof = json.loads((made["variant/search-bf16"] / "manifest.json").read_text())["stats"]
    half = len(rows_of(made["sentences/search"])) // 2  # the others calibrate
    assert proof["refused"] == "" and proof["proof"]["num_compared"] == half


def test_retrieval_has_the_figures_of_a_slow_twin(folder, made):
    """Queries by the query's prompt, documents by the document's, for everyone in the table."""
    queries, documents = held_out(made["sentences/search"])
    encoders = {
        "before": in_their_library(folder / "student", 24, STUDENTS),
        "teacher": in_their_library(folder / "teacher" / "whole", 24, TEACHERS),
        "after": in_their_library(model_of(made), 24, {}),
    }
    measured = [
        json.loads(file.read_text())["stats"]["measured"][0]
        for file in (folder / "runs").glob("evaluate/*-retrieval-*/manifest.json")
    ]
    figures = {one["encoder"]["role"]: one["figures"] for one in measured}
    for role, encode in encoders.items():
        scores = encode(queries, "query") @ encode(documents, "document").T
        ranks = (scores >= np.diag(scores)[:, None]).sum(1)
        wanted = 100 * np.where(ranks <= 10, 1 / ranks, 0).mean()
        (mrr,) = [one for one in figures[role] if one["name"] == "MRR@10"]
        assert mrr["value"] == pytest.approx(wanted)
        swapped = encode(queries, "document") @ encode(documents, "query").T
        assert np.abs(scores - swapped).max() > 1e-3


def test_a_rewrite_has_the_prompt_of_its_sentence(folder, made):
    rows = rows_of(made["sentences/search"])
    rewrites = dict(zip(range(0, 120, 7), make_sentences(18, seed=50), strict=True))
    table = folder / "rewrites.tsv"
    lines = [f"{place}\t{text}" for place, text in rewrites.items()]
    table.write_text("\n".join(["id\tsentence2", *lines]) + "\n")
    pairs = {"path": str(table), "sentence_column": None, "id_column": "id"}
    recipe = load_recipe(
        str(folder / "search.yaml"), [setting("perturb", [{"name": "mine", "pairs": pairs}])]
    )
    made_now = make_here(recipe, "tokens:mine")
    assert made_now == ["perturb:mine", "tokens:mine"]
    student = EncoderSettings(model=str(folder / "student"), pooling="mean", max_length=12)
    tokenizer = load_tokenizer(student)
    kept = [
        row["shard"] * 50 + row["row"] for row in perturbed(recipe.storage, "mine")[0]["rewrites"]
    ]
    assert {rows[place][1] for place in kept} == {"query", "document"}
    wanted = [
        tokenizer([STUDENTS[rows[place][1]] + rewrites[place]])[0].tolist()[1:-1] for place in kept
    ]
    (other,) = [
        one.parent
        for one in (folder / "runs").glob("tokens/*/manifest.json")
        if json.loads(one.read_text())["stats"]["node"] == "tokens:mine"
    ]
    assert [*tokens_of(other)] == wanted


def test_an_endpoint_sees_the_prompt_of_each_kind(folder, made):
    server = EmbeddingServer()
    try:
        endpoint = {"model": "m", "base_url": server.url, "key_variable": None,
                    "prompt": "plain ", "prompts": {"document": "doc: "}}  # fmt: skip
        recipe = load_recipe(
            str(folder / "search.yaml"),
            [setting("teachers", [{"name": "far", "endpoint": endpoint}])],
        )
        assert make_here(recipe, "endpoint:far") == ["endpoint:far"]
    finally:
        server.stop()
    rows = rows_of(made["sentences/search"])
    asked = [{"query": "plain ", "document": "doc: "}[kind] + text for text, kind in rows]
    assert sorted(server.answered) == sorted(asked)
    factors = shard_files(artifacts(folder)["endpoint/far"], "factors")
    np.testing.assert_array_equal(np.concatenate([np.load(f) for f in factors]), expected(asked))


class HeldOutWork:
    """A node's work, as far as the retrieval test looks at it."""

    def __init__(self, sentences):
        self.path = next(sentences.rglob("*holdout*.parquet"))

    def input(self, name):
        return self

    def file_path(self, name):
        return self.path

    def say(self, text):
        self.said = text


def test_a_teacher_may_embed_the_documents_of_a_student(made):
    asked = []

    def encoder(name):
        def encode(texts, kinds=None):
            asked.append((name, kinds))
            return np.eye(len(texts), dtype=np.float32)

        return encode

    work = HeldOutWork(made["sentences/search"])
    test = RetrievalSettings(kind="columns", num_pairs=5)
    result = test.score(base.Tested(encoder("student"), None, encoder("teacher")), work)
    assert sorted(asked) == [("student", "query"), ("teacher", "document")]
    assert result.figures[1].value == 100 and work.said == "retrieval: 5 pairs"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["sentences.columns=null", "sentences.holdout_pairs=0", "evaluate.retrieval=null"],
         "student.prompts is for sentences of two kinds, and these are of one"),
        (["sentences.columns.query=titel"], "no column 'titel'.* Did you mean 'title'"),
        (["sentences.columns.querry=title"], r"unknown setting; did you mean 'query'"),
        (["student.prompts.passage=x"], "student.prompts.*should be 'query' or 'document'"),
        (["evaluate.retrieval={}"], "retrieval.kind is python-docs, but .* set kind: columns"),
        (["sentences.holdout_pairs=0"], "evaluate.retrieval needs held-out pairs: set sentences"),
        (["sentences.holdout_pairs=81"], "holdout_pairs is 81, but there are only 80 pairs of"),
        (["teachers.0.prompt_names={query: qery}"], "it has no prompt 'qery'; it has: "),
        (["teachers.0={name: v, vectors: {path: pairs.parquet}}"],
         "teacher 'v' is joined to the sentences by their text"),
        (["perturb=[{name: p, pairs: {path: pairs.tsv}}]"], "perturb 'p' is joined to the sent"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(folder, changes, message):
    with pytest.raises(UserError, match=f"(?s){message}"):
        make_here(
            load_recipe(
                str(folder / "search.yaml"), ["storage=" + str(folder / "bad"), *changes]
            ),
            "embed:t",
        )  # fmt: skip
    assert not list(Path(folder / "bad").glob("*/*/manifest.json")) or "qery" in message
