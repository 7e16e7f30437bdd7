"""What is seen of a text: kinds, columns, counts, lengths; and what is no text."""

import gzip
import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.new import text as text_module
from pipeline.new.text import find_source, look
from stages.errors import UserError
from tests.support.models import make_sentences

SENTENCES = make_sentences(120)


def tsv(folder):
    rows = [f"{n}\t{'short'}\t{one}" for n, one in enumerate(SENTENCES)]
    return folder / "t.tsv", "\n".join(["id\ttag\twords", *rows]) + "\n"


def csv(folder):
    rows = [f'{n},short,"{one}"' for n, one in enumerate(SENTENCES)]
    return folder / "t.csv", "\n".join(["id,tag,words", *rows]) + "\n"


def jsonl(folder):
    rows = [{"id": n, "tag": "short", "words": one} for n, one in enumerate(SENTENCES)]
    return folder / "t.jsonl", "\n".join(map(json.dumps, rows)) + "\n"


@pytest.mark.parametrize("make", [tsv, csv, jsonl])
def test_of_a_tables_columns_the_longest_is_proposed(tmp_path, make):
    file, content = make(tmp_path)
    file.write_text(content)
    source = find_source(str(file), {})
    assert source.chosen["--column"] == "words" and "tag" in source.columns
    found = look(source)
    assert found.num_sentences == 120 and set(found.sample) == set(SENTENCES)
    file = file.rename(tmp_path / f"T{file.suffix.upper()}")
    assert find_source(str(file), {}) == replace(source, path=str(file))


def test_a_folder_of_several_kinds_is_refused(tmp_path):
    (tmp_path / "README.md").write_text("About it.")
    (tmp_path / "faq.csv").write_text("text\nA question.\n")
    with pytest.raises(UserError, match=r"README.md is read as text and faq.csv as csv"):
        find_source(str(tmp_path), {})


def test_parquet_and_usual_names(tmp_path):
    table = {"text": SENTENCES, "longer": [one * 3 for one in SENTENCES], "n": [*range(120)]}
    table["text"] = pa.array(table["text"]).dictionary_encode()  # pandas' category
    pq.write_table(pa.table(table), tmp_path / "t.parquet")
    source = find_source(str(tmp_path / "t.parquet"), {})
    assert source.chosen["--column"] == "text" and source.columns == ("text", "longer")
    assert look(source).num_sentences == 120


def test_queries_and_documents_are_read_whole_and_some_pairs_are_held_out(tmp_path):
    documents = [f"{n} {' '.join(SENTENCES[:20])}" for n in range(300)]
    rows = [{"title": f"t {n}", "body": documents[n % 300]} for n in range(400)]
    # most are documents without a query, whose cell may be left out
    rows += [{"body": f"{n} {documents[0]}"} for n in range(500)]
    pair = {"--query": "title", "--document": "body"}

    def found(number, chosen=pair):
        (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows[:number])))
        return look(find_source(str(tmp_path / "t.jsonl"), chosen))

    most = found(900)
    # a tenth of the 300 pairs with a body that no earlier one has
    assert (most.num_records, most.num_held_out, most.split) == (900, 30, False)
    # 400 titles, those of three letters too, and 800 bodies; without both sides of 30 pairs
    assert most.num_sentences == pytest.approx(1200 - 60, abs=10)
    assert {len(text) < 6 for text in most.sample} == {True, False}
    assert (found(200).num_held_out, found(199).num_held_out) == (20, 0)
    column = found(900, {"--column": "body"})
    assert column.num_held_out == 0 and column.split


def test_lines_are_counted_without_copies_and_without_what_is_too_short(tmp_path):
    lines = [*SENTENCES, *SENTENCES, "", "  ", *["No."] * 40]
    with gzip.open(tmp_path / "t.txt.gz", "wt") as file:
        file.write("\n".join(lines) + "\n")
    found = look(find_source(str(tmp_path / "t.txt.gz"), {}))
    assert found.num_records == len(lines)
    assert found.num_sentences == 120
    low, high = found.middle_chars
    assert min(map(len, SENTENCES)) <= low < high <= max(map(len, SENTENCES))


def test_long_texts_are_cut_into_sentences(tmp_path):
    documents = [" ".join(SENTENCES[n : n + 20]) for n in range(0, 120, 20)]
    (tmp_path / "t.txt").write_text("\n".join(documents) + "\n")
    found = look(find_source(str(tmp_path / "t.txt"), {}))
    assert found.split and found.num_records == 6
    assert found.num_sentences == pytest.approx(120, abs=6)  # "a." may end none
    assert max(map(len, found.sample)) < 100


def test_paragraphs_that_a_student_reads_whole_stay_whole(tmp_path):
    paragraphs = ["".join(f"{one} " for one in SENTENCES[n : n + 10])[:480] for n in range(110)]
    (tmp_path / "t.txt").write_text("\n".join(paragraphs) + "\n")
    found = look(find_source(str(tmp_path / "t.txt"), {}))
    assert not found.split and found.middle_chars[0] > 300


def test_an_unknown_suffix_is_read_as_lines(tmp_path):
    (tmp_path / "chat.log").write_text("\n".join(SENTENCES))
    source = find_source(str(tmp_path / "chat.log"), {})
    assert (source.kind, source.told) == ("text", False)
    assert look(source).num_sentences == 120


def test_a_few_broken_lines_are_counted_and_many_are_another_encoding(tmp_path):
    lines = [one.encode() for one in SENTENCES]
    (tmp_path / "few.txt").write_bytes(b"\n".join([*lines, b"caf\xe9 in the house near the sea"]))
    assert look(find_source(str(tmp_path / "few.txt"), {})).num_invalid == 1
    (tmp_path / "many.txt").write_bytes(b"\n".join(b"caf\xe9 " + line for line in lines))
    with pytest.raises(UserError, match="120 of 120 lines are not UTF-8.*iconv"):
        look(find_source(str(tmp_path / "many.txt"), {}))


def test_beyond_a_bound_nothing_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(text_module, "MOST_RECORDS", 100)
    monkeypatch.setattr(text_module, "HASHED", 50)
    monkeypatch.setattr(text_module, "SAMPLE", 20)
    (tmp_path / "t.txt").write_text("\n".join(SENTENCES))
    found = look(find_source(str(tmp_path / "t.txt"), {}))
    assert not found.complete and found.num_sentences == 100 and len(found.sample) == 20
    monkeypatch.setattr(text_module, "SAMPLE", 2000)
    short = [f"n. {number}" for number in range(50)]  # whatever comes first in the file
    (tmp_path / "t.txt").write_text("\n".join([*short, *SENTENCES]))
    assert look(find_source(str(tmp_path / "t.txt"), {})).num_sentences == 50


BAD = {
    "nothing there": (None, "there is no file or folder"),
    "empty": (b"", "is empty"),
    "zeros": (b"ELF\0\0\1 some words", "a binary file, or text in UTF-16"),
    "UTF-16": ("A sentence here.\n".encode("utf-16"), "text in UTF-16"),
    "blank lines": (b"\n \n\n", "no sentence of 10 to 1,000 characters"),
    "words": (b"one\ntwo\nthree\n", "no sentence of 10 to 1,000 characters"),
    "one line": (
        b"A sentence here. " * (1 << 16),
        r"\(1 records; 1 are lines of over 1 MiB: break",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_text_is_refused(tmp_path, case):
    content, expected = BAD[case]
    if content is not None:
        (tmp_path / "t.txt").write_bytes(content)
    with pytest.raises(UserError, match=expected):
        look(find_source(str(tmp_path / "t.txt"), {}))


def test_a_folder_of_which_not_all_suffixes_are_known(tmp_path):
    """What is read is what the recipe then says: all of them as the first."""
    (tmp_path / "a.txt").write_text("A sentence of the first file.\n")
    (tmp_path / "b.md").write_text("A sentence of the second one.\n")
    source = find_source(str(tmp_path), {})
    assert (source.kind, source.told, look(source).num_sentences) == ("text", False, 2)


def test_a_column_that_begins_with_nothing_is_known(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"n": 1, "text": null}\n{"n": 2, "text": "Some words."}\n')
    assert find_source(str(tmp_path / "t.jsonl"), {}).chosen["--column"] == "text"
    named = {"--column": "text"}
    assert find_source(str(tmp_path / "t.jsonl"), named).chosen == named
    # nor need it be there at first
    pairs = [{"title": "How so?"}, *({"title": f"t {n}", "body": SENTENCES[n]} for n in range(9))]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    chosen = {"--query": "title", "--document": "body"}
    assert look(find_source(str(tmp_path / "t.jsonl"), chosen)).num_records == 10


def test_a_missing_column_is_met_with_the_nearest(tmp_path):
    file, content = tsv(tmp_path)
    file.write_text(content)
    with pytest.raises(UserError, match="did you mean 'words'.*id, tag, words"):
        find_source(str(file), {"--column": "wrods"})
    (tmp_path / "t.txt").write_text("\n".join(SENTENCES))
    with pytest.raises(UserError, match="plain text, which has no columns"):
        find_source(str(tmp_path / "t.txt"), {"--column": "words"})


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("t.json", b'[{"text": "Some words here."}]', "named? .jsonl|ends in .jsonl"),
        ("t.ndjson", b'{"text": "Some words here."}\n', "ends in .jsonl"),
        ("t.log", b'{"text": "Some words here."}\n', "ends in .jsonl"),
        ("t.csv", b"id;text\n1;Some words here.\n", "parted by ';', not by commas"),
        ("t.parquet", b"PAR1 not really", "not a readable Parquet file"),
        ("t.jsonl", b"not json\n", "line 1: not JSON"),
        ("t.jsonl", b'{"n": 1}\n', "no column in it holds text"),
        ("t.txt.gz", b"not gzip at all", "cannot be read"),
    ],
)
def test_broken_files_are_refused(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=expected):
        find_source(str(tmp_path / name), {})


def test_documents_that_are_too_long_are_refused_or_told(tmp_path):
    pair = {"--query": "title", "--document": "body"}

    def found(bodies):
        rows = [{"title": f"title {n}", "body": body} for n, body in enumerate(bodies)]
        (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return look(find_source(str(tmp_path / "t.jsonl"), pair))

    with pytest.raises(UserError, match=r"characters in column 'body' \(40 are longer\)"):
        found(["x" * 5000] * 40)
    some = found([f"{n} {'x' * (5000 if n % 4 else 50)}" for n in range(40)])
    assert some.too_long == {"title": 0.0, "body": 0.75}


def test_a_key_that_holds_no_text_later_on_is_no_column_of_text(tmp_path):
    rows = [{"question": "Is it?", "votes": None}, {"question": "It is.", "votes": 3}]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert find_source(str(tmp_path / "t.jsonl"), {}).chosen == {"--column": "question"}
    # nor one that comes later, and is both
    rows = [{"content": f"{n} It is so."} for n in range(9)]
    rows[1]["note"], rows[2]["note"] = "see below", 5
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert find_source(str(tmp_path / "t.jsonl"), {}).columns == ("content",)
    # but what began as text and is none later on is said, with its place
    rows = [{"title": "A", "text": "It is so."}, {"title": "B", "text": 2020}]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(UserError, match="line 2: column 'text' holds int"):
        look(find_source(str(tmp_path / "t.jsonl"), {}))
    (tmp_path / "t.jsonl").write_text('{"text": "It is so."}\n{"other": "It is."}\n')
    with pytest.raises(UserError, match="line 2: .* no column 'text'.* Say in --column, or"):
        look(find_source(str(tmp_path / "t.jsonl"), {}))


def test_names_of_columns_are_read_as_the_rows_are(tmp_path):
    rows = "".join(f"{n},x,{text}\n" for n, text in enumerate(SENTENCES))
    (tmp_path / "t.csv").write_text(f'id,"long\nname",text\n{rows}')
    source = find_source(str(tmp_path / "t.csv"), {})
    assert source.columns == ("id", "long\nname", "text")
    assert look(source).num_records == 120
    (tmp_path / "t.csv").write_text(f'"id" ,x,text\n{rows}')
    with pytest.raises(UserError, match="line 1: cannot be read .* right before a comma"):
        find_source(str(tmp_path / "t.csv"), {})
