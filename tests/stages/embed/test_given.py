"""Vectors that are there already, joined with the sentences that they belong to."""

import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.embed import given
from stages.embed.given import Matching, VectorsSettings, join
from stages.errors import UserError
from stages.rows import unit_rows
from stages.sentences.index import SentenceIndex
from tests.support.models import make_sentences
from tests.support.recipes import setting, write_recipe

N, D = 20, 6


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(given, "BATCH_ROWS", 7)


@pytest.fixture
def corpus():
    return make_sentences(N)


@pytest.fixture
def vectors():
    return np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)


def joined(tmp_path, corpus, **settings):
    chosen = VectorsSettings(**settings)
    index = SentenceIndex([corpus[:12], corpus[12:]], by_text=chosen.id_column is None)
    matching = Matching(chosen, "teachers[0].vectors", "NFC", index)
    return join(matching, tmp_path / "joined"), matching


def same(found, vectors):
    np.testing.assert_array_equal(found, unit_rows(vectors).astype(np.float16))


def matrix(tmp_path, vectors, texts):
    """Settings of an .npy file with its sentences."""
    np.save(tmp_path / "v.npy", vectors)
    (tmp_path / "v.txt").write_text("\n".join(texts) + "\n")
    return dict(path=str(tmp_path / "v.npy"), sentences=str(tmp_path / "v.txt"))


@pytest.mark.parametrize("scale", [1, 1e-7, 1e30])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_matrix_of_any_type_and_length_of_its_rows(tmp_path, corpus, vectors, dtype, scale):
    scaled = vectors.astype(dtype)
    if dtype != np.float16:
        scaled *= dtype(scale)
    found, matching = joined(tmp_path, corpus, **matrix(tmp_path, scaled, corpus))
    same(found, vectors.astype(dtype))
    assert not len(matching.missing) and matching.num_unknown == matching.num_twice == 0


def test_a_matrix_is_joined_by_id(tmp_path, corpus, vectors):
    order = np.random.default_rng(1).permutation(N)
    paths = matrix(tmp_path, vectors[order], map(str, order))
    found, _ = joined(tmp_path, corpus, **paths, sentence_column=None, id_column="id")
    same(found, vectors)


def test_an_id_of_more_digits_than_python_reads_is_of_no_sentence(tmp_path, corpus, vectors):
    ids = [*map(str, range(N)), "9" * 5000, f"{'0' * 5000}1"]
    paths = matrix(tmp_path, np.concatenate([vectors, vectors[:2]]), ids)
    found, matching = joined(tmp_path, corpus, **paths, sentence_column=None, id_column="id")
    same(found, vectors)
    assert (matching.num_unknown, matching.num_twice) == (2, 0)
    index = SentenceIndex([corpus], by_text=False)
    assert [index.row_of(key) for key in ("007", "٧", str(N), "-1", "7.0")] == [7, 7, *[None] * 3]


def test_a_matrix_finds_its_sentences_by_text(tmp_path, corpus, vectors):
    """In another order, with sentences of no corpus, one twice, and other white space."""
    order = np.random.default_rng(1).permutation(N)
    texts = ["Of no corpus.", *(f" {corpus[i]}  " for i in order), corpus[3], ""]
    rows = np.concatenate([vectors[:1], vectors[order], -vectors[3:4], vectors[:1]])
    found, matching = joined(tmp_path, corpus, **matrix(tmp_path, rows, texts))
    same(found, vectors)
    assert (matching.num_unknown, matching.num_twice, len(matching.missing)) == (2, 1, 0)


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.float32()), pa.list_(pa.float64()), pa.large_list(pa.float32()),
             pa.list_(pa.float32(), D), pa.list_(pa.float16(), D)], ids=str,
)  # fmt: skip
def test_parquet_by_text_and_by_id(tmp_path, corpus, vectors, kind):
    order = np.random.default_rng(1).permutation(N)
    exact = vectors.astype(np.float16)  # so that every type holds it
    cells = pa.array([list(exact[i]) for i in order], pa.list_(pa.float16())).cast(kind)
    table = {"text": [corpus[i] for i in order], "n": order, "vector": cells}
    pq.write_table(pa.table(table), tmp_path / "v.parquet", row_group_size=8)
    for key in ({}, {"sentence_column": None, "id_column": "n"}):
        found, _ = joined(tmp_path, corpus, path=str(tmp_path / "v.parquet"), **key)
        same(found, exact)


def test_sentences_without_a_vector_are_counted(tmp_path, corpus, vectors):
    table = {"text": corpus[2:], "vector": list(vectors[2:])}
    pq.write_table(pa.table(table), tmp_path / "v.parquet")
    _, matching = joined(tmp_path, corpus, path=str(tmp_path / "v.parquet"))
    assert list(matching.missing) == [0, 1]


def with_value(vectors, value):
    changed = vectors.copy()
    changed[9] = value
    return changed


BAD = {
    "not finite": (lambda v: with_value(v, np.nan), "vector of sentence SENTENCE is not finite"),
    "infinite": (lambda v: with_value(v, np.inf), "vector of sentence SENTENCE is not finite"),
    "zero": (lambda v: with_value(v, 0), "vector of sentence SENTENCE is zero"),
    "a row less": (lambda v: v[1:], "has 19 rows, but .* has 20 sentences"),
    "a row more": (lambda v: np.concatenate([v, v[:1]]), "has 21 rows, but .* has 20"),
    "flat": (lambda v: v[:, 0], r"float32 of shape \(20,\); vectors are"),
    "whole numbers": (lambda v: v.astype(np.int64), "int64 of shape"),
    "none": (lambda v: v[:0], r"shape \(0, 6\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_matrices(tmp_path, corpus, vectors, case):
    change, message = BAD[case]
    message = message.replace("SENTENCE", re.escape(repr(corpus[9])))
    with pytest.raises(UserError, match=message):
        joined(tmp_path, corpus, **matrix(tmp_path, change(vectors), corpus))


BAD_COLUMNS = {
    "ragged": ([[1.0, 2.0]] * 19 + [[1.0]], "several widths or none: 2, 1"),
    "a width of its own, later": ([[1.0, 2.0]] * 7 + [[1.0]] * 13, "of 1 dimensions, after some"),
    "missing": ([[1.0, 2.0]] * 3 + [None] * 17, "several widths or none: 2, missing"),
    "empty lists": ([[]] * 20, "type list<.*: null>"),
    "whole numbers": ([[1, 2]] * 20, "type list<.*: int64>; a list of floating"),
    "plain numbers": ([1.0] * 20, "type double; a list of floating"),
}


@pytest.mark.parametrize("case", BAD_COLUMNS)
def test_bad_columns(tmp_path, corpus, case):
    cells, message = BAD_COLUMNS[case]
    pq.write_table(pa.table({"text": corpus, "vector": cells}), tmp_path / "v.parquet")
    with pytest.raises(UserError, match=message):
        joined(tmp_path, corpus, path=str(tmp_path / "v.parquet"))


def test_a_key_that_is_no_utf_8(tmp_path, corpus, vectors):
    texts = pa.array([text.encode() + b"\xff" for text in corpus]).view(pa.string())
    pq.write_table(pa.table({"text": texts, "vector": list(vectors)}), tmp_path / "v.parquet")
    with pytest.raises(UserError, match="not a readable Parquet file"):
        joined(tmp_path, corpus, path=str(tmp_path / "v.parquet"))


def test_files_that_are_none(tmp_path, corpus, vectors):
    paths = matrix(tmp_path, vectors, corpus)
    (tmp_path / "v.npy").write_bytes(b"\x93NUMPY, but not")
    with pytest.raises(UserError, match="not a readable .npy file"):
        joined(tmp_path, corpus, **paths)
    np.save(tmp_path / "v.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(UserError, match="not a readable .npy file"):  # never unpickled
        joined(tmp_path, corpus, **paths)
    np.savez(tmp_path / "v.npz", vectors)
    (tmp_path / "v.npz").rename(tmp_path / "v.npy")
    with pytest.raises(UserError, match="an archive of some"):
        joined(tmp_path, corpus, **paths)
    with pytest.raises(UserError, match=r"vectors.sentences: there is no file .*nosuch.txt"):
        joined(tmp_path, corpus, path=paths["path"], sentences=str(tmp_path / "nosuch.txt"))
    with pytest.raises(ValueError, match="does not say whose vectors it has"):
        VectorsSettings(path=paths["path"])
    (tmp_path / "v.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match="not a readable Parquet file"):
        joined(tmp_path, corpus, path=str(tmp_path / "v.parquet"))
    pq.write_table(pa.table({"sentence": corpus, "vector": list(vectors)}), tmp_path / "v.parquet")
    with pytest.raises(UserError, match="there is no column 'text'; it has sentence, vector"):
        joined(tmp_path, corpus, path=str(tmp_path / "v.parquet"))
    by_id = {"sentence_column": None, "id_column": "n"}
    table = {"n": np.arange(N) + 0.0, "vector": list(vectors)}  # as pandas has them with a gap
    pq.write_table(pa.table(table), tmp_path / "v.parquet")
    with pytest.raises(UserError, match="column 'n' of .* holds double, not whole numbers or text"):
        joined(tmp_path, corpus, path=str(tmp_path / "v.parquet"), **by_id)


@pytest.mark.ray
def test_a_student_of_given_vectors(sentray, tiny_recipe, tmp_path):
    """The width is another than the student's; vectors that lack a sentence make nothing."""
    tiny_recipe()
    sentences = (tmp_path / "sentences.txt").read_text().splitlines()
    vectors = np.random.default_rng(0).normal(size=(len(sentences), 24)).astype(np.float32)
    file = tmp_path / "v.parquet"
    teacher = {"name": "given", "vectors": {"path": str(file)}}
    recipe = tiny_recipe(
        "evaluate.speed=false", setting("teachers", [teacher]),
        setting("train.objectives", {"vector_regression": {}, "similarity_regression": {}}),
        "student.head=none",
    )  # fmt: skip
    pq.write_table(pa.table({"text": sentences[1:], "vector": list(vectors[1:])}), file)
    written = write_recipe(tmp_path / "recipe.yaml", recipe)
    assert "has no vector for 1 of 300 sentences" in sentray("run", written, code=2)
    pq.write_table(pa.table({"text": sentences, "vector": list(vectors)}), file)
    assert "student after" in sentray("run", written)
    (line,) = [line for line in sentray("show", "tiny").splitlines() if "vectors:given" in line]
    shown = sentray("show", line.split()[1])
    assert "rows_left_out" in shown
