"""Input files as people's programs leave them, or worse: read, or refused in one message.

`python -m tests.hostile.test_files` counts the cases.
"""

import copy
import gzip
import itertools
import json
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from pipeline.plan.plan import make_plan
from pipeline.run.runner import check_nodes
from stages.errors import UserError
from stages.plain import UNPRINTABLE, for_people
from stages.recipe import Recipe
from tests.hostile.subjects import limited
from tests.support.here import make_here
from tests.support.recipes import tiny

# The test tries one of so many cases
SHARE = 8
# What reads files, and the columns that it wants
COLUMNS = {
    "sentences": ["text"],
    "sts": ["sentence1", "sentence2", "score"],
    "pairs": ["sentence1", "sentence2", "label"],
    "transfer": ["text", "label", "split"],
    "classification": ["text", "label", "split"],
    "clustering": ["text", "label"],
    "reranking": ["query", "candidate", "label"],
    "rewrites": ["sentence1", "sentence2"],
    "queries": ["_id", "text"],
    "documents": ["_id", "text"],
    "relevance": ["query-id", "corpus-id", "score"],
    "vectors": ["text", "vector"],
    "words": ["word"],
}
CELLS = {
    "text": "A cat sat on the old mat today.", "split": "test", "query": "q", "candidate": "c",
    "sentence1": "A cat sat here for long.", "sentence2": "The cat was sitting.", "word": "cat",
}  # fmt: skip


def text_files(columns):
    """Names and contents of tables in text."""
    good = [CELLS.get(column, "1") for column in columns]
    head, row = ("\t".join(cells) + "\n" for cells in (columns, good))
    tables = {
        "nothing": "", "header": head, "no line end": head[:-1], "blank lines": "\n\n\n",
        "a short row": head + good[0] + "\n", "a long row": head + row[:-1] + "\tmore\tmore\n",
        "null bytes": head + row.replace("cat", "c\0t"), "zeros": "\0" * 1000,
        "a mark of order": "\ufeff" + head + row, "carriage returns": head[:-1] + "\r" + row[:-1],
        "columns twice": head[:-1] + "\t" + head + row[:-1] + "\t" + row,
        "a line of 3 MB": head + row[:-1] + "x" * (3 << 20) + "\n", "one row": head + row,
        "rows alike": head + row * 30, "empty cells": head + "\t" * (len(columns) - 1) + "\n",
    }  # fmt: skip
    for what in ("nan", "1e999", "-1", "9" * 6000):
        tables[f"only {what[:9]}"] = head + "\t".join([what] * len(columns)) + "\n"
    yield from ((f"{name}.tsv", text.encode()) for name, text in tables.items())
    yield "binary.tsv", bytes(range(256)) * 10
    yield "latin-1.tsv", (head + row + "\xe9\n").encode("latin-1")
    yield "utf-16.tsv", (head + row).encode("utf-16")
    yield "a surrogate.tsv", (head + row).encode() + b"\xed\xa0\x80\n"
    yield "no gzip.tsv.gz", b"not gzip"
    yield "cut gzip.tsv.gz", gzip.compress((head + row * 1000).encode())[:-20]
    names = ",".join(columns) + "\n"
    yield "an open quote.csv", (names + '"unclosed,').encode()
    yield "null bytes.csv", (names + "a\0b," * 3 + "\n").encode()
    yield "a large cell.csv", (names + "x" * 200_000 + ",a\n").encode()
    yield "nothing.csv", b""


def json_files(columns):
    cells = {column: CELLS.get(column, "1") for column in columns}
    lines = {
        "deep": "[" * 100_000, "a number": "1", "a list": "[1]", "null": "null", "text": '"a"',
        "half": '{"a": ', "no columns": "{}", "binary": "\0\1", "nothing": "",
        "6,000 digits": f'{{"{columns[0]}": {"9" * 6000}}}', "NaN": f'{{"{columns[0]}": NaN}}',
        "deep cell": f'{{"{columns[0]}": {"[" * 50_000 + "]" * 50_000}}}',
        "a surrogate": json.dumps(cells).replace("cat", "\\ud800"),
        "a null byte": json.dumps(cells).replace("cat", "\\u0000"),
        "a row without columns": json.dumps(cells) + "\n{}", "one row": json.dumps(cells),
    }  # fmt: skip
    for name, cell in {
        "lists": ["a"],
        "objects": {},
        "nulls": None,
        "truth": True,
        "1.5": 1.5,
    }.items():
        lines[name] = json.dumps(dict.fromkeys(columns, cell))
    return ((f"{name}.jsonl", f"{text}\n".encode()) for name, text in lines.items())


def parquet_files(columns):
    values = {
        "numbers": pa.array([1, 2]), "nulls": pa.array([None, None], pa.string()),
        "nothing but null": pa.nulls(2), "lists": pa.array([["a"], ["b"]]),
        "bytes": pa.array([b"\xff\xfe", b"a"]), "no rows": pa.array([], pa.string()),
        "no UTF-8": pa.array([b"\xff\xfe", b"a"]).view(pa.string()),
    }  # fmt: skip
    for name, array in values.items():
        yield f"{name}.parquet", in_parquet(dict.fromkeys(columns, array))
    yield "other columns.parquet", in_parquet({"a": [1, 2]})
    whole = in_parquet({column: [CELLS.get(column, "1")] * 9 for column in columns})
    yield "cut.parquet", whole[: len(whole) // 2]
    yield "flipped bits.parquet", whole[:20] + bytes(b ^ 255 for b in whole[20:60]) + whole[60:]
    yield "no Parquet.parquet", b"PAR1nonsense"
    yield "nothing.parquet", b""
    yield "cut.npy", b"\x93NUMPY\x01\0nonsense"


def in_parquet(columns):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue().to_pybytes()


def hostile_files(columns):
    return itertools.chain(text_files(columns), json_files(columns), parquet_files(columns))


def reading(raw, kind, file, folder):
    """A recipe that reads the file, and the beginning of the node's name that does."""
    raw = copy.deepcopy(raw) | {"storage": str(folder / "runs" / f"{kind}-{file.name}")}
    test = {"name": "x", "path": str(file)}
    node = f"evaluate:before:{kind}-x"
    if kind == "sentences":
        raw["sentences"], node = {"path": str(file)}, "sentences"
    elif kind == "rewrites":
        raw["perturb"], node = [{"name": "p", "pairs": {"path": str(file)}}], "perturb:p"
    elif kind == "vectors":
        raw["teachers"], node = [{"name": "t", "vectors": {"path": str(file)}}], "vectors:t"
    elif kind == "words":
        raw["evaluate"]["baselines"] = [{"name": "w", "words": str(file)}]
        node = "evaluate:w:made-up"
    elif kind in ("queries", "documents", "relevance"):
        files = {}
        for other in ("queries", "documents", "relevance"):
            files[other] = str(folder / f"{other}.tsv")
            cells = [CELLS.get(column, "1") for column in COLUMNS[other]]
            Path(files[other]).write_text("\t".join(COLUMNS[other]) + "\n" + "\t".join(cells))
        raw["evaluate"]["corpora"] = [{"name": "x", **files, kind: str(file)}]
        node = "evaluate:before:retrieval-x"
    else:
        raw["evaluate"][kind] = [test]
        node = "evaluate:before:x" if kind in ("sts", "transfer") else node
    return raw, node


def outcome(raw, kind, file, folder):
    """Whether the file is read ("" then), else the message; anything else is raised."""
    raw, node = reading(raw, kind, file, folder)
    with limited():
        try:
            recipe = Recipe.model_validate(raw)
            check_nodes(make_plan(recipe).graph.values())
            assert node in make_here(recipe, node)
        except (UserError, ValidationError) as error:
            return str(error)
    return ""


def check(raw, kind, name, data, folder):
    file = folder / kind / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(data)
    message = outcome(raw, kind, file, folder)
    told = for_people(message)
    assert len(told) < 3100 and not UNPRINTABLE.search(told)
    return message


@pytest.mark.parametrize("kind", COLUMNS)
def test_a_file_is_read_or_refused_in_one_message(tmp_path, teacher_folder, student_folder, kind):
    raw = tiny(tmp_path, teacher_folder, student_folder)
    for name, data in list(hostile_files(COLUMNS[kind]))[::SHARE]:
        try:
            check(raw, kind, name, data, tmp_path)
        except Exception as error:
            raise AssertionError(f"{kind}: {name}") from error


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        ("sts", "deep.jsonl", "nested too deep"),
        ("sts", "lists.jsonl", "score is ['a'], which is not a number"),
        ("sts", "columns twice.tsv", "the column 'sentence1' is there twice"),
        ("sts", "latin-1.tsv", "not UTF-8"),
        ("sentences", "columns twice.tsv", "the column 'text' is there twice"),
        ("sentences", "6,000 digits.jsonl", "line 1: not JSON"),
        ("queries", "a surrogate.jsonl", "row 1: 'text' is 'A \\ud800 sat"),
        ("documents", "lists.parquet", "row 1: '_id' is ['a'], neither a text nor a number"),
        ("clustering", "bytes.parquet", "neither a text nor a number"),
        ("classification", "flipped bits.parquet", "cannot be read"),
        ("words", "binary.tsv", "not a UTF-8 text file of words and numbers"),
        ("words", "only nan.tsv", "line 1: not a word and its numbers"),
    ],
)
def test_the_message_says_what_is_wrong(
    tmp_path, teacher_folder, student_folder, kind, name, expected
):
    raw = tiny(tmp_path, teacher_folder, student_folder)
    message = check(raw, kind, name, dict(hostile_files(COLUMNS[kind]))[name], tmp_path)
    assert expected in message
    assert kind == "sentences" or name in message or "for 'x'" in message


@pytest.mark.parametrize("line", ["1\t2\t3", ""])
def test_short_lines_of_senteval(tmp_path, teacher_folder, student_folder, line):
    raw = tiny(tmp_path, teacher_folder, student_folder)
    for name in ("sts-test.csv", "SICK_test_annotated.txt", "msr_paraphrase_test.txt"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_text(f"head\n{line}\n")
        kind = "transfer" if name.startswith("msr") else "sts"
        raw["evaluate"][kind] = [{"name": "x", "path": str(folder)}]
        with pytest.raises(UserError, match=f"{name}, line [12]: there are fewer than"):
            check_nodes(make_plan(Recipe.model_validate(raw)).graph.values())
        raw["evaluate"][kind] = []


if __name__ == "__main__":
    import tempfile

    from tests.support.models import make_model

    here = Path(tempfile.mkdtemp())
    base = tiny(here, make_model(here / "teacher"), make_model(here / "student"))
    counts = Counter(
        "refused" if check(base, kind, name, data, here) else "read"
        for kind, columns in COLUMNS.items()
        for name, data in hostile_files(columns)
    )
    print(f"{sum(counts.values())} files: {dict(counts)}")
