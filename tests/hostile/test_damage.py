"""What is stored and was damaged, or was written by another version: one message, exit code 2."""

import json

import pytest

from pipeline.cli import main
from pipeline.plan.plan import make_plan
from pipeline.run.runner import finish, record_start
from stages.plain import UNPRINTABLE
from stages.recipe import Recipe
from tests.support.here import make_here
from tests.support.recipes import tiny, write_recipe


def changed(**fields):
    return lambda data: json.dumps(json.loads(data) | fields).encode()


def without(name):
    return lambda data: json.dumps(
        {k: v for k, v in json.loads(data).items() if k != name}
    ).encode()


DAMAGES = {
    "empty": lambda data: b"",
    "half of it": lambda data: data[: len(data) // 2],
    "a list": lambda data: b"[]",
    "a number": lambda data: b"1",
    "null": lambda data: b"null",
    "nothing in it": lambda data: b"{}",
    "binary": lambda data: bytes(range(256)),
    "no UTF-8": lambda data: data.replace(b"e", b"\xe9"),
    "deep": lambda data: b"[" * 100_000,
    "a long number": lambda data: b'{"a": ' + b"9" * 5000 + b"}",
    "of other types": lambda data: json.dumps({key: [] for key in json.loads(data)}).encode(),
    "of other types still": lambda data: json.dumps(dict.fromkeys(json.loads(data), 7)).encode(),
}
OF_MANIFESTS = {
    "a field of the future": changed(colour="green"),
    "no fingerprint": without("fingerprint"),
    "shards of text": changed(shards="abc"),
    "rows of text": changed(shards={"number": [0], "num_rows": ["many"], "files": {}}),
    "a record's rows of text": changed(shards=[{"number": 0, "num_rows": "many", "files": {}}]),
    "a shard without rows": changed(shards={"number": [0, 1], "num_rows": [8], "files": {}}),
    "files of the future": changed(
        files={"a": {"path": "a", "sha256": "", "num_bytes": 1, "x": 1}}
    ),
    "seconds of text": changed(seconds="long"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, teacher_folder, student_folder):
    """A finished run: its recipe file, its storage, and files of each kind in it."""
    folder = tmp_path_factory.mktemp("damage")
    raw = tiny(folder, teacher_folder, student_folder)
    raw["evaluate"]["speed"] = False
    recipe = Recipe.model_validate(raw)
    make_here(recipe)
    plan = make_plan(recipe)
    record = record_start(plan)
    finish(plan, record)
    runs = folder / "runs"
    files = {
        "manifest": runs / plan.folders["embed:t"] / "manifest.json",
        "run": runs / record / "run.json",
        "results": runs / record / "results.json",
    }
    return write_recipe(folder / "recipe.yaml", raw), runs, files


CASES = [("manifest", name) for name in DAMAGES | OF_MANIFESTS]
CASES += [(kind, name) for kind in ("run", "results") for name in DAMAGES]
# a run of nothing, and one that measured nothing
CASES = [
    one for one in CASES if one not in {("run", "nothing in it"), ("results", "of other types")}
]


@pytest.mark.parametrize(("kind", "damage"), CASES)
def test_a_damaged_file_is_named(finished, capsys, kind, damage):
    recipe, runs, files = finished
    file = files[kind]
    whole = file.read_bytes()
    commands = [["show", "tiny", "--storage", str(runs)]]
    if kind == "manifest":
        folder = file.parent.relative_to(runs).as_posix()
        commands += [["plan", recipe], ["run", recipe], ["show", folder, "--storage", str(runs)]]
    if kind == "results":
        commands += [["compare", "tiny", "tiny:before", "--storage", str(runs)]]
    file.write_bytes((DAMAGES | OF_MANIFESTS)[damage](whole))
    try:
        for command in commands:
            capsys.readouterr()
            code = main(command)
            out, error = capsys.readouterr()
            # of a run without figures the rest is shown
            told = out.splitlines()[-1] if (kind, command[0]) == ("results", "show") else error
            assert code == (2 if told is error else 0)
            assert f"{file}: is damaged, or of another version" in told
            assert told.rstrip("\n").count("\n") == 0 and not UNPRINTABLE.search(told)
    finally:
        file.write_bytes(whole)
    assert main(["plan", recipe]) == 0


def test_a_damaged_digest_is_made_again(tmp_path, monkeypatch):
    from stages import content

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "a.txt"
    file.write_text("content")  # as small a file's is not remembered
    content.digest(file)
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(content, "REMEMBERED_BYTES", 0)
    first = content.digest(file)
    (remembered,) = (tmp_path / "cache/sentray/digests").iterdir()
    for damage in ("", "[]", "{}", "nonsense"):
        remembered.write_text(damage)
        content._digest.cache_clear()
        assert content.digest(file) == first
    remembered.unlink()
    remembered.mkdir()
    content._digest.cache_clear()
    assert content.digest(file) == first


def test_other_content_of_the_same_size_and_time_is_seen(tmp_path, monkeypatch):
    import os

    from stages import content

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(content, "REMEMBERED_BYTES", 0)
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    before, stat = content.digest(file), file.stat()
    file.write_bytes(b"two")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert content.digest(file) != before


def test_a_link_that_leads_nowhere_is_named(tmp_path):
    from stages import content
    from stages.errors import UserError

    folder = tmp_path / "texts"
    (folder / "below").mkdir(parents=True)
    (folder / "below" / "c.txt").write_text("not read")
    (folder / "a.txt").write_text("a")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "times.json").write_text("of a download, others each time")
    assert list(content.describe_path(str(folder), "transfer.path")["files"]) == ["a.txt"]
    deep = content.describe_path(str(folder), "sentences.path", deep=True)
    assert list(deep["files"]) == ["a.txt", "below/c.txt"]
    (folder / "b.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="sentences.path: the link .*b.txt leads nowhere"):
        content.describe_path(str(folder), "sentences.path")
