"""`sentray new` and then `sentray run` of what it wrote, on the cluster of the tests."""

import json
import re
from pathlib import Path

from pipeline.recipe.read import load_recipe
from tests.support.models import make_sentences


def test_a_text_becomes_a_student(sentray, teacher_folder):
    folder = sentray.folder
    rows = [{"body": one, "number": n} for n, one in enumerate(make_sentences(300))]
    (folder / "mail.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["mail.jsonl", "--teacher", teacher_folder, "--layers", "1", "--minutes", "20"]
    said = sentray("new", *words)
    assert "sentray run mail.yaml" in said
    out = sentray("run", "mail.yaml")
    assert "student after" in out and "Next: " in out
    steps = load_recipe(str(folder / "mail.yaml")).train.max_steps
    # however soon after another line it is said
    assert re.search(rf"step {steps:,}/{steps:,}  .*agreement with its teachers \d", out)
    (metrics,) = Path(folder / "runs").glob("train/*/files/*/metrics/metrics.jsonl")
    assert json.loads(metrics.read_text().splitlines()[-1])["step"] == steps
    line = next(line for line in out.splitlines() if line.startswith("Next: "))
    # the same line wherever the run is shown
    assert line in sentray("show", "mail") and line in sentray("run", "mail.yaml")
    (record,) = (folder / "runs" / "history" / "mail").iterdir()
    assert json.loads((record / "results.json").read_text())["advice"] == line
    assert line.partition(":")[2][:40] in (record / "report.html").read_text()
    # it is about this run: a model card does not have it
    assert "Next: " not in (folder / "runs" / "students" / "mail" / "README.md").read_text()
