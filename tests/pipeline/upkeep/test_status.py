"""What a storage root tells of its runs and searches."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.cli import main
from pipeline.run.log import RunLog
from pipeline.run.runner import run
from pipeline.store.leases import Leases, run_lease
from pipeline.upkeep.clearing import clear
from pipeline.upkeep.status import log_lines, status
from stages.errors import Stopped, StorageError, UserError
from stages.files import Root
from stages.variables import FILLED_IN

OLD = time.time() - 7200


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
    said = {"time": "2026-01-01T00:00:00", "stage": "", "event": "said", "text": "storage"}
    file.write_text("\n".join([*file.read_text().splitlines()[:-1], json.dumps(said)]) + "\n")
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


def test_what_others_put_into_the_history_is_no_run(storage, capsys):
    """And an error of many lines is one that a terminal does not obey."""
    _, record = storage.run("one", only=["sentences"])
    log_of(storage, record, ValueError("too \x1b[36mhot\nTraceback"))
    shutil.copytree(storage.path / record, storage.path / "history/one/zz-copy")
    (storage.path / "history/README.txt").write_text("mine")
    assert states(storage) == [("one", "failed", "ValueError: too \\x1b[36mhot")]
    assert states(storage, "one") == states(storage)
    assert main(["show", "one", "--storage", storage.root]) == 0
    assert capsys.readouterr().out.startswith(f"{record}  failed: ")


def test_what_is_shown_of_a_run_says_how_it_ended(storage, capsys):
    for error, told in ((None, "finished"), (ValueError("too hot"), "failed: ValueError: too hot")):
        _, record = storage.run("one", only=["sentences"])
        log_of(storage, record, error)
        assert main(["show", "one", "--storage", storage.root]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"{record}  {told}"
        rows = [line.split(maxsplit=2) for line in lines[1:] if line.startswith("  ")]
        states = {name: state for name, _, state in rows}
        assert states["embed:t"] == "not made" and states["sentences"] != "not made"


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
    with pytest.raises(UserError, match="127.0.0.1:1"):  # with a session open too, as in the suite
        run(plan.recipe, address="127.0.0.1:1")
    ((_, state, told),) = states(storage)
    assert state == "failed" and "127.0.0.1:1" in told


def test_what_the_newest_run_said(storage, capsys):
    for words in ("old", "new \x1b[2J"):
        _, record = storage.run("one", only=["sentences"])
        with RunLog(Root(storage.root), f"{record}/log", print) as log:
            log.add("embed:t", "said", words, {})
            log.add("", "said", "storage s3://b answers again", {})
            log.write()  # a file of its own
            log.add("train", "done", "done in 3 s", {"elapsed_seconds": 3.0})
    assert main(["status", "one", "--log", "--storage", storage.root]) == 0
    lines = [line.split("  ", 1) for line in capsys.readouterr().out.splitlines()]
    assert [re.sub("  +", "  ", text) for _, text in lines] == [
        "run  started", "embed:t  new \\x1b[2J", "run  storage s3://b answers again",
        "train  done in 3 s", "run  ended",
    ]  # fmt: skip
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", when) for when, _ in lines)


def test_what_a_search_said_in_all_its_runs(storage):
    root = Root(storage.root)
    for words in ("first", "second"):
        with RunLog(root, "tune/mine/log", print) as log:
            log.add("search", "said", words, {})
    text = "\n".join(log_lines(storage.root, "mine"))
    assert text.index("started") < text.index("first") < text.index("second")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--log"], "say whose log: sentray status NAME --log"),
        (["nobody", "--log"], "no recipe or search of that name has run"),
        (["one", "--log"], "there is no log in"),
        (["damaged", "--log"], "is damaged, or of another version of Sentray"),
    ],
)
def test_a_log_that_cannot_be_shown(storage, capsys, arguments, message):
    storage.run("one", only=["sentences"])
    _, record = storage.run("damaged", only=["sentences"])
    Root(storage.root).write(f"{record}/log/20260101T000000.000000.jsonl", b'{"time": 3}\n')
    assert main(["status", *arguments, "--storage", storage.root]) == 2
    assert message in capsys.readouterr().err


def test_whoever_reads_what_is_printed_may_go(storage):
    """As `| head` does: no trace, and the exit code that shells know."""
    _, record = storage.run("one", only=["sentences"])
    with RunLog(Root(storage.root), f"{record}/log", print) as log:
        for _ in range(2_000):  # more than a pipe holds
            log.add("train", "said", "x" * 100, {})
    process = subprocess.Popen(
        [Path(sys.executable).with_name("sentray"), "status", "one", "--log", "--storage",
         storage.root],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout.readline().endswith(b"started\n")
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 128 + signal.SIGPIPE


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


def test_what_a_log_holds(tmp_path, monkeypatch):
    """JSON, also where a loss is no number; no secret; and the run goes on without it."""
    monkeypatch.setitem(FILLED_IN, "GATEWAY_TOKEN", "correct-horse")
    warned = []
    log = RunLog(Root(str(tmp_path)), "log", warned.append)
    log.add("train", "said", "sent correct-horse", {"loss": math.nan, "step": 1.0})
    log.write()
    (file,) = (tmp_path / "log").iterdir()
    row = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert row["figures"] == {"loss": None, "step": 1.0}
    assert row["text"] == "sent ${GATEWAY_TOKEN}"
    monkeypatch.setattr("pipeline.run.log.SECONDS_BETWEEN_FILES", -1.0)
    assert log.is_due

    def full(*_):
        raise StorageError("the disk is full")

    monkeypatch.setattr(Root, "write", full)
    log.add("train", "said", "more", {})
    log.write()
    assert warned == ["warning: the run's log lacks lines: the disk is full"]
