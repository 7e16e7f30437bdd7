"""The sentences stage: cleaning, exact de-duplication, order, rejects, bad input."""

import ast
import gc
import gzip
import io
import json
import lzma
import unicodedata
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stages.sentences.build
from stages.errors import UserError
from stages.sentences.build import build_sentences
from stages.sentences.cleaning import clean_text
from stages.sentences.python_docs import prose_paragraphs, statements
from stages.sentences.settings import SentencesSettings
from stages.sentences.sources import text_columns
from tests.support.models import make_sentences


def build(**options):
    shards, files = {}, {}
    stats = build_sentences(
        SentencesSettings(**options),
        lambda number, data, rows: shards.update({number: (data["rows.parquet"], rows)}),
        lambda name, data: files.update({name: data}),
    )
    texts = []
    for number in sorted(shards):
        table = pq.read_table(io.BytesIO(shards[number][0]))
        assert table.num_rows == shards[number][1]
        assert table["id"].to_pylist() == list(range(len(texts), len(texts) + table.num_rows))
        texts += table["text"].to_pylist()
    return texts, stats, files


def test_each_kind_of_file_gives_the_same_sentences(tmp_path):
    sentences = make_sentences(50)
    rows = [{"text": sentence, "other": 1} for sentence in sentences]
    lines = "\n".join(sentences) + "\n"
    (tmp_path / "a.txt").write_text(lines)
    with gzip.open(tmp_path / "a.txt.gz", "wt") as file:
        file.write(lines)
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "a.csv").write_text("other,text\n" + "".join(f'1,"{s}"\n' for s in sentences))
    (tmp_path / "a.tsv").write_text("other\ttext\n" + "".join(f"1\t{s}\n" for s in sentences))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    expected = build(path=str(tmp_path / "a.txt"))[0]
    assert sorted(expected) == sorted(sentences)
    views = pa.table({"text": pa.array(sentences, pa.string_view())})
    pq.write_table(views, tmp_path / "a.PARQUET")
    assert text_columns(tmp_path / "a.PARQUET", "parquet") == ["text"]
    for suffix in ("txt.gz", "jsonl", "csv", "tsv", "parquet", "PARQUET"):
        assert build(path=str(tmp_path / f"a.{suffix}"))[0] == expected, suffix


def test_a_folder_is_read_with_its_folders_but_not_hidden_ones(tmp_path):
    """As it is told apart: what is read is what counts. Spark leaves empty marks."""
    sentences = make_sentences(30)
    for number, name in enumerate(["b.txt", "a/part.txt", "a/deep/part.txt"]):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("\n".join(sentences[10 * number : 10 * number + 10]) + "\n")
    for name in (".cache/part.txt", "a/.part.txt", "a/_temporary/part.txt", "_SUCCESS"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if name == "_SUCCESS" else "A sentence nobody wants.\n")
    assert sorted(build(path=str(tmp_path))[0]) == sorted(sentences)
    settings = SentencesSettings(path=str(tmp_path))
    files = settings.identity("sentences")["path"]["files"]
    assert [*files] == ["a/deep/part.txt", "a/part.txt", "b.txt"]
    # nor is what runs store there
    for name in ("runs/history/my/run.txt", "runs/leases/lease.txt", "runs/made.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("A sentence nobody wants.\n")
    assert sorted(build(path=str(tmp_path))[0]) == sorted(sentences)
    assert settings.identity("sentences")["path"]["files"] == files


def test_linked_folders_are_read_each_folder_once(tmp_path):
    """Also where a link leads to a folder above it, or two lead to each other's."""
    sentences = make_sentences(40)
    for number, name in enumerate(["texts/a.txt", "far/b.txt", "far/c/d.txt", "other/e.txt"]):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("\n".join(sentences[10 * number : 10 * number + 10]) + "\n")
    for link, to in (("texts/far", "far"), ("far/up", "texts"), ("far/other", "other"),
                     ("other/far", "far"), ("texts/z", "far/c")):  # fmt: skip
        (tmp_path / link).symlink_to(tmp_path / to)
    settings = SentencesSettings(path=str(tmp_path / "texts"))
    files = [*settings.identity("sentences")["path"]["files"]]
    assert files == ["a.txt", "far/b.txt", "far/c/d.txt", "far/other/e.txt"]
    assert sorted(build(path=str(tmp_path / "texts"))[0]) == sorted(sentences)
    # a link to what is there anyway changes nothing
    (tmp_path / "other/latest").symlink_to(tmp_path / "other/part")
    (tmp_path / "other/part").mkdir()
    (tmp_path / "other/part/f.txt").write_text("One more sentence of a part.\n")
    (tmp_path / "other/far").unlink()
    found = SentencesSettings(path=str(tmp_path / "other")).identity("sentences")["path"]["files"]
    assert [*found] == ["e.txt", "part/f.txt"]


def test_a_local_hugging_face_folder_is_a_source(tmp_path):
    (tmp_path / "train.jsonl").write_text(
        "\n".join(json.dumps({"text": s}) for s in make_sentences(20))
    )
    assert len(build(dataset=str(tmp_path))[0]) == 20


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("train.jsonl", b'{"text": "a good line"}\n{"te'),
        ("train.csv", b"text\na good line\none,more,cells\n"),
        ("train.txt", b"a good line\n\xff\xfe\n"),
        ("train.jsonl.gz", gzip.compress(b'{"text": "a good line"}\n' * 99)[:-20]),
        ("train.jsonl.xz", lzma.compress(b'{"text": "a good line"}\n' * 999)[:-40]),
    ],
)
def test_a_damaged_hugging_face_folder_is_one_clear_message(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=r"data set '.*': cannot be read \("):
        build(dataset=str(tmp_path))


def test_a_data_set_that_a_script_makes_is_refused(tmp_path):
    folder = tmp_path / "scripted"
    folder.mkdir()
    (folder / "scripted.py").write_text("import datasets\n")
    with pytest.raises(UserError, match=r"data set '.*': cannot be read \(Dataset scripts are no"):
        build(dataset=str(folder))


def test_one_configuration_of_a_data_set(tmp_path):
    """Without a name all are told."""
    configs = [f"- config_name: {name}\n  data_files: {name}.jsonl" for name in "ab"]
    (tmp_path / "README.md").write_text("---\nconfigs:\n" + "\n".join(configs) + "\n---\n")
    for name in "ab":
        rows = [json.dumps({"text": f"Of {name}, {text}"}) for text in make_sentences(10)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    assert {s[:5] for s in build(dataset=str(tmp_path), dataset_config="b")[0]} == {"Of b,"}
    with pytest.raises(UserError, match=r"Config name is missing.*\['a', 'b'\]"):
        build(dataset=str(tmp_path))


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("Cafe\u200b\u0301", "Caf\u00e9"),
        ("page\x0cnext\x85line\x1fend", "page next line end"),
        ("a\x00b\ufeff \u200b c", "ab c"),
    ],
)
def test_a_text_is_clean_once_it_has_been_cleaned(text, clean):
    assert clean_text(text, "NFC") == clean == clean_text(clean, "NFC")


def test_a_cell_that_a_broken_line_left_open_is_said_with_its_cause(tmp_path):
    data = b'text\nA first one.\n"A cell of\ntwo lines, caf\xe9"\n"A third one."\n'
    (tmp_path / "a.csv").write_bytes(data)
    with pytest.raises(UserError, match=r"line 5: .* also in lines that were left out \(inv"):
        build(path=str(tmp_path / "a.csv"), invalid_utf8="reject")


def test_tsv_is_read_without_quoting(tmp_path):
    """Nor does a carriage return end a line, but before a line feed."""
    lines = b'text\r\n"An open quote, never closed\nA second sentence\r\nA third\rone of two\n'
    (tmp_path / "a.tsv").write_bytes(lines)
    found = build(path=str(tmp_path / "a.tsv"))[0]
    assert len(found) == 3 and "A third one of two" in found


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text("abc \t\u00e9e\u0301", min_size=1), min_size=1), st.integers(0, 5))
def test_result_is_the_set_of_clean_texts_whatever_their_order(tmp_path_factory, texts, seed):
    folder = tmp_path_factory.mktemp("texts")
    lines = [text.replace("\n", " ").replace("\r", " ") for text in texts]
    (folder / "a.txt").write_text("\n".join(lines) + "\n")
    (folder / "b.txt").write_text("\n".join(reversed(lines)) + "\n")
    cleaned = {clean_text(line, "NFC") for line in lines} - {""}
    options = dict(min_chars=1, seed=seed, rows_per_shard=3)
    if not cleaned:
        with pytest.raises(UserError, match="nothing is left"):
            build(path=str(folder / "a.txt"), **options)
        return
    first, stats, _ = build(path=str(folder / "a.txt"), **options)
    assert set(first) == cleaned
    assert len(first) == len(cleaned)
    assert stats["read"] == stats["kept"] + sum(stats["rejected"].values())
    assert build(path=str(folder / "b.txt"), **options)[0] == first


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbftext\nA sentence from a spreadsheet.\n")
    assert build(path=str(tmp_path / "a.csv"))[0] == ["A sentence from a spreadsheet."]


def test_spilling_to_disk_changes_nothing(tmp_path, monkeypatch):
    sentences = make_sentences(500)
    (tmp_path / "a.txt").write_text("\n".join(sentences * 3) + "\n")
    expected = build(path=str(tmp_path / "a.txt"))
    monkeypatch.setattr(stages.sentences.build, "MEMORY_BYTES", 10_000)
    assert build(path=str(tmp_path / "a.txt")) == expected
    assert expected[1]["rejected"] == {"duplicate": 1000}


def test_limit_is_a_sample_and_seed_changes_the_order(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(make_sentences(200)) + "\n")
    whole = build(path=str(tmp_path / "a.txt"))[0]
    sample, stats, _ = build(path=str(tmp_path / "a.txt"), limit=50)
    assert sample == whole[:50]
    assert stats["rejected"] == {"over_limit": 150}
    other = build(path=str(tmp_path / "a.txt"), seed=1)[0]
    assert other != whole
    assert sorted(other) == sorted(whole)


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_a_blank_line_of_a_table_is_no_row(tmp_path, suffix):
    """Vectors beside the file have no row for it."""
    comma = "," if suffix == "csv" else "\t"
    rows = "".join(f"Sentence number {n}.{comma}{n}\n\n" for n in range(4))
    (tmp_path / f"a.{suffix}").write_text(f"\ntext{comma}n\n{rows}\n")
    texts, stats, _ = build(path=str(tmp_path / f"a.{suffix}"))
    assert len(texts) == stats["read"] == 4 and not stats["rejected"]
    # between cells of the only column it is an empty one
    rows = "".join(f"Sentence number {n}.\n\n" for n in range(4))
    (tmp_path / f"a.{suffix}").write_text(f"text\n{rows}\n")
    texts, stats, _ = build(path=str(tmp_path / f"a.{suffix}"))
    assert len(texts) == 4 and stats["read"] == 7 and stats["rejected"] == {"missing_cell": 3}


def test_what_is_dropped_is_counted_and_kept_with_its_reason(tmp_path):
    good = "A good sentence of decent length."
    lines = [good, good, "short", "x" * 2000, "   ", "y" * (3 << 20), "caf\u00e9 " * 4]
    data = "\n".join(lines).encode() + b"\n\xff\xfe broken\n"
    (tmp_path / "a.txt").write_bytes(data)
    texts, stats, files = build(path=str(tmp_path / "a.txt"), invalid_utf8="reject")
    assert sorted(texts) == sorted([good, ("caf\u00e9 " * 4).strip()])
    assert stats["rejected"] == dict(
        duplicate=1, too_short=1, too_long=1, blank=1, line_over_1_mib=1, invalid_utf8=1
    )
    kept = pq.read_table(io.BytesIO(files["rejects.parquet"])).to_pylist()
    assert {"reason": "too_short", "text": "short"} in kept
    assert len(kept) == 6


def test_a_byte_order_mark_makes_no_long_line_short(tmp_path):
    (tmp_path / "a.txt").write_bytes(
        b"\xef\xbb\xbf" + b"x" * ((1 << 20) + 500) + b"\nA good one.\n"
    )
    texts, stats, _ = build(path=str(tmp_path / "a.txt"), max_chars=1000)
    assert texts == ["A good one."] and stats["rejected"] == {"line_over_1_mib": 1}


def test_a_row_with_more_cells_than_names_is_dropped_not_cut(tmp_path):
    """A comma in a text without quotes: half a sentence must not be taken for a whole one."""
    rows = [
        "An unquoted sentence, which was cut here",
        "A sentence that ends in a comma,",
        '"A, b, c"',
    ]
    (tmp_path / "a.csv").write_text("text\n" + "\n".join(rows) + "\n")
    (tmp_path / "b.tsv").write_text("text\tpart\nOne, two\ttrain\t\nCut\there\ttrain\n")
    texts, stats, files = build(path=str(tmp_path), min_chars=1)
    assert sorted(texts) == ["A sentence that ends in a comma", "A, b, c", "One, two"]
    assert stats["rejected"] == {"extra_cell": 2}
    kept = pq.read_table(io.BytesIO(files["rejects.parquet"])).to_pylist()
    assert kept == [{"reason": "extra_cell", "text": x} for x in (rows[0], "Cut\there\ttrain")]


def test_texts_are_split_into_sentences(tmp_path):
    (tmp_path / "a.txt").write_text("Dr. Smith reads a book. The cat sleeps under a tree!\n")
    texts, _, _ = build(path=str(tmp_path / "a.txt"), split_sentences=True)
    assert sorted(texts) == ["Dr. Smith reads a book.", "The cat sleeps under a tree!"]


def test_first_sentences_are_held_out_with_the_rest_of_their_texts(tmp_path):
    shared = "Every text ends with this sentence."
    several = [f"This is text {n}. It goes on with {n}. {shared}" for n in range(30)]
    single = [f"A text of one sentence, number {n}." for n in range(20)]
    (tmp_path / "a.txt").write_text("\n".join([*several, *single]) + "\n")
    split = dict(path=str(tmp_path / "a.txt"), split_sentences=True)
    texts, _, files = build(**split, holdout_pairs=7)
    held = pq.read_table(io.BytesIO(files["holdout.parquet"])).to_pylist()
    assert len(held) == 7
    assert {f"{one['query']} {one['document']}" for one in held} <= set(several)
    gone = {piece for one in held for piece in (one["query"], one["document"].split(". ")[0] + ".")}
    assert len(gone) == 14 and not (gone | {shared}) & set(texts)
    # the other texts' sentences, and those that are alone
    assert len(texts) == 2 * 23 + 20
    (tmp_path / "b.txt").write_text("\n".join([*single, *several[::-1]]) + "\n")
    split["path"] = str(tmp_path / "b.txt")
    assert build(**split, holdout_pairs=7)[0] == texts
    with pytest.raises(UserError, match="only 30 texts of several sentences that share no"):
        build(**split, holdout_pairs=31)


def test_held_out_documentation_never_reaches_the_training_text():
    texts, _, files = build(
        source="python-docs", packages=["numpy"], split_sentences=True, holdout_pairs=200
    )
    pairs = pq.read_table(io.BytesIO(files["holdout.parquet"])).to_pylist()
    assert len({pair["summary"] for pair in pairs}) == 200
    held = {pair[part] for pair in pairs for part in ("summary", "description")}
    assert not held.intersection(texts)
    assert len(texts) > 1000


@pytest.mark.parametrize("split", [False, True])
def test_held_out_documentation_is_known_in_another_unicode_form(tmp_path, monkeypatch, split):
    function = 'def f{}():\n    """The M\u00f6bius function of order {}.\n\n    {}\n    """\n'
    described = "It is M\u00f6bius again, in words that say what is done here."
    code = "".join(function.format(n, n, f"{described} Number {n} of all.") for n in range(20))
    for name, form in (("a", "NFC"), ("b", "NFD")):
        (tmp_path / f"{name}.py").write_text(unicodedata.normalize(form, code))
    files = [tmp_path / "a.py", tmp_path / "b.py"]
    monkeypatch.setattr("stages.sentences.python_docs.package_files", lambda names: {"p": files})
    texts, _, found = build(source="python-docs", split_sentences=split, holdout_pairs=10)
    pairs = pq.read_table(io.BytesIO(found["holdout.parquet"])).to_pylist()
    assert len(pairs) == 10 and texts
    held = {pair[part] for pair in pairs for part in ("summary", "description")}
    assert not {unicodedata.normalize("NFC", text) for text in held} & {*texts}


def test_a_file_that_is_no_python_is_passed_over(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text('{{ template }}\n"""Some words that nobody reads."""\n')
    (tmp_path / "b.py").write_text('"""Some words that everybody can read here."""\n')
    files = [tmp_path / name for name in ("a.py", "b.py", "b.py")]  # two might undo each other
    monkeypatch.setattr("stages.sentences.python_docs.package_files", lambda names: {"p": files})
    texts, _, _ = build(source="python-docs")
    assert texts == ["Some words that everybody can read here."]
    assert gc.isenabled()  # it is off while a file is parsed


def test_statements_are_those_of_the_whole_tree():
    """In its order, as the first of two functions with the same summary is the one held out."""
    kinds = ast.stmt | ast.ExceptHandler | ast.match_case
    for number, file in enumerate([ast.__file__, gzip.__file__, json.__file__, __file__]):
        tree = ast.parse(Path(file).read_text() + NESTED * (number % 2))
        assert list(statements(tree))[1:] == [n for n in ast.walk(tree) if isinstance(n, kinds)]


NESTED = """
async def one():
    while True:
        async with one as two:
            try:
                match two:
                    case 1:
                        class Deep: pass
            except* OSError:
                def deep(): return lambda: [x for x in ()] if two else 1
            else:
                def deep(): pass
            finally:
                def deep(): pass
    else:
        def late(): pass
"""


def test_prose_is_told_from_code_and_fields():
    text = """Return the mean of :class:`Array` values, using ``float64``.

    The mean is computed along an axis and is always returned as a number.

        indented_code(here)

    >>> mean([1])

    Parameters
    ----------
    a : array
        This describes a parameter and is not prose about the function.
    """
    import inspect

    assert prose_paragraphs(inspect.cleandoc(text)) == [
        "Return the mean of Array values, using float64.",
        "The mean is computed along an axis and is always returned as a number.",
    ]


def damaged_gzip(folder):
    whole = gzip.compress("\n".join(make_sentences(500)).encode())
    (folder / "in.txt.gz").write_bytes(whole[: len(whole) // 2])
    return "in.txt.gz"


def dangling_link(folder):
    (folder / "inner").mkdir()
    (folder / "inner" / "part.txt").symlink_to("gone.txt")
    return "inner"


def parquet_with_two_of_a_name(folder):
    both = pa.table([["x"], ["y"]], names=["text", "text"])
    pq.write_table(both, folder / "in.parquet")
    return "in.parquet"


def parquet_without_column(folder):
    pq.write_table(pa.table({"body": ["x"]}), folder / "in.parquet")
    return "in.parquet"


def file_with(name, data):
    def write(folder):
        (folder / name).write_bytes(data)
        return name

    return write


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda folder: "missing.txt", "there is no file or folder"),
        (file_with("in.txt", b""), "is empty"),
        (dangling_link, "leads nowhere"),
        (file_with("in.txt", b"  \n\n \n"), "nothing is left of 3 texts (3 blank)"),
        (file_with("in.txt", b"x" * (10 << 20)), "1 line_over_1_mib"),
        (file_with("in.txt", b"good line here\n\xff\xfe\n"), "line 2: not valid UTF-8"),
        (file_with("in.jsonl", b'{"text": "a good line"}\n{"te'), "line 2: not JSON"),
        (file_with("in.jsonl", b'{"body": "a good line"}\n'), "no column 'text'; it has body"),
        (file_with("in.jsonl", b'{"text": 3}\n'), "holds int, not text"),
        (file_with("in.csv", b"body\nx\n"), "no column 'text'"),
        # it would be the first of one long cell
        (
            file_with("in.csv", b'text\nA sentence.\n"An open quote\n' + b"A sentence.\n" * 9),
            "line 12: cannot be read (unexpected end of data); a cell that begins with a quotation",
        ),
        (file_with("in.csv", b'text\n"He said "hi" there."\n'), "line 2: cannot be read"),
        (file_with("in.parquet", b"not parquet"), "not a readable Parquet file"),
        (file_with("in.docx", b"x"), "suffix '.docx' is not known"),
        (file_with("in.tsv", b"text\ttext\nx\ty\n"), "the column 'text' is there twice"),
        (parquet_with_two_of_a_name, "the column 'text' is there twice"),
        (parquet_without_column, "no column 'text'; it has body"),
        (damaged_gzip, "damaged or cut off"),
        (file_with("in.txt.gz", b"plain text\n"), "damaged or cut off"),
    ],
)
def test_bad_input_is_one_clear_message(tmp_path, make, expected):
    name = make(tmp_path)
    with pytest.raises(UserError) as caught:
        build(path=str(tmp_path / name))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
