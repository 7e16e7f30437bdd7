"""What a storage root tells of its runs, its space, and what nobody needs."""

import json
import os
import re
import shutil
import threading
import time
from dataclasses import asdict

import pytest

from cluster.pull import pull
from pipeline.cli import main
from pipeline.plan.plan import make_plan
from pipeline.run.log import RunLog
from pipeline.run.runner import choose, record_start
from pipeline.store.artifacts import ArtifactStore
from pipeline.store.leases import Leases, run_lease, seen_leases
from pipeline.store.manifest import new_manifest
from pipeline.store.needs import NEEDS, needs_are_settled, write_needs
from pipeline.upkeep.clearing import clear, garbage
from pipeline.upkeep.contents import key_of
from stages.errors import UserError
from stages.files import Root
from stages.recipe import Recipe
from tests.support.here import make_here

OLD = time.time() - 7200


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
    said = pull("two", storage.root, storage.path.parent / "pulled")
    assert "no student: it was removed (`sentray gc`)" in said and "results.json" in said


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


def test_a_run_begins_before_a_removal_or_after_it(storage, monkeypatch):
    """Else what it was about to name could go in between."""
    storage.run("one")
    storage.run("one", seed=43)
    in_removal, goes_on = threading.Event(), threading.Event()
    remove = ArtifactStore.remove

    def slow(store, path):
        in_removal.set()
        assert goes_on.wait(60)
        remove(store, path)

    monkeypatch.setattr(ArtifactStore, "remove", slow)
    collecting = threading.Thread(target=clear, args=(storage.root, ["one"], True))
    collecting.start()
    assert in_removal.wait(60)
    told = []

    def say(text, important=False):
        told.append(text)
        assert collecting.is_alive()
        goes_on.set()

    with needs_are_settled(Root(storage.root), say):
        collecting.join(60)
        assert not collecting.is_alive()
    assert len(told) == 1 and told[0].startswith("waits for ") and "sentray gc" in told[0]


def test_a_removal_whose_process_was_frozen_ends(storage, monkeypatch):
    """Another has thought it dead, and needs what it was about to remove."""
    storage.run("one")
    storage.run("one", seed=43)
    remove, gone = ArtifactStore.remove, []

    def and_then_it_is_frozen(store, path):
        remove(store, path)
        gone.append(path)
        number = Root(storage.root).list(f"leases/{NEEDS}")[-1]
        taken = f"leases/{NEEDS}/{int(number[:6]) + 1:06d}.json"
        Root(storage.root).write(taken, Root(storage.root).read(f"leases/{NEEDS}/{number}"))

    monkeypatch.setattr(ArtifactStore, "remove", and_then_it_is_frozen)
    assert len(garbage(storage.root, ["one"])[1]) > 1
    clear(storage.root, ["one"], delete=True)
    assert len(gone) == 1


def test_a_run_called_like_the_folder_of_searches_keeps_what_it_needs(storage):
    plan, record = storage.run("tune", only=["sentences"])
    storage.run("other", seed=43, only=["embed:t"])
    with Leases(Root(storage.root), print) as leases:
        leases.hold(run_lease(record), lambda: "")
        kept = {one.path for one in garbage(storage.root, ["other"])[1]}
    assert plan.folders["sentences"] not in kept


def test_a_run_says_what_it_needs_while_nobody_removes_anything(storage, monkeypatch):
    from pipeline.run import runner

    plan, _ = storage.run("one", only=["sentences"])
    start, held = runner.record_start, []

    def look(plan):
        held.append([one.folder for one in seen_leases(plan.store.root)])
        return start(plan)

    monkeypatch.setattr(runner, "record_start", look)
    monkeypatch.setattr(runner, "check_still_there", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runner.run(plan.recipe, only="embed:t")
    assert held == [[NEEDS]]


def test_a_run_whose_inputs_were_removed_as_it_began_says_so(storage, monkeypatch):
    from pipeline.run import runner

    plan, _ = storage.run("one", only=["sentences"])
    start = runner.record_start

    def too_late(plan):
        plan.store.remove(plan.folders["sentences"])
        return start(plan)

    monkeypatch.setattr(runner, "record_start", too_late)
    with pytest.raises(UserError, match="sentences: removed since this run began"):
        runner.run(plan.recipe, only="embed:t")


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


def test_what_a_search_says_its_trials_read_stays(storage):
    """Their trainings are not published yet, so nothing else names it."""
    plan, _ = storage.run("one", only=["embed:t", "tokens"])
    read = {plan.folders[name] for name in ("embed:t", "tokens")}
    root = Root(storage.root)
    shutil.rmtree(storage.path / "history/one")
    root.write("history/three/20260101T000000000000/run.json", b"{}")
    root.write("tune/found/search.yaml", b"")
    assert read <= {one.path for one in garbage(storage.root)[1]}
    write_needs(root, "tune/found", plan.folders.values())
    assert not read & {one.path for one in garbage(storage.root)[1]}
    # of other runs only, but the search is at work
    assert read <= {one.path for one in garbage(storage.root, ["three"])[1]}
    with Leases(root, print) as leases:
        leases.hold(run_lease("tune/found"), lambda: "")
        assert not read & {one.path for one in garbage(storage.root, ["three"])[1]}


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
    two, _ = storage.run("two", seed=44)
    trial = {"folder": two.folders["train"], "status": "finished"}
    Root(storage.root).write("tune/mine/trials.jsonl", json.dumps(trial).encode())
    write_needs(Root(storage.root), "tune/mine", [two.folders["tokens"]])
    assert main(["du", "--storage", storage.root]) == 0
    lines = [re.split(r"  +", line) for line in capsys.readouterr().out.splitlines()]
    rows = {line[0]: line[1:] for line in lines if len(line) > 1}
    assert rows["embed"][0] == "1" and rows["train"][0] == "2"
    files = [file for file in storage.path.rglob("*") if file.is_file() and not file.is_symlink()]
    files = [file for file in files if file.relative_to(storage.path).parts[0] != "students"]
    whole = sum(file.stat().st_size for file in files)
    assert lines[-1] == [f"{whole / 1e6:,.1f} MB in all"]

    def size_of(folders):
        files = [file for one in {*folders} for file in (storage.path / one).rglob("*")]
        return f"{sum(file.stat().st_size for file in files if file.is_file()) / 1e6:,.1f} MB"

    assert rows["one"][0] == size_of(one.folders.values())
    assert rows["search mine"][0] == size_of([two.folders["train"], two.folders["tokens"]])
    shared = [(storage.path / one.folders[name]).rglob("*") for name in one.folders
              if name.partition(":")[0] in ("sentences", "embed", "tokens")
              or name.startswith(("evaluate:before", "evaluate:t"))]  # fmt: skip
    expected = sum(f.stat().st_size for several in shared for f in several if f.is_file())
    assert rows["one"][1] == f"{expected / 1e6:,.1f} MB"


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
