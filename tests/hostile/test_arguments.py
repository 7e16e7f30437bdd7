"""Arguments of the command line that no file, model or setting can be called.

`python -m tests.hostile.test_arguments` counts the cases.
"""

import contextlib
import io
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from pipeline.cli import main
from stages.plain import UNPRINTABLE
from tests.hostile.subjects import limited
from tests.support import REPOSITORY
from tests.support.pipelines import make_pipeline, pooling
from tests.support.recipes import tiny, write_recipe

WORDS = [
    "a\0b", "\ud800", "\x1b[31m", "", "  ", "~nobody-here/x", "x" * 5000, "../../..", "s3://",
    "s3://key:secret@bucket/x", "file://x", "-1", "/dev/zero", "/dev/null", "*", "a/b/c", "10**9",
    "package:", "recipe:",
]  # fmt: skip
# WORD is what is tried, RECIPE a recipe that nobody has run, HERE an empty folder
COMMANDS = [
    "plan WORD", "run WORD", "tune WORD", "show WORD", "show x --storage WORD",
    "similarity WORD a b", "encode WORD texts.txt HERE/v.npy", "encode no-model WORD HERE/v.npy",
    "compare x WORD",
    "compare x --storage WORD", "evaluate WORD --on no.tsv", "evaluate no-model --on WORD",
    "new WORD --yes --out HERE/new.yaml", "pull WORD --to HERE/pulled",
    "submit RECIPE --cluster WORD", "jobs list --cluster WORD", "doctor --cluster WORD",
    "manifest RECIPE --cluster WORD --for kuberay", "plan RECIPE --set WORD",
    "plan RECIPE --set storage=WORD", "plan RECIPE --set name=WORD",
    "plan RECIPE --set evaluate.sts.0.path=WORD", "run RECIPE --only WORD",
    "run RECIPE --from WORD", "run RECIPE --force WORD", "run RECIPE --only train --pools WORD",
]  # fmt: skip


def check(command, word, recipe, folder):
    """The exit code; 2 comes with one message that can be printed, and 0 is a plan."""
    known = {"WORD": word, "RECIPE": recipe, "HERE": str(folder)}
    arguments = []
    for part in command.split():
        for name, value in known.items():
            part = part.replace(name, value)
        arguments.append(part)
    out, error = io.StringIO(), io.StringIO()
    with limited(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            code = main(arguments)
        except SystemExit as end:  # argparse's own
            return end.code
    told = error.getvalue()
    assert code == 2 or (code == 0 and arguments[0] == "plan"), arguments
    assert len(told) < 3200 and not UNPRINTABLE.search(told) and "Traceback" not in told
    assert told.startswith("sentray: ") if code else not told
    assert "secret" not in told
    return code


@pytest.mark.parametrize("command", COMMANDS)
def test_an_argument_is_refused_in_one_message(
    tmp_path, teacher_folder, student_folder, monkeypatch, command
):
    recipe = write_recipe(tmp_path / "r.yaml", tiny(tmp_path, teacher_folder, student_folder))
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    codes = {check(command, word, recipe, folder) for word in WORDS}
    assert 2 in codes
    assert not list(folder.iterdir())


def test_vectors_are_written_over_no_text(tmp_path, student_folder, capsys):
    text = tmp_path / "a.txt"
    text.write_text("A sentence.\n")
    assert main(["encode", str(student_folder), str(text), str(text)]) == 2
    assert "vectors are written as .npy" in capsys.readouterr().err
    assert text.read_text() == "A sentence.\n"


def test_standard_input_is_utf_8_whatever_the_locale(tmp_path):
    """With a byte order mark or without, as a file is."""
    model, out = make_pipeline(tmp_path / "model", pooling("mean")), tmp_path / "vectors.npy"
    marked = tmp_path / "marked.txt"
    marked.write_text("the dog sees Bär.\n", encoding="utf-8-sig")
    (tmp_path / "plain.txt").write_text("the dog sees Bär.\n", encoding="utf-8")
    for given, code in ((b"A cat.\n\xff\xfe bird\n", 2), (marked.read_bytes(), 0)):
        process = subprocess.run(
            [sys.executable, "-m", "pipeline.cli", "encode", model, "-", out],
            input=given, capture_output=True, env=os.environ | {"LC_ALL": "POSIX"}, cwd=REPOSITORY,
        )  # fmt: skip
        assert process.returncode == code
        assert (b"-: not a UTF-8 text file" in process.stderr) == (code == 2)
        assert b"Traceback" not in process.stderr
    found = [np.load(out)]
    for name in ("marked.txt", "plain.txt"):
        assert main(["encode", str(model), str(tmp_path / name), str(out)]) == 0
        found.append(np.load(out))
    np.testing.assert_array_equal(found[:2], [found[2]] * 2)


if __name__ == "__main__":
    import tempfile

    from tests.support.models import make_model

    here = Path(tempfile.mkdtemp())
    raw = tiny(here, make_model(here / "teacher"), make_model(here / "student"))
    file = write_recipe(here / "r.yaml", raw)
    os.chdir(tempfile.mkdtemp())
    counts = Counter(check(c, word, file, Path.cwd()) for c in COMMANDS for word in WORDS)
    print(f"{sum(counts.values())} commands: {counts[2]} refused, {counts[0]} planned")
