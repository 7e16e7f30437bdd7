"""What a storage root tells of its runs, its space, and what nobody needs."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from pipeline.cli import main
from pipeline.plan.plan import make_plan
from pipeline.run.log import RunLog
from pipeline.run.runner import choose, finish, record_start, run
from pipeline.store.leases import Leases, run_lease
from pipeline.store.manifest import new_manifest
from pipeline.upkeep.clearing import clear, garbage
from pipeline.upkeep.contents import key_of
from pipeline.upkeep.status import status
from stages.errors import Stopped, UserError
from stages.files import Root
from stages.recipe import Recipe
from tests.support.here import make_here
from tests.support.recipes import tiny

OLD = time.time() - 7200


@pytest.fixture
def storage(tmp_path, teacher_folder, student_folder):
    """Runs recipes that differ in name, seed and what they evaluate; `storage.root`."""

    class Storage:
        root = str(tmp_path / "runs")
        path = tmp_path / "runs"

        def run(self, name, seed=42, only=None):
            raw = tiny(tmp_path, teacher_folder, student_folder) | {"name": name}
            raw["evaluate"] |= {"speed": False}
            raw["train"] |= {"seed": seed}
            recipe = Recipe.model_validate(raw)
            record = record_start(make_plan(recipe))
            make_here(recipe, *(only or ()))
            if only is None:
                finish(make_plan(recipe), record)
            return make_plan(recipe), record

    return Storage()


def files_of(path):
    return {file.relative_to(path).as_posix() for file in path.rglob("*")}


def test_nothing_of_any_run_goes(storage):
    storage.run("one")
    storage.run("one", seed=43)
    before = files_of(storage.path)
    assert clear(storage.root, [], delete=True).startswith("nothing can go: all of ")
    assert files_of(storage.path) == before


def test_what_no_kept_run_needs_goes_and_the_rest_is_as_it_was(storage):
    old, _ = storage.run("one")
    new, _ = storage.run("one", seed=43)
    other, _ = storage.run("two", seed=44)
    shared = {key_of(f) for f in new.folders.values()}
    expected = {f for plan in (old, other) for f in plan.folders.values()}
    expected = {f for f in expected if key_of(f) not in shared}
    assert {one.path for one in garbage(storage.root, ["one"])[1]} == expected and expected
    before = files_of(storage.path)
    assert "can go, with --delete" in clear(storage.root, ["one"], delete=False)
    assert files_of(storage.path) == before
    said = clear(storage.root, ["one"], delete=True)
    assert re.search(r"removed [\d.]+ MB of [\d.]+ MB$", said)
    gone = before - files_of(storage.path)
    assert all(path.startswith((*expected, "students/")) for path in gone)
    # the recipe that was kept is whole, and its student can be loaded; the other's is gone
    assert all(one.done and not one.damage for one in make_plan(new.recipe).nodes.values())
    assert (storage.path / "students/one/model.safetensors").is_file()
    assert os.listdir(storage.path / "students") == [  # its link, and the folder that it leads to
        name for name in os.listdir(storage.path / "students") if "one" in name
    ]
    assert clear(storage.root, ["one"], delete=True).startswith("nothing can go")


def test_unfinished_work_stays_for_the_run_that_began_it(storage, tmp_path):
    plan, _ = storage.run("one", only=["embed:t"])
    wanted, orphan = plan.folders["train"], "train/other-00000000"
    for folder in (wanted, orphan, plan.folders["embed:t"]):
        (storage.path / "work" / folder).mkdir(parents=True)
        (storage.path / "work" / folder / "step-1").write_text("checkpoint")
    (storage.path / orphan / "shards").mkdir(parents=True)
    (storage.path / orphan / "shards/00000.json").write_text("{}")
    found = {one.path: one.why for one in garbage(storage.root)[1]}
    assert found == {
        orphan: "unfinished, and no run needs it",
        f"work/{orphan}": "of a run that is over",
        f"work/{plan.folders['embed:t']}": "of a run that is over",
    }


def test_what_is_being_made_stays(storage):
    plan, record = storage.run("one", only=["embed:t"])
    storage.run("two")
    orphan = "train/other-00000000"
    for folder in (f"work/{orphan}", "work/ray/x", f"{orphan}/files/0a0a0a0a"):
        (storage.path / folder).mkdir(parents=True)
        (storage.path / folder / "file").write_text("x")
    with Leases(Root(storage.root), print) as leases:
        leases.hold("train/00000000", lambda: "")
        leases.hold(run_lease(record), lambda: "")
        found = {one.path for one in garbage(storage.root, ["two"])[1]}
        assert not any(key_of(path) in map(key_of, plan.folders.values()) for path in found)
        assert not found & {orphan, f"work/{orphan}", "work/ray/x"}
    found = {one.path for one in garbage(storage.root, ["two"])[1]}
    assert found >= {orphan, f"work/{orphan}", "work/ray/x"}


def test_a_run_without_leases_is_told_by_its_log(storage):
    """As on a store that lacks conditional writes."""
    plan, record = storage.run("one", only=["embed:t"])
    storage.run("two")
    (storage.path / "work/ray/x").mkdir(parents=True)
    (storage.path / "work/ray/x/file").write_text("x")
    log = RunLog(Root(storage.root), f"{record}/log", print)
    log.add("train", "said", "step 4", {})
    log.write()
    found = {one.path for one in garbage(storage.root, ["two"])[1]}
    assert not found & {"work/ray/x", *plan.folders.values()}
    (file,) = (storage.path / record / "log").iterdir()
    os.utime(file, (OLD, OLD))
    assert "work/ray/x" in {one.path for one in garbage(storage.root, ["two"])[1]}


def test_what_a_run_begins_to_need_meanwhile_stays(storage, monkeypatch):
    """A run that starts between the look and the removal."""
    from pipeline.upkeep import clearing

    old, _ = storage.run("one")
    storage.run("one", seed=43)
    looks, look = [], clearing.garbage

    def and_then_it_runs(*arguments):
        found = look(*arguments)
        if not looks:
            record = record_start(old)
            looks.append(Leases(Root(storage.root), print))
            looks[0].hold(run_lease(record), lambda: "")
        return found

    monkeypatch.setattr(clearing, "garbage", and_then_it_runs)
    clear(storage.root, ["one"], delete=True)
    assert all(one.done for one in make_plan(old.recipe).nodes.values())


def test_torn_files_go_when_they_are_old(storage):
    storage.run("one", only=["embed:t"])
    for name, age in (("embed/.tmp-old", OLD), ("embed/.tmp-new", time.time())):
        (storage.path / name).write_text("x")
        os.utime(storage.path / name, (age, age))
    assert [one.path for one in garbage(storage.root)[1]] == ["embed/.tmp-old"]


def test_trainings_of_searches_and_what_they_read_stay(storage):
    plan, _ = storage.run("one")
    trial = {"folder": plan.folders["train"], "status": "finished"}
    storage.run("two", seed=44)
    search = storage.path / "tune/found"
    search.mkdir(parents=True)
    (search / "trials.jsonl").write_text(json.dumps(trial) + '\n{"torn')
    # what the trial measured, which outlives its weights
    result = f"trial/found-{plan.folders['train'][-8:]}"
    (storage.path / result).mkdir(parents=True)
    manifest = (storage.path / plan.folders["train"] / "manifest.json").read_text()
    (storage.path / result / "manifest.json").write_text(manifest)
    kept = {one.path for one in garbage(storage.root, ["two", "found"])[1]}
    assert not kept & {plan.folders[name] for name in ("train", "embed:t", "tokens", "sentences")}
    assert plan.folders["export"] in kept
    # of a search alone: its training, and what that was made of
    kept = {one.path for one in garbage(storage.root, ["found"])[1]}
    folders = {name: plan.folders[name] for name in ("train", "embed:t", "tokens", "sentences")}
    assert not kept & {*folders.values(), result}
    assert result not in {one.path for one in garbage(storage.root)[1]}
    assert {plan.folders[name] for name in plan.folders if name.startswith("eval")} <= kept
    assert plan.folders["train"] in {one.path for one in garbage(storage.root, ["two"])[1]}


def test_what_nobody_needs_is_not_made_again(storage):
    plan, _ = storage.run("one")
    for name in ("embed:t", "tokens"):
        plan.store.remove(plan.folders[name])
    plan = make_plan(plan.recipe)
    assert {n for n, one in plan.nodes.items() if one.spare} == {"embed:t", "tokens"}
    assert choose(plan, None, None, []) == ([], set())
    # a training that is asked for needs them again, and so does one that is gone
    names = ["embed:t", "tokens", "train"]
    assert [node.name for node in choose(plan, None, None, ["train"])[0]] == names
    plan.store.remove(plan.folders["export"])
    plan.store.remove(plan.folders["train"])
    plan = make_plan(plan.recipe)
    assert [node.name for node in choose(plan, None, None, [])[0]] == [*names, "export"]
    assert make_here(plan.recipe, "export") == [*names, "export"]


def test_a_student_is_wanted_although_others_read_it(storage, tmp_path):
    """Its variants are there, and it is not."""
    raw = make_plan(storage.run("one")[0].recipe).recipe.plain() | {"name": "two"}
    raw["export"] = {"variants": ["bf16"]}
    plan = make_plan(Recipe.model_validate(raw))
    for node in plan.graph.values():
        manifest = new_manifest(
            node, recipe="two", inputs={}, shards=[], files={}, stats={}, started=0.0
        )
        text = json.dumps(asdict(manifest))
        if node.kind not in ("export", "train", "embed", "tokens", "sentences"):
            plan.store.root.write(f"{plan.folders[node.name]}/manifest.json", text.encode())
    plan.store.remove(plan.folders["export"])
    plan.store.remove(plan.folders["embed:t"])
    plan = make_plan(plan.recipe)
    assert [name for name, one in plan.nodes.items() if one.to_do] == ["export"]
    assert plan.nodes["embed:t"].spare


def test_space_by_stage_and_recipe(storage, capsys):
    one, _ = storage.run("one")
    storage.run("two", seed=44)
    assert main(["du", "--storage", storage.root]) == 0
    lines = [re.split(r"  +", line) for line in capsys.readouterr().out.splitlines()]
    rows = {line[0]: line[1:] for line in lines if len(line) > 1}
    assert rows["embed"][0] == "1" and rows["train"][0] == "2"
    files = [file for file in storage.path.rglob("*") if file.is_file() and not file.is_symlink()]
    files = [file for file in files if file.relative_to(storage.path).parts[0] != "students"]
    whole = sum(file.stat().st_size for file in files)
    assert lines[-1] == [f"{whole / 1e6:,.1f} MB in all"]
    mine = sum(
        file.stat().st_size
        for folder in set(one.folders.values())
        for file in (storage.path / folder).rglob("*")
        if file.is_file()
    )
    assert rows["one"][0] == f"{mine / 1e6:,.1f} MB"
    shared = [(storage.path / one.folders[name]).rglob("*") for name in one.folders
              if name.partition(":")[0] in ("sentences", "embed", "tokens")
              or name.startswith(("evaluate:before", "evaluate:t"))]  # fmt: skip
    expected = sum(f.stat().st_size for several in shared for f in several if f.is_file())
    assert rows["one"][1] == f"{expected / 1e6:,.1f} MB"


def log_of(storage, record, error=None):
    log = RunLog(Root(storage.root), f"{record}/log", print)
    try:
        with log:
            log.add("train", "said", "step 4", {})
            if error:
                raise error
    except Exception:
        pass


def states(storage, name=None):
    rows = [re.split(r"  +", line) for line in status(storage.root, name).splitlines()[1:]]
    return [(row[0], row[2], row[3] if len(row) > 3 else "") for row in rows]


def test_how_runs_ended(storage):
    storage.run("finished")
    for name, error in (
        ("failed", ValueError("too hot")), ("stopped", Stopped()), ("ended", None)
    ):  # fmt: skip
        _, record = storage.run(name, only=["sentences"])
        log_of(storage, record, error)
    _, record = storage.run("killed", only=["sentences"])
    log_of(storage, record)
    *_, file = sorted((storage.path / record / "log").iterdir())
    file.write_text("\n".join(file.read_text().splitlines()[:-1]) + "\n")
    assert states(storage, "killed") == [("killed", "running", "last: train: step 4")]
    os.utime(file, (OLD, OLD))
    _, record = storage.run("silent", only=["sentences"])
    assert states(storage) == [
        ("ended", "finished", ""), ("failed", "failed", "ValueError: too hot"),
        ("finished", "finished", ""), ("killed", "killed", "last: train: step 4"),
        ("silent", "killed", "nothing made yet"),
        ("stopped", "stopped", "Stopped: stopped; run again to continue"),
    ]  # fmt: skip
    with pytest.raises(UserError, match="status nobody: no recipe or search of that name has run"):
        status(storage.root, "nobody")


def test_how_searches_ended(storage):
    root = Root(storage.root)
    storage.run("mine", only=["sentences"])
    for name, error in (("ended", None), ("failed", ValueError("too hot")), ("killed", None)):
        root.write(f"tune/{name}/search.yaml", b"")
        log_of(storage, f"tune/{name}", error)
    *_, file = sorted((storage.path / "tune/killed/log").iterdir())
    file.write_text("\n".join(file.read_text().splitlines()[:-1]) + "\n")
    os.utime(file, (OLD, OLD))
    assert states(storage)[1:] == [
        ("search ended", "finished", ""), ("search failed", "failed", "ValueError: too hot"),
        ("search killed", "killed", "last: train: step 4"),
    ]  # fmt: skip
    with Leases(root, print) as leases:
        leases.take("tune/killed", lambda: False, print, lambda: "2 running")
        ((name, state, told),) = states(storage, "killed")
    assert (name, state) == ("search killed", "running") and told.endswith("2 running")


def test_a_run_that_found_no_cluster_has_failed(storage):
    plan, _ = storage.run("one", only=["sentences"])
    with pytest.raises(UserError, match="127.0.0.1:1"):
        run(plan.recipe, address="127.0.0.1:1")
    ((_, state, told),) = states(storage)
    assert state == "failed" and "127.0.0.1:1" in told


HOLD = """
import sys
from pipeline.store.leases import Leases, run_lease
from stages.files import Root
leases = Leases(Root(sys.argv[1]), print)
leases.hold(run_lease(sys.argv[2]), lambda: "train: step 5")
print("held", flush=True)
sys.stdin.read()
"""


def test_a_run_of_another_process_is_running_until_it_is_killed(storage):
    _, record = storage.run("one", only=["sentences"])
    log = RunLog(Root(storage.root), f"{record}/log", print)
    log.add("train", "said", "step 5", {})
    log.write()  # a moment ago, which is no sign of life where a lease tells more
    root = Path(__file__).parents[3]
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, storage.root, record], cwd=root, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout.readline() == "held\n"
    ((_, state, told),) = states(storage)
    assert state == "running" and told.endswith("ago. train: step 5")
    (file,) = (storage.path / "leases/runs").rglob("*.json")
    process.send_signal(signal.SIGSTOP)  # it writes its lease no more
    os.utime(file, (time.time() - 60,) * 2)
    assert states(storage)[0][1] == "silent"
    process.kill()
    process.wait()
    assert states(storage)[0][1] == "killed"
    assert "leases" not in clear(storage.root, [], delete=True)
    for path in (file, *(storage.path / record / "log").iterdir()):
        os.utime(path, (OLD, OLD))
    assert f"leases/{run_lease(record)}  of a run that was killed" in clear(storage.root, [], True)
    assert not file.exists() and states(storage)[0][1] == "killed"


@pytest.mark.parametrize("command", [["gc"], ["gc", "--delete"], ["du"]])
def test_what_is_no_storage_root_is_left_alone(tmp_path, capsys, command):
    (tmp_path / "embed").mkdir()
    (tmp_path / "embed/precious-00000000").write_text("x")
    (tmp_path / "builds/foo-12345678").mkdir(parents=True)
    (tmp_path / "builds/foo-12345678/binary").write_text("x")
    for history in (None, tmp_path / "history/old/notes.txt", tmp_path / "history/notes.txt"):
        if history is not None:
            history.parent.mkdir(parents=True, exist_ok=True)
            history.touch()
        assert main([*command, "--storage", str(tmp_path)]) == 2
        assert "no recipe has run here" in capsys.readouterr().err
    assert (tmp_path / "embed/precious-00000000").is_file()
    assert (tmp_path / "builds/foo-12345678/binary").is_file()


def test_folders_of_others_in_a_storage_root_are_left_alone(storage):
    """Though they are called like artifacts."""
    storage.run("one", only=["sentences"])
    foreign = storage.path / "builds/foo-12345678/binary"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("x")
    assert not garbage(storage.root)[1]
    clear(storage.root, (), delete=True)
    assert foreign.is_file()


def test_a_name_that_has_never_run(storage):
    storage.run("one", only=["sentences"])
    with pytest.raises(UserError, match="no recipe called 'two' has run here; there are one"):
        clear(storage.root, ["two"], delete=True)
