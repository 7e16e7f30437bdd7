"""Models and runs side by side: their figures, and which differences are more than chance."""

import html
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from pipeline.compare.models import evaluate_models
from pipeline.compare.tests import read_tests
from pipeline.plan.plan import make_plan
from pipeline.recipe.read import load_recipe
from pipeline.report.figures import collect
from pipeline.run.runner import finish, record_start
from pipeline.upkeep.clearing import clear, garbage
from stages.contract import EncoderLabel
from stages.encoder.model import load_for_inference
from stages.encoder.settings import EncoderSettings
from stages.errors import UserError
from stages.evaluate.sets import StsSettings, load_sts
from stages.evaluate.stage import Evaluate
from stages.files import Root
from stages.recipe import Recipe
from tests.support.command import Sentray
from tests.support.data import write_sts
from tests.support.here import make_here
from tests.support.recipes import tiny
from tests.support.tokenizers import make_cuttable


@pytest.fixture
def sts(tmp_path):
    write_sts(tmp_path / "sts.tsv")
    return tmp_path / "sts.tsv"


@pytest.fixture
def sentray(tmp_path):
    """Commands that need no cluster."""
    return Sentray(tmp_path, "none")


ON = ("--pooling", "mean", "--max-length", 48, "--on")


def silent(line):
    pass


def rows_of(text):
    """Cells by row and heading, of the first table in a text."""
    lines = text.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("---"))
    heading = lines[start - 1].split()
    found = {}
    for line in lines[start + 1 :]:
        if not line.strip():
            break
        cells = line.split()
        found[cells[0]] = dict(zip(heading, cells[1:], strict=False))
    return found


def test_differences_are_those_of_a_paired_bootstrap(tmp_path, sts, teacher_folder, student_folder):
    """Slow twin: the same pairs drawn for both models, Spearman of each, their difference."""
    tests = read_tests([str(sts)], 48)
    models = [str(teacher_folder), str(student_folder)]
    results = evaluate_models(models, tests, str(tmp_path / "runs"), silent, "mean")
    pairs = load_sts(StsSettings(name="sts", path=str(sts)))
    cosines = []
    for model in models:
        encoder = load_for_inference(EncoderSettings(model=model, pooling="mean", max_length=48))
        left, right = map(encoder.encode_unit, (pairs.sentence1, pairs.sentence2))
        cosines.append((left * right).sum(1))
    random, apart = np.random.default_rng(0), []
    for _ in range(1000):
        rows = random.integers(0, len(pairs.gold), len(pairs.gold))
        first, second = (100 * spearmanr(x[rows], pairs.gold[rows]).statistic for x in cosines)
        apart.append(second - first)
    (row,) = results.differences
    (difference,) = row.figures
    assert row.encoder.name == str(student_folder)
    values = [100 * spearmanr(x, pairs.gold).statistic for x in cosines]
    assert difference.value == pytest.approx(values[1] - values[0], abs=0.02)
    # the last digits of cosines depend on how batches are cut
    assert difference.interval == pytest.approx(tuple(np.percentile(apart, [2.5, 97.5])), abs=0.1)


def test_what_was_measured_is_found_again(tmp_path, sts, teacher_folder, monkeypatch):
    tests, storage = read_tests([str(sts)], 48), str(tmp_path / "runs")
    once = evaluate_models([str(teacher_folder)], tests, storage, silent, "mean")
    monkeypatch.setattr(Evaluate, "load", lambda *_: pytest.fail("it is there already"))
    again = evaluate_models([str(teacher_folder)], tests, storage, silent, "mean")
    assert again.measurements == once.measurements


def test_a_removal_meanwhile_leaves_what_is_being_measured(
    tmp_path, sts, teacher_folder, student_folder, monkeypatch
):
    """No run names it, so `sentray gc` takes it once nobody is at work."""
    tests, storage = read_tests([str(sts)], 48), str(tmp_path / "runs")
    Root(storage).write("history/mine/20260101T000000000000/run.json", b"{}")
    load, said = Evaluate.load, []

    def load_beside_gc(stage, work):
        said.append(clear(storage, [], delete=True))
        return load(stage, work)

    monkeypatch.setattr(Evaluate, "load", load_beside_gc)
    models = [str(teacher_folder), str(student_folder)]
    results = evaluate_models(models, tests, storage, silent, "mean")
    assert [one.startswith("nothing can go") for one in said] == [True, True]
    assert [label.name for label in results.encoders] == models
    left = {one.path.partition("/")[0] for one in garbage(storage)[1]}
    assert left == {"evaluate"} and not Root(storage).list("work/compared")


def test_an_artifact_of_another_row_has_this_rows_name(tmp_path, sts, teacher_folder):
    """Equal encoders share artifacts, whatever a recipe calls them."""
    tests, storage = read_tests([str(sts)], 48), str(tmp_path / "runs")
    evaluate_models([str(teacher_folder)], tests, storage, silent, "mean")
    (tmp_path / "other").symlink_to(teacher_folder)
    other = str(tmp_path / "other")
    results = evaluate_models([other], tests, storage, silent, "mean")
    assert [label.name for label in results.encoders] == [other]


@pytest.mark.parametrize(
    ("header", "kind"),
    [
        ("sentence1\tsentence2\tscore", "sts"),
        ("sentence1\tsentence2\tlabel", "pairs"),
        ("query\tcandidate\tlabel", "reranking"),
        ("text\tlabel\tsplit", "transfer"),
    ],
)
def test_tables_are_told_by_their_columns(tmp_path, header, kind):
    (tmp_path / "some.tsv").write_text(f"{header}\n" + "\t".join("abc"[: header.count("\t") + 1]))
    (found,) = getattr(read_tests([str(tmp_path / "some.tsv")]), kind)
    assert (found.name, found.path) == ("some", str(tmp_path / "some.tsv"))


@pytest.mark.parametrize("kind", ["classification", "clustering", "transfer"])
def test_a_table_may_be_named_with_its_kind(tmp_path, kind):
    """Its columns are those of all three."""
    with pytest.raises(UserError, match=f"--on {kind}:: name a table after the colon"):
        read_tests([f"{kind}:"])
    (tmp_path / "some.tsv").write_text("text\tlabel\tsplit\na\tb\ttest\n")
    (found,) = getattr(read_tests([f"{kind}:{tmp_path / 'some.tsv'}"]), kind)
    assert (found.name, found.path) == ("some", str(tmp_path / "some.tsv"))


@pytest.fixture(scope="module")
def storage(tmp_path_factory, teacher_folder, student_folder):
    """Finished runs `one`, `other` (another seed), `apart`, which has another test, and two that
    test on what they hold out, of `one`'s sentences and of others."""
    folder = tmp_path_factory.mktemp("compared")
    raw = tiny(folder, teacher_folder, student_folder)
    raw["evaluate"]["speed"] = False
    other_sts = folder / "other.tsv"
    other_sts.write_text((folder / "sts.tsv").read_text() + "odd\t5.0\ta cat\ta cat\ttest\n")
    apart = {**raw["evaluate"], "sts": [{"name": "made-up", "path": str(other_sts)}]}
    held = {"sentences": raw["sentences"] | {"holdout": 30}}
    text = Path(raw["sentences"]["path"]).read_text().splitlines()
    (folder / "others.txt").write_text("\n".join(reversed(text)) + "\n")
    others = {"sentences": held["sentences"] | {"path": str(folder / "others.txt")}}
    cuttable = str(make_cuttable(folder / "cuttable", "WordPiece"))
    white = {"name": "white", "model": str(teacher_folder), "pooling": "mean", "whitening": 4}
    for name, changes in [
        ("held", held),
        (
            "cut",
            {
                "student": raw["student"] | {"model": cuttable, "vocabulary": {"min_count": 1}},
                "evaluate": raw["evaluate"] | {"baselines": [white]},
            },
        ),
        ("held-too", held | {"train": raw["train"] | {"seed": 7}}),
        ("held-others", others),
        ("one", {}),
        ("other", {"train": raw["train"] | {"seed": 7}}),
        ("apart", {"evaluate": apart}),
    ]:
        recipe = Recipe.model_validate(raw | {"name": name} | changes)
        plan = make_plan(recipe)
        record = record_start(plan)
        make_here(recipe)
        finish(plan, record)
    return folder / "runs"


def test_runs_are_compared_on_the_tests_that_they_share(storage, sentray, tmp_path):
    told = sentray("compare", "one", "other", "one:t", "one:before", "--storage", storage,
                   "--json", tmp_path / "found.json")  # fmt: skip
    rows = rows_of(told)
    assert {"one", "other", "one:t", "one:before"} <= set(rows)
    recipe = json.loads((storage / "history").joinpath(
        *sorted(p.relative_to(storage / "history") for p in storage.glob("history/one/*"))[0].parts,
        "results.json",
    ).read_text())  # fmt: skip
    value = {
        one["encoder"]["role"]: figure["value"]
        for one in recipe["measurements"]
        for figure in one["figures"]
        if figure["name"] == "made-up"
    }
    assert rows["one"]["made-up"].strip("*") == f"{value['after']:.2f}"
    assert rows["one:t"]["made-up"].strip("*") == f"{value['teacher']:.2f}"
    found = json.loads((tmp_path / "found.json").read_text())
    assert {one["encoder"]["name"] for one in found["differences"]} == {
        "other", "one:t", "one:before"
    }  # fmt: skip


def test_a_test_is_the_same_whether_a_variable_names_its_settings_or_not(
    storage, sentray, monkeypatch
):
    monkeypatch.setenv("SET", "made-up")
    monkeypatch.setattr("pipeline.recipe.document.FILLED_IN", {})  # else hidden ever after
    (file,) = storage.glob("history/one/*/recipe.yaml")
    changes = ["name=varied", "train.seed=8", "evaluate.sts.0.name=${SET}"]
    recipe = load_recipe(file, changes)
    plan = make_plan(recipe)
    record = record_start(plan)
    make_here(recipe)
    finish(plan, record)
    told = rows_of(sentray("compare", "one", "varied", "--storage", storage))
    assert "made-up" in told["one"] and "made-up" in told["varied"]


def test_models_side_by_side_are_drawn(sentray, sts, teacher_folder, student_folder, tmp_path):
    """Table, differences, similarities by gold score, and all models' places in one picture."""
    (tmp_path / "tests.yaml").write_text(
        f"evaluate:\n  sts: [{{name: tiny, path: {sts}}}]\n"
        f"  geometry: {{name: tiny, path: {sts}, positives_above: 0.5}}\n"
    )
    told = sentray("evaluate", teacher_folder, student_folder, *ON, tmp_path / "tests.yaml",
                   "--page", tmp_path / "page.html")  # fmt: skip
    page = (tmp_path / "page.html").read_text()
    below = told[told.index("less ") :].splitlines()[2:4]
    assert all(html.escape(line) in page for line in below)
    for heading in ("Side by side", "Similarities by gold score", "Alignment and uniformity"):
        assert f"<h2>{heading}</h2>" in page
    picture = page[page.index("<h2>Alignment and uniformity</h2>") :]
    assert all(str(folder) in picture for folder in (teacher_folder, student_folder))
    assert "<script" not in page and not re.search(r'(src|href)="(?!#)', page)


def test_agreement_is_shared_only_on_the_same_held_out_sentences(storage, sentray):
    """As many others are other items: no figure of theirs is the same test's."""
    same = sentray("compare", "held", "held-too", "--storage", storage)
    others = sentray("compare", "held", "held-others", "--storage", storage)
    assert "agreement" in rows_of(same)["held"] and "Left out" not in same
    assert "agreement" not in rows_of(others)["held"]
    left_out = next(line for line in others.splitlines() if line.startswith("Left out"))
    assert "agreement" in left_out and "near pairs" in left_out


def test_parts_of_an_encoder_are_no_test_data(storage, sentray):
    """A student whose vocabulary is cut, and vectors that are whitened with the corpus."""
    told = sentray("compare", "cut", "cut:before", "cut:white", "one", "--storage", storage)
    assert all("made-up" in rows_of(told)[name] for name in ("cut", "cut:before", "cut:white"))


def test_marks_stand_where_the_interval_is_without_0(storage, sentray):
    told = sentray("compare", "one", "one:t", "--storage", storage, "--json", storage / "x.json")
    found = json.loads((storage / "x.json").read_text())["differences"][0]["figures"][0]
    low, high = found["interval"]
    assert rows_of(told)["one:t"]["made-up"].endswith("*") == (low > 0 or high < 0)


def test_a_runs_own_table_is_marked_and_kept(storage):
    plan = make_plan(load(storage, "one"))
    record = sorted((storage / "history" / "one").iterdir())[-1]
    kept = json.loads((record / "results.json").read_text())
    assert {one["encoder"]["role"] for one in kept["differences"]} == {"before", "teacher"}
    assert collect(plan).reference == EncoderLabel("after", "after")


def load(storage, name):
    from pipeline.recipe.read import load_recipe

    record = sorted((storage / "history" / name).iterdir())[-1]
    return load_recipe(str(record / "recipe.yaml"))


def test_any_models_are_compared_on_tests(sentray, sts, teacher_folder, student_folder):
    models = teacher_folder, student_folder
    assert sentray("compare", *models, *ON, sts) == sentray("evaluate", *models, *ON, sts)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["one"], "name two runs at least"),
        (["one", "one"], "there twice"),
        (
            ["one", "nobody"],
            "is no finished run of 'nobody' (recipes run here: apart, cut, held",
        ),
        (["one", "other:nobody"], "that run has no row 'nobody'; it has before, t"),
        (["one", "apart"], "they share no test with equal settings"),
        (["one", "other", "--pooling", "cls"], "are for models on tests; add --on"),
        (["one", "other", "--max-length", "0"], "are for models on tests; add --on"),
    ],
)
def test_runs_that_cannot_be_compared(storage, sentray, names, message):
    assert message in sentray("compare", *names, "--storage", storage, code=2)


def test_a_run_of_an_older_version_is_refused(storage, sentray):
    record = sorted((storage / "history" / "other").iterdir())[-1] / "results.json"
    whole = record.read_text()
    raw = json.loads(whole)
    del raw["sources"]
    record.write_text(json.dumps(raw))
    try:
        told = sentray("compare", "one", "other", "--storage", storage, code=2)
    finally:
        record.write_text(whole)
    assert "run it again" in told


@pytest.mark.parametrize(
    ("on", "message"),
    [
        (["nothing.tsv"], "there is no file"),
        (["clustering:nothing.tsv"], "there is no file"),
        (["colouring:nothing.tsv"], "there is no file"),
        (["other.tsv"], "its columns are a, b, which is no test by itself"),
        (["header.tsv"], "there are no rows in it"),
        (["rows.json"], "write it as .jsonl"),
        (["empty.yaml"], "there are no tests that need no recipe"),
        (["typo.yaml"], "did you mean 'sts'?"),
        (["one.yaml", "two.yaml"], "one YAML file at most"),
        (["broken.yaml"], "not valid YAML"),
        (["sts.tsv", "again/sts.tsv"], "two sets are called 'sts'"),
        (["list.yaml"], "`evaluate` must hold lists of tests by kind"),
        (["mapping.yaml", "sts.tsv"], "sts: "),
        (["untested.yaml"], "the recipe has no section `evaluate`, so no tests"),
    ],
)
def test_what_cannot_be_tested(sentray, sts, tmp_path, teacher_folder, on, message, monkeypatch):
    (tmp_path / "other.tsv").write_text("a\tb\n1\t2\n")
    (tmp_path / "header.tsv").write_text("sentence1\tsentence2\tscore\n")
    (tmp_path / "rows.json").write_text('[{"text": "a", "label": 1}]')
    (tmp_path / "empty.yaml").write_text("evaluate: {speed: false}\n")
    (tmp_path / "typo.yaml").write_text("evaluate:\n  stss: []\n")
    (tmp_path / "broken.yaml").write_text("evaluate: [\n")
    (tmp_path / "list.yaml").write_text("evaluate: [sts]\n")
    (tmp_path / "mapping.yaml").write_text("evaluate: {sts: {a: 1}}\n")
    (tmp_path / "untested.yaml").write_text("student: {model: m}\n")
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "sts.tsv").write_text(sts.read_text())
    paths = [f"{kind}{colon}{tmp_path / one}" for kind, colon, one in (
        one.rpartition(":") for one in on)]  # fmt: skip
    told = sentray("evaluate", teacher_folder, "--pooling", "mean", "--on", *paths, code=2)
    assert message in told and "Traceback" not in told


def test_a_file_that_cannot_be_written_is_said_first(
    sentray, sts, tmp_path, teacher_folder, monkeypatch
):
    monkeypatch.setattr(Evaluate, "load", lambda *_: pytest.fail("it was computed"))
    content = sts.read_text()
    for option in ("--json", "--page"):
        told = sentray("evaluate", teacher_folder, *ON, sts, option, "/nowhere/x.html", code=2)
        assert f"{option} /nowhere/x.html: cannot be written" in told
    told = sentray("evaluate", teacher_folder, *ON, sts, "--storage", "/proc/nothing",
                   "--page", tmp_path / "page.html", code=2)  # fmt: skip
    assert "storage '/proc/nothing': cannot be read or written" in told
    assert not (tmp_path / "page.html").exists()
    (tmp_path / "link").symlink_to(tmp_path / "x")
    for other in (sts, tmp_path / "x", tmp_path / "link"):
        told = sentray("evaluate", teacher_folder, *ON, f"sts:{sts}", "--json", tmp_path / "link",
                       "--page", other, code=2)  # fmt: skip
        assert f"--page {other}: this file is named twice" in told
    assert sts.read_text() == content and not (tmp_path / "x").exists()
    assert (tmp_path / "link").is_symlink()


def test_a_pipe_can_be_written(sentray, sts, teacher_folder, tmp_path):
    """As /dev/stdout before a `|`: it has no name that could be opened."""
    reading, writing = os.pipe()
    with open(reading) as found:
        sentray("evaluate", teacher_folder, *ON, sts, "--json", f"/dev/fd/{writing}",
                "--storage", tmp_path / "runs")  # fmt: skip
        os.close(writing)
        assert json.load(found)["measurements"]


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (["./nobody"], "nobody"),
        (["BARE"], "it does not say how to pool; set --pooling"),
        (["recipe:my.yaml"], "run that recipe, then name it"),
        (["TEACHER", "TEACHER"], "there twice"),
    ],
)
def test_models_that_are_not_there(sentray, sts, teacher_folder, models, message):
    pooling = [] if models == ["BARE"] else ["--pooling", "mean"]
    models = [str(teacher_folder) if one.isupper() else one for one in models]
    told = sentray("evaluate", *models, *pooling, "--on", sts, code=2)
    assert message in told and "Traceback" not in told


def test_what_needs_a_recipe_is_left_out_and_named(tmp_path, sts, teacher_folder):
    """Other baselines have their rows."""
    (tmp_path / "w.txt").write_text("a 1 0\ncat 0 1\nis 1 1\nthe 1 -1\n")
    (tmp_path / "tests.yaml").write_text(
        "evaluate:\n  retrieval: {num_pairs: 5}\n  baselines:\n"
        f"  - {{name: words, words: {tmp_path}/w.txt}}\n"
        f"  - {{name: cls, model: {teacher_folder}, pooling: cls}}\n"
        f"  - {{name: white, model: {teacher_folder}, pooling: mean, whitening: 4}}\n"
        "  - {name: other, model: 'recipe:other.yaml'}\n"
        f"  sts: [{{name: own, path: {sts}}}]\n"
    )
    tests, said = read_tests([str(tmp_path / "tests.yaml")], 48), []
    results = evaluate_models([str(teacher_folder)], tests, str(tmp_path), said.append, "mean")
    assert said[0] == "left out, as they need a recipe: retrieval, baseline white, baseline other"
    assert set(results.columns) == {"layers", "MB", "own"}
    own = {label.name: results.figures(label)["own"].value for label in results.encoders}
    assert {*own} == {str(teacher_folder), "words", "cls"} and len({*own.values()}) == 3
    assert {one.encoder.name for one in results.differences} == {"words", "cls"}


def test_a_runs_student_is_found_by_its_name(storage, sentray, sts):
    alone = sentray("evaluate", "one", *ON, sts, "--storage", storage)
    compared = sentray("compare", "one", "other", "--storage", storage)
    assert rows_of(alone)["one"]["sts"] == rows_of(compared)["one"]["made-up"].strip("*")


def test_differences_are_only_of_figures_with_equal_items(tmp_path, sts, teacher_folder):
    tests = read_tests([str(sts)], 48)
    results = evaluate_models([str(teacher_folder)], tests, str(tmp_path), silent, "mean")
    assert results.differences == []
