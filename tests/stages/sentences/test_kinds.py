"""Sentences of two kinds: pairs of a table become queries and documents; some are held out."""

import io
import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

import stages.sentences.build
from stages.errors import UserError
from stages.sentences.build import build_sentences
from stages.sentences.settings import SentencesSettings
from tests.support.kinds import make_pairs, write_pairs

COLUMNS = {"query": "title", "document": "body"}


def build(path, **options):
    """(text, kind) of every row, the counts, and the held-out pairs."""
    shards, files = {}, {}
    given = {"columns": COLUMNS, "rows_per_shard": 16} | options
    if path is not None:
        given["path"] = str(path)
    stats = build_sentences(
        SentencesSettings.model_validate(given),
        lambda number, data, rows: shards.update({number: data["rows.parquet"]}),
        lambda name, data: files.update({name: data}),
    )
    rows = []
    for number in sorted(shards):
        table = pq.read_table(io.BytesIO(shards[number]))
        assert table.column("id").to_pylist() == list(range(len(rows), len(rows) + len(table)))
        assert table.schema.field("kind").type == pa.dictionary(pa.int8(), pa.string())
        rows += zip(*(table.column(name).to_pylist() for name in ("text", "kind")), strict=True)
    held = []
    if "holdout.parquet" in files:
        held = pq.read_table(io.BytesIO(files["holdout.parquet"])).to_pylist()
    return rows, stats, [(row["query"], row["document"]) for row in held]


def kinds_of(pairs):
    return {(t, "query") for t, _ in pairs} | {(d, "document") for _, d in pairs}


def test_each_kind_of_table_gives_the_same_sentences(tmp_path):
    pairs = make_pairs(30)
    expected, stats, _ = build(write_pairs(tmp_path / "a.tsv", pairs))
    assert len(expected) == 60 and set(expected) == kinds_of(pairs)
    assert stats["kinds"] == {"query": 30, "document": 30}
    assert stats["read"] == stats["kept"] == 60
    for suffix in ("csv", "jsonl", "parquet"):
        assert build(write_pairs(tmp_path / f"a.{suffix}", pairs))[0] == expected, suffix
    (tmp_path / "set").mkdir()
    write_pairs(tmp_path / "set" / "train.jsonl", pairs)
    assert build(None, dataset=str(tmp_path / "set"))[0] == expected
    assert expected[:30] != [row for row in expected if row[1] == "query"]  # they are mixed


def test_a_text_may_be_there_as_either_kind_but_only_once_as_each(tmp_path, monkeypatch):
    same = "A text that is both of them."
    pairs = [*make_pairs(40), (same, same), (same, "Another body of some length.")]
    file = write_pairs(tmp_path / "a.tsv", pairs)
    rows, stats, _ = build(file)
    assert [row for row in rows if row[0] == same] in (
        [(same, "query"), (same, "document")], [(same, "document"), (same, "query")]
    )  # fmt: skip
    assert len(rows) == len(set(rows)) == 83
    assert stats["rejected"] == {"duplicate": 1}
    monkeypatch.setattr(stages.sentences.build, "MEMORY_BYTES", 2000)  # spills to disk
    assert build(file)[0] == rows


@pytest.mark.parametrize("suffix", ["tsv", "jsonl", "parquet"])
def test_an_empty_cell_is_a_reject_and_no_half_of_a_held_out_pair(tmp_path, suffix):
    full = make_pairs(5)
    nothing = None if suffix != "tsv" else ""
    broken = [(nothing, "A body without a title."), ("A title without a body", nothing)]
    file = write_pairs(tmp_path / f"a.{suffix}", [*full, *broken])
    rows, stats, held = build(file, holdout_pairs=3)
    assert stats["rejected"] == {"blank": 2, "held_out": 6}
    gone = kinds_of(held) | {(nothing, "query"), (nothing, "document")}
    assert set(rows) == kinds_of([*full, *broken]) - gone
    assert stats["read"] == 14 == stats["kept"] + sum(stats["rejected"].values())
    assert build(file, split_sentences=True)[1]["rejected"] == {"blank": 2}
    with pytest.raises(
        UserError, match=r"holdout_pairs is 6, .* only 5 pairs of 'title' and 'body' that"
    ):
        build(file, holdout_pairs=6)


def test_held_out_pairs_never_reach_the_corpus_and_do_not_depend_on_order(tmp_path):
    pairs = make_pairs(50)
    # titles and bodies that several rows share: each is in one held-out pair at most
    pairs += [(pairs[i][0], body) for i, (_, body) in enumerate(make_pairs(20, seed=5))]
    pairs += [(title, pairs[i][1]) for i, (title, _) in enumerate(make_pairs(20, seed=6))]
    pairs += [(pairs[0][1], "A title's text that is a body elsewhere.")]
    rows, stats, held = build(write_pairs(tmp_path / "a.tsv", pairs), holdout_pairs=55)
    assert len(held) == 55 and set(held) <= set(pairs)
    queries, documents = zip(*held, strict=True)
    assert len(set(queries)) == len(set(documents)) == 55
    assert not {text for text, _ in rows} & {*queries, *documents}
    gone = kinds_of(pairs) - set(rows)
    assert stats["rejected"]["held_out"] == len(gone) >= 110
    assert {text for text, _ in gone} == {*queries, *documents}
    random.Random(1).shuffle(pairs)
    again = build(write_pairs(tmp_path / "b.tsv", [*pairs, *pairs[:9]]), holdout_pairs=55)
    assert again[0] == rows and again[2] == held
    other = build(tmp_path / "a.tsv", holdout_pairs=55, seed=1)[2]
    assert set(other) != set(held)


def test_sentences_of_a_held_out_text_are_held_out_too(tmp_path):
    shared = "Every body ends with this sentence."
    pairs = [(f"The title number {n}", f"This is body number {n}. {shared}") for n in range(6)]
    file = write_pairs(tmp_path / "a.tsv", pairs)
    split = {"split_sentences": True, "max_chars": 40}  # of its pieces
    rows, _, held = build(file, holdout_pairs=2, **split)
    assert set(held) <= set(pairs)  # whole
    kept = {text for text, _ in rows}
    assert len(kept) == 8 and shared not in kept
    assert shared in {text for text, _ in build(file, **split)[0]}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"query": "titel", "document": "body"}, "no column 'titel'.*Did you mean 'title'"),
        ({"query": "title", "document": "xyz"}, "no column 'xyz'; it has number, title, body. Say"),
    ],
)
@pytest.mark.parametrize("suffix", ["tsv", "csv", "jsonl", "parquet"])
def test_a_column_that_is_not_there(tmp_path, suffix, columns, message):
    file = write_pairs(tmp_path / f"a.{suffix}", make_pairs(3))
    with pytest.raises(UserError, match=message):
        build(file, columns=columns)


def test_json_lines_may_leave_an_empty_cell_out(tmp_path):
    rows = [{"title": "A title alone"}, {"body": "A body alone."}]
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    found, stats, _ = build(file)
    assert set(found) == {("A title alone", "query"), ("A body alone.", "document")}
    assert stats["rejected"] == {"blank": 2}


def test_a_kind_of_which_nothing_is_left_and_a_text_without_columns(tmp_path):
    file = write_pairs(tmp_path / "a.tsv", [("A", "A body of some length.")])
    with pytest.raises(UserError, match=r"no query is left of 2 texts \(1 too_short\)"):
        build(file)
    (tmp_path / "a.txt").write_text("a line of text\n")
    with pytest.raises(UserError, match="a text file has no columns; give a table with title, bo"):
        build(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": {"query": "title"}}, "columns.document"),
        ({"columns": COLUMNS, "column": "body"}, "column and columns name the same thing"),
        ({"columns": {"query": "a", "document": "a"}}, "both are 'a'"),
        ({"columns": COLUMNS, "path": None, "source": "python-docs"}, "columns are of a table"),
        ({"holdout_pairs": 3}, "holdout_pairs is for .* that are split"),
        ({"packages": ["numpy"]}, "packages are read by source: python-docs"),
        ({"dataset_file": "b.csv"}, "are of a `dataset`"),
        ({"dataset_split": "dev"}, "are of a `dataset`"),
        ({"source": "dataset"}, "name the kind of file instead"),
    ],
)
def test_settings_that_do_not_go_together(options, message):
    with pytest.raises(ValidationError, match=message):
        SentencesSettings.model_validate({"path": "a.tsv"} | options)


def test_a_text_held_out_for_agreement_is_so_as_either_kind(tmp_path):
    questions = [f"Question number {n}, is it one?" for n in range(400)]
    pairs = [*zip(questions, reversed(questions), strict=True)]
    rows, _, _ = build(write_pairs(tmp_path / "a.tsv", pairs))
    assert len(rows) == 800
    held, trained = ({text for text, _ in part} for part in (rows[:100], rows[100:]))
    assert not held & trained


def test_no_held_out_pair_is_found_by_its_own_text_or_another_pairs(tmp_path):
    pairs = [(f"A title that is its body {n}", f"A title that is its body {n}") for n in range(30)]
    pairs += make_pairs(30)
    pairs += [(body, f"An answer to {body}") for _, body in make_pairs(30)]  # bodies that ask, too
    file = write_pairs(tmp_path / "a.tsv", pairs)
    for seed in range(5):
        held = build(file, holdout_pairs=25, seed=seed)[2]
        assert len({text for pair in held for text in pair}) == 50


def test_pairs_that_share_a_document_do_not_hide_others(tmp_path):
    common = "The one answer to every question."
    pairs = [
        (f"Question number {n}", answer)
        for n in range(200)
        for answer in (common, f"Answer number {n} of them all.")
    ]
    file = write_pairs(tmp_path / "a.tsv", pairs)
    for seed in range(3):
        assert len(build(file, holdout_pairs=150, seed=seed)[2]) == 150
