"""A run that is asked to end puts its work away, and goes on from there."""

import signal
import subprocess
import sys

import pytest
import yaml

from tests.support.command import made, student_weights
from tests.support.models import make_sentences

NUM_SHARDS = 400

# Runs are sent no SIGINT or SIGHUP: whoever starts the tests in the background, or with nohup,
# ignores those for them and their children, and a run respects that.


def test_a_training_saves_a_checkpoint_first(sentray, tiny_recipe, inputs_made, tmp_path):
    recipe = tiny_recipe(
        "train.max_steps=300", "train.checkpoint_every_steps=100000", "train.dev.every_steps=100",
        "evaluate.speed=false",
    )  # fmt: skip
    file = sentray.recipe_file(recipe)
    process = sentray.start("run", file, "--only", "train")
    for line in process.stdout:
        if "train             step" in line:
            break
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 75, out + err
    assert "SIGTERM: putting work away" in out
    assert err.strip().endswith("sentray: stopped; run again to continue")
    assert "Traceback" not in err
    (saved,) = (tmp_path / "runs").glob("work/train/*/step-*/complete.json")
    step = int(saved.parent.name.split("-")[1])
    assert 0 < step < 300
    assert not list((tmp_path / "runs").glob("leases/*/*/*.json"))
    out = sentray("run", file, "--only", "train")
    goes_on, _, first_line = out.partition("train             step ")
    assert f"goes on after step {step}\n" in goes_on
    assert int(first_line.partition("/")[0].replace(",", "")) > step
    weights = student_weights(recipe["storage"])
    sentray("run", file, "--only", "train", "--force", "train")
    assert student_weights(recipe["storage"]) == weights


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_the_first_signal_asks_and_the_second_one_ends(name):
    """But one that was ignored when the process began, as by nohup, says nothing."""
    code = (
        "import signal, threading\n"
        "from pipeline.run.stopping import Ended, asked_by_signals\n"
        f"number = signal.{name}\n"
        "for first in (signal.SIG_IGN, signal.SIG_DFL):\n"
        "    signal.signal(number, first)\n"
        "    asked = threading.Event()\n"
        "    with asked_by_signals(asked, print):\n"
        "        signal.raise_signal(number)\n"
        "        print(asked.is_set())\n"
        "        try:\n"
        "            signal.raise_signal(number)\n"
        "        except Ended as end:\n"
        "            print(end.exit_code)\n"
        "    assert signal.getsignal(number) is first\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    number = signal.Signals[name].value
    lines = found.stdout.splitlines()
    assert lines[0] == "False" and lines[1].startswith(f"{name}: putting work away"), found.stderr
    assert lines[2:] == ["True", str(128 + number)] and not found.stderr


def test_ray_does_not_take_signals_for_itself(ray_cluster):
    """Else a run that is asked to end before or after it makes anything says nothing."""
    code = (
        "import signal, sys\n"
        "from pipeline.run.session import ray_session\n"
        "from pipeline.run.stopping import end_process, ended_by_signals\n"
        "with ended_by_signals():\n"
        "    before = signal.getsignal(signal.SIGTERM)\n"
        "    with ray_session(sys.argv[1]):\n"
        "        end_process(0 if signal.getsignal(signal.SIGTERM) is before else 1)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, ray_cluster]).returncode == 0


def test_a_signal_while_ray_starts_is_answered(sentray, tiny_recipe):
    """Ray's own answer meanwhile is to end without a word, with exit code 15."""
    recipe = sentray.recipe_file(tiny_recipe())
    code = (
        "import signal, sys\n"
        "from ray._private.node import Node\n"
        "Node.start_head_processes = lambda node: signal.raise_signal(signal.SIGTERM)\n"
        "from pipeline.cli import command\n"
        f"sys.argv = ['sentray', 'run', {recipe!r}]\n"
        "sys.exit(command())\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=sentray.folder
    )
    assert found.returncode == 128 + signal.SIGTERM, found.stderr
    assert found.stderr.startswith("sentray: ") and "Traceback" not in found.stderr


def test_a_signal_where_nothing_can_be_raised_is_not_lost():
    """As in a weak reference's callback, of which Python only prints what it raises."""
    code = (
        "import os, signal, sys, threading, time\n"
        "from pipeline.run.stopping import Ended, ended_by_signals\n"
        "class Dying:\n"
        "    def __del__(self):\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        for _ in range(1000): pass\n"
        "with ended_by_signals():\n"
        "    try:\n"
        "        Dying()\n"
        "        threading.Event().wait()\n"
        "    except Ended as end:\n"
        "        sys.exit(end.exit_code)\n"
    )
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (found.returncode, found.stderr) == (128 + signal.SIGTERM, "")


@pytest.mark.thorough
def test_row_wise_stages_finish_their_open_shards(sentray, tiny_recipe, tmp_path):
    text = tmp_path / "many.txt"
    text.write_text("\n".join(make_sentences(8 * NUM_SHARDS)) + "\n")
    recipe = tiny_recipe(f"sentences.path={text}", "sentences.rows_per_shard=8")
    file = sentray.recipe_file(recipe)
    sentray("run", file, "--only", "sentences")
    process = sentray.start("run", file, "--only", "embed")
    sentray.wait(process, lambda: list((tmp_path / "runs").glob("embed/*/shards/*.json")))
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 75, out + err
    finished = made(recipe["storage"])
    assert 0 < len([name for name in finished if name.startswith("embed/")]) < NUM_SHARDS
    assert not [name for name in finished if name.startswith("embed") and "manifest" in name]
    sentray("run", file, "--only", "embed")
    assert finished.items() <= made(recipe["storage"]).items()


def test_a_second_signal_ends_at_once(sentray, tiny_recipe, inputs_made):
    recipe = tiny_recipe("train.max_steps=100000", "train.log_every_steps=50000")
    process = sentray.start("run", sentray.recipe_file(recipe), "--only", "train")
    for line in process.stdout:
        if "train             started" in line:
            break
    process.send_signal(signal.SIGTERM)
    for line in process.stdout:
        if "putting work away" in line:
            break
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "sentray: ended; run again to continue" in err
    sentray.wait_for_idle()


@pytest.mark.parametrize(("stage", "workers"), [("train", 1), ("train", 2), ("embed", 1)])
def test_what_waits_for_a_machine_has_nothing_to_put_away(
    sentray, tiny_recipe, inputs_made, tmp_path, stage, workers
):
    """Its pool may grow, and has not: the first signal is enough."""
    pool = {"cpus": 4, "nodes": [0, 1], "stages": {stage: {}}}
    (tmp_path / "pools.yaml").write_text(yaml.safe_dump({"pools": {"late": pool}}))
    recipe = tiny_recipe(f"train.num_workers={workers}", "train.cpus_per_worker=1")
    file = sentray.recipe_file(recipe)
    process = sentray.start(
        "run", file, "--only", stage, "--force", stage, "--pools", tmp_path / "pools.yaml"
    )
    for line in process.stdout:
        if stage in line and "started" in line:
            break
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, out + err
    assert err.strip().endswith("sentray: stopped; run again to continue")
    assert not list((tmp_path / "runs").glob("leases/*/*/*.json"))
    sentray.wait_for_idle()


@pytest.mark.thorough
def test_a_run_that_made_everything_succeeds_though_ray_breaks_at_its_end(sentray, tiny_recipe):
    """Ray's own way of leaving a cluster crashes sometimes; here always."""
    file = sentray.recipe_file(tiny_recipe())
    sentray("run", file, "--only", "sentences")
    broken = "import atexit, os, ray; ray.shutdown = os.abort; atexit.register(os.abort)"
    found = subprocess.run(
        [sys.executable, "-c", f"{broken}; from pipeline.cli import command; command()",
         "run", file, "--only", "embed", "--address", sentray.address],
        cwd=sentray.folder, capture_output=True, text=True,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert "embed:t           done in" in found.stdout
    assert found.stdout.endswith("no results yet: the evaluation has not been made\n")
