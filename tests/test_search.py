"""Searches through the command line, on a real cluster of two Ray nodes."""

import json
import os
import re
import signal
import tempfile
from pathlib import Path

import psutil
import pytest
import yaml

from pipeline.run.scratch import remove_dead
from pipeline.store.needs import needs_of
from stages.files import Root

RATE = "train.learning_rate"
TAU2 = "train.objectives.listnet.student_temperature"
TAU3 = "train.objectives.listnet.teacher_temperature"


@pytest.fixture
def tune(sentray, tiny_recipe, inputs_made):
    """Writes a recipe with a search section (its settings as keywords); returns its file."""

    def write(space, *overrides, **settings):
        settings = {"confirm": {"settings": 0}} | settings
        if settings.get("scheduler") != "population":
            settings = {"concurrency": 2} | settings  # two real cores
        recipe = tiny_recipe("evaluate.speed=false", *overrides)
        return sentray.recipe_file(recipe | {"search": {"space": space, **settings}})

    return write


def trials_of(sentray, name="tiny"):
    file = sentray.folder / "runs/tune" / name / "trials.jsonl"
    if not file.exists():
        return []
    last = {}
    for line in file.read_text().split("\n")[:-1]:
        one = json.loads(line)
        last.pop(one["fingerprint"], None)
        last[one["fingerprint"]] = one
    return [one for one in last.values() if one["status"] != "running"]


def logged(sentray):
    """Stage and event of all lines that a search's runs have logged."""
    files = sorted((sentray.folder / "runs/tune/tiny/log").iterdir())
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [(line["stage"], line["event"]) for line in lines]


def weights_of(sentray):
    return {
        f"train/{path.parent.name}" for path in sentray.folder.glob("runs/train/*/manifest.json")
    }


def times(folder, pattern):
    return {str(path): path.stat().st_mtime_ns for path in Path(folder).glob(pattern)}


@pytest.mark.thorough
def test_a_killed_search_goes_on_and_trains_nothing_twice(sentray, tune, monkeypatch):
    grid = {
        # better, then worse: some finish, and the last ones never do
        RATE: {"grid": [3e-3, 1e-4, 1e-3, 1e-2]},
        TAU3: {"grid": [0.0125, 0.05]},
        TAU2: {"tied": TAU3, "factor": 2},
    }
    settings = {"confirm": {"settings": 2, "seeds": 2}, "keep": 1}
    file = tune(grid, "train.max_steps=24", **settings)
    temporary = sentray.folder / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    process = sentray.start("tune", file)
    sentray.wait(process, lambda: len(trials_of(sentray)) >= 3)
    process.kill()
    process.communicate()
    sentray.wait_for_idle()
    (scratch,) = temporary.glob("sentray-*/sentray-tune-*")  # Tune's own record
    assert not list(scratch.rglob("*.safetensors"))
    before = {one["fingerprint"]: one for one in trials_of(sentray)}
    results = times(sentray.folder / "runs", "trial/*/manifest.json")
    factors = times(sentray.folder / "runs", "embed/*/manifest.json")
    assert len(before) >= 3 and len(factors) == 1
    needs = needs_of(Root(str(sentray.folder / "runs")), "tune/tiny")  # so `gc` keeps them
    assert {str(sentray.folder / "runs" / one / "manifest.json") for one in needs} >= {*factors}

    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    remove_dead()
    assert not [*temporary.iterdir()]

    out = sentray("tune", file)
    after = trials_of(sentray)
    states = [one["status"] for one in after if one["phase"] == "search"]
    assert len(states) == 8 and states.count("stopped") and states.count("finished")
    assert len(after) == 8 + 2 * min(2, states.count("finished"))
    assert {one["fingerprint"]: one for one in after}.items() >= before.items()
    assert results.items() <= times(sentray.folder / "runs", "trial/*/manifest.json").items()
    assert factors == times(sentray.folder / "runs", "embed/*/manifest.json")
    assert "fresh seeds" in out and "Student over 2 seeds: made-up" in out

    # the best one searched, and the best one's confirmations, keep their weights
    recipe = yaml.safe_load((sentray.folder / "runs/tune/tiny/best.yaml").read_text())
    rate, tau = recipe["train"]["learning_rate"], recipe["train"]["objectives"]["listnet"]
    assert tau["student_temperature"] == 2 * tau["teacher_temperature"]
    kept = {
        one["folder"]
        for one in after
        if one["phase"] == "confirm"
        and one["values"][RATE] == rate
        and one["values"][TAU2] == tau["student_temperature"]
    }
    finished = [one for one in after if one["phase"] == "search" and one["status"] == "finished"]
    assert len(kept) == 2
    assert weights_of(sentray) == kept | {max(finished, key=lambda one: one["score"])["folder"]}
    assert not list((sentray.folder / "runs/work/train").glob("*"))
    assert not list((sentray.folder / "runs/work/ray").glob("*"))

    # its recipe is made already; and without anything to do no cluster is asked for
    assert "nothing to do" in sentray("run", sentray.folder / "runs/tune/tiny/best.yaml")
    again = sentray("tune", file)
    assert "starting Ray" not in again
    assert again.splitlines()[-3:] == out.splitlines()[-3:]
    shown = sentray("status", "tiny", "--storage", sentray.folder / "runs")
    assert re.search(r"^search tiny .* finished$", shown, re.MULTILINE)
    events = logged(sentray)
    assert events.count(("", "ended")) == 2 and events.count(("", "started")) == 3
    assert events.count(("search", "said")) >= 5 and ("confirm", "said") in events
    assert trials_of(sentray) == after
    page = (sentray.folder / "runs/tune/tiny/report.html").read_text()
    assert page.count("<svg") >= 3 and "Two settings" in page
    newest = max((sentray.folder / "runs").glob("history/tiny-best/*/report.html"))
    assert "Two settings: search tiny" in newest.read_text()


@pytest.mark.long
def test_more_trials_another_space_and_another_search_read_what_is_there(sentray, tune):
    file = tune({RATE: {"loguniform": [1e-4, 1e-2]}}, trials=2, scheduler="none")
    sentray("tune", file)
    first = {one["fingerprint"] for one in trials_of(sentray)}
    file = tune({RATE: {"loguniform": [1e-4, 1e-2]}}, trials=3, scheduler="none", seeds=[42])
    sentray("tune", file)
    more = trials_of(sentray)
    assert len(more) == 3 and first < {one["fingerprint"] for one in more}

    rates = [one["values"][RATE] for one in more]
    tpe = {"searcher": "tpe", "scheduler": "none", "trials": 5}
    file = tune({RATE: {"loguniform": [1e-4, 1e-1]}, TAU3: {"choice": [0.0125]}}, **tpe)
    out = sentray("tune", file)
    assert "8 finished" in out  # the three of the old space belong to the recipe too

    file = tune({RATE: {"grid": rates}}, name="other", scheduler="none")
    assert "starting Ray" not in sentray("tune", file)  # all its configurations are known
    assert [one["reused"] for one in trials_of(sentray, "other")] == [True] * 3


def test_failures_are_reported_and_do_not_stop_the_others(sentray, tune):
    grid = {RATE: {"grid": [1e-3, 1e30]}, "train.batch_size": {"grid": [16, 400]}}
    out = sentray("tune", tune(grid, scheduler="none", seeds=[1]))
    assert "1 finished, 3 failed" in out
    assert "train.batch_size is 400, but there are only 300 sentences" in out
    assert "became nan" in out or "became inf" in out
    err = sentray("tune", tune({RATE: {"grid": [1e30, 2e30]}}, name="bad"), code=2)
    assert "2 of 2 trials failed" in err and "train.learning_rate" in err
    assert "Traceback" not in err


def trial_processes():
    """This cluster's processes in which trials train (the name that Tune gives them)."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "ResourceTrainable" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize(
    "max_failures",
    [pytest.param(0, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.thorough)],
)
def test_a_trial_whose_process_is_killed(sentray, tune, max_failures):
    changes = [
        "train.max_steps=300", "train.dev.every_steps=20", "train.checkpoint_every_steps=20",
        f"train.max_failures={max_failures}",
    ]  # fmt: skip
    grid = {RATE: {"grid": [1e-3] if max_failures else [1e-4, 1e-3]}}
    process = sentray.start("tune", tune(grid, *changes, scheduler="none", concurrency=1))
    work = sentray.folder / "runs/work/train"
    sentray.wait(process, lambda: list(work.glob("*/step-*/complete.json")))
    checkpoint = json.loads(max(work.glob("*/step-*/complete.json")).read_text())
    for victim in trial_processes():
        victim.send_signal(signal.SIGKILL)
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, out + err
    by_state = {one["status"]: one for one in trials_of(sentray)}
    if max_failures:
        assert set(by_state) == {"finished"}
        first = trials_of(sentray)[0]
        steps = [point[0] for point in first["curve"]]
        assert steps == list(range(20, 301, 20)) and first["steps"] == 300
        # it went on where it was: times are measured, so rows of a new start would be others
        rows = history_of(sentray, first)
        assert rows[: len(checkpoint["history"])] == checkpoint["history"] != []
    else:
        assert set(by_state) == {"finished", "failed"} and "its process died" in out
        assert by_state["failed"]["retryable"]


@pytest.mark.parametrize(
    "workers",
    [pytest.param(1, marks=pytest.mark.thorough), pytest.param(2, marks=pytest.mark.long)],
)
def test_a_search_that_is_asked_to_stop_puts_its_trials_away(sentray, tune, workers):
    """No checkpoint is due but the one that the wish to stop brings."""
    num_steps = 600 if workers == 1 else 160
    changes = [
        f"train.max_steps={num_steps}", "train.dev.every_steps=20", "train.log_every_steps=1",
        "train.checkpoint_every_steps=100000", "train.max_failures=0",
        f"train.num_workers={workers}", "train.cpus_per_worker=1",
    ]  # fmt: skip
    rates = [1e-3, 1e-4] if workers == 1 else [1e-3]
    file = tune({RATE: {"grid": rates}}, *changes, scheduler="none", concurrency=1)
    process = sentray.start("tune", file)
    for line in process.stdout:
        if "1 running" in line:  # it has told of its first steps
            break
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 75, out + err
    assert "SIGTERM: putting work away" in out and "Traceback" not in err
    sentray.wait_for_idle()
    assert not trials_of(sentray)
    (saved,) = (sentray.folder / "runs/work/train").glob("*/step-*/complete.json")
    before = json.loads(saved.read_text())["history"]
    assert 0 < len(before) < num_steps

    sentray("tune", file)
    trial, *others = trials_of(sentray)
    assert len(others) == len(rates) - 1
    assert [point[0] for point in trial["curve"]] == list(range(20, num_steps + 1, 20))
    assert history_of(sentray, trial)[: len(before)] == before  # times are in it: not made again


def history_of(sentray, trial):
    """Metric rows of a trial that has ended."""
    result = sentray.folder / "runs" / trial["folder"].replace("train/", "trial/", 1)
    return json.loads((result / "manifest.json").read_text())["stats"]["history"]


@pytest.mark.thorough
def test_trials_with_several_workers(sentray, tune):
    two = ["train.num_workers=2", "train.cpus_per_worker=1"]
    changes = ["train.zero_stage=1", "train.max_steps=24"]
    grid = {RATE: {"grid": [1e-3, 1e-8]}}  # the second one's loss stays where it was
    file = tune(grid, *two, *changes, concurrency=1, metric="loss")
    sentray("tune", file)
    trials = trials_of(sentray)
    assert [one["status"] for one in trials] == ["finished", "stopped"]
    lines = (sentray.folder / "runs/tune/tiny/trials.jsonl").read_text().splitlines()
    statuses = [json.loads(line)["status"] for line in lines]  # one at a time, as asked for
    assert statuses == ["running", "finished", "running", "stopped"]
    first = trials[0]
    assert [point[0] for point in first["curve"]] == list(range(2, 25, 2))
    assert not list((sentray.folder / "runs/work/train").glob("*"))  # the stopped one either
    sentray.wait_for_idle()  # no trial has left a worker behind

    many = ["train.num_workers=16", "train.cpus_per_worker=2"]
    err = sentray("tune", tune(grid, *many, *changes, name="big", seeds=[5]), code=2)
    assert "16 worker(s) with 2 core(s)" in err and "do not fit" in err


@pytest.mark.thorough
def test_a_population(sentray, tune):
    file = tune(
        {RATE: {"loguniform": [1e-5, 1e-2]}, TAU3: {"choice": [0.0125, 0.05]},
         TAU2: {"tied": TAU3, "factor": 2}},
        "train.max_steps=20", "train.dev.every_steps=4",
        scheduler="population", trials=3, interval=0.2, confirm={"settings": 1, "seeds": 1},
    )  # fmt: skip
    out = sentray("tune", file)
    members = [one for one in trials_of(sentray) if one["phase"] == "population"]
    assert len({one["fingerprint"].partition("-")[2] for one in members}) == len(members) == 3
    assert all(one["curve"][-1][0] == 20 and one["status"] == "finished" for one in members)
    assert all(one["values"][TAU2] == 2 * one["values"][TAU3] for one in members)
    assert all(1e-5 <= one["values"][RATE] <= 1e-2 for one in members)
    changed = [line for line in out.splitlines() if line.startswith("member")]
    rates = {line.split(":")[0]: set() for line in changed}
    for line in changed:
        rates[line.split(":")[0]].add(line.split("learning_rate ")[1].split(",")[0])
    assert any(len(values) > 1 for values in rates.values())  # somebody took over from another
    assert "fresh seed" in out
    assert "starting Ray" not in sentray("tune", file)


@pytest.mark.long
def test_a_population_that_is_asked_to_stop_ends(sentray, tune):
    """No member has ended, so none is kept."""
    changes = ["train.max_steps=3000", "train.dev.every_steps=30"]
    space = {RATE: {"loguniform": [1e-5, 1e-2]}}
    file = tune(space, *changes, scheduler="population", trials=3, interval=0.01)
    process = sentray.start("tune", file)
    for line in process.stdout:
        if line.startswith("member"):
            break
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 75, out + err
    assert "Traceback" not in err and not trials_of(sentray)
    sentray.wait_for_idle()


@pytest.mark.parametrize("scheduler", ["none", "population"])
def test_a_trial_that_fits_nowhere_is_said_at_once(sentray, tune, scheduler):
    """As is that there are fewer configurations than trials."""
    space = {RATE: {"choice": [1e-3, 1e-2]}}
    file = tune(space, cpus_per_trial=64, scheduler=scheduler, searcher="random", trials=3)
    err = sentray("tune", file, code=2)
    assert "trials: 3, but only 2 were found that differ" in sentray.said
    assert "64 core(s)" in err and "fits on no machine" in err and "search.cpus_per_trial" in err
    assert not os.listdir(sentray.folder / "runs/tune/tiny") or not trials_of(sentray)


def test_a_search_that_waits_for_a_machine_ends_when_it_is_asked_to(sentray, tune, tmp_path):
    """Its pool may grow, and has not."""
    pool = {"cpus": 4, "nodes": [0, 1], "stages": {"train": {}}}
    (tmp_path / "pools.yaml").write_text(yaml.safe_dump({"pools": {"late": pool}}))
    file = tune({RATE: {"grid": [1e-3]}})
    process = sentray.start("tune", file, "--pools", tmp_path / "pools.yaml")
    sentray.wait(process, lambda: (sentray.folder / "runs/tune/tiny/trials.jsonl").exists())
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, out + err
    assert err.strip().endswith("sentray: stopped; run again to continue")
    assert not trials_of(sentray)
