"""The SLURM script: run by bash, with stand-ins for `srun`, `scontrol` and `ray`.

The stand-in `srun` starts real processes, one for each of two nodes; on the first, the stand-in
`ray` runs the command that Ray's head would run, on the second it waits for its end as Ray does.
"""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from cluster.manifests.settings import SlurmSettings
from cluster.manifests.slurm import slurm
from cluster.package import Package
from cluster.settings import ClusterSettings
from tests.support.command import wait_until

POOL = {"cpus": 8, "gpus": 2, "memory_gb": 32.5, "nodes": [2, 2]}
STAND_INS = {
    "hostname": 'echo "10.1.2.3 fe80::1"',
    "scontrol": 'echo "$@" >>"$LOGS/scontrol"',
    "srun": """
        while [[ $1 == --* ]]; do echo "$1" >>"$LOGS/srun"; shift; done
        for node in 0 1; do SLURM_PROCID=$node "$@" & pids+=($!); done
        trap 'kill -TERM "${pids[@]}"' TERM
        worst=0
        for pid in "${pids[@]}"; do wait "$pid" || worst=$?; done
        exit $worst
    """,
    "ray": """
        if [[ $SLURM_PROCID == 1 ]]; then
            trap 'touch "$LOGS/worker-ended-early"; exit 1' TERM
            while [[ ! -e $LOGS/over ]]; do sleep 0.1; done
            exit 0
        fi
        printf '%s\\n' "$@" >"$LOGS/ray"
        if [[ -e $LOGS/broken ]]; then touch "$LOGS/over"; exit 0; fi  # as symmetric-run does
        while [[ $1 != -- ]]; do shift; done
        shift
        "$@"
        code=$?
        touch "$LOGS/over"
        exit $code
    """,
}
# In place of start.py: says what it was given, ends as it is told to, puts work away on SIGTERM.
START = """
import json, os, signal, sys, time
from pathlib import Path
logs = Path(os.environ["LOGS"])
def stop(number, frame):
    time.sleep(1)
    (logs / "put-away").write_text(str((logs / "worker-ended-early").exists()))
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
state = Path(os.environ["RAY_AUTH_TOKEN_PATH"]).parent
(logs / "others").write_text(oct(state.stat().st_mode & 0o77))
(logs / "environment").write_text(json.dumps(dict(os.environ)))
if (logs / "code").exists():
    sys.exit(int((logs / "code").read_text()))
while True:
    time.sleep(0.1)
"""


class Job:
    """A batch job in a folder of its own."""

    def __init__(self, folder, **settings):
        self.folder, self.logs = folder / "job", folder / "logs"
        self.logs.mkdir()
        cluster = ClusterSettings.model_validate(
            {"storage": "/shared", "pools": {"gpu": POOL}} | settings
        )
        made = slurm(Package("tiny", ["run"]), cluster, cluster.manifest.slurm or SlurmSettings())
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as archive:
            archive.writestr("start.py", START)
            archive.writestr("job.json", "{}")
        (package,) = (name for name in made.files if name.endswith(".zip"))
        made.files[package] = content.getvalue()
        made.write(self.folder)
        self.script = (self.folder / "job.sh").read_text()
        commands = folder / "bin"
        commands.mkdir()
        for name, text in STAND_INS.items():
            (commands / name).write_text(f"#!/bin/bash\n{text}")
            (commands / name).chmod(0o755)
        (commands / "python").symlink_to(sys.executable)
        self.environment = os.environ | {
            "PATH": f"{commands}:{os.environ['PATH']}", "LOGS": str(self.logs),
            "SLURM_JOB_ID": "42", "SLURM_JOB_NUM_NODES": "2",
            "SLURM_SUBMIT_DIR": str(self.folder),
        }  # fmt: skip

    def start(self):
        return subprocess.Popen(
            ["bash", str(self.folder / "job.sh")], cwd="/", env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self):
        process = self.start()
        out, _ = process.communicate(timeout=60)
        return process.returncode, out

    def started(self):
        wait_until((self.logs / "environment").exists)


@pytest.mark.parametrize("code", [0, 2, 75])
def test_the_exit_code_is_handed_through(tmp_path, code):
    job = Job(tmp_path)
    (job.logs / "code").write_text(str(code))
    assert job.run()[0] == code
    assert not list(job.folder.glob("state-*"))
    assert not (job.logs / "scontrol").exists()


def test_a_stopped_job_puts_its_work_away_while_its_workers_are_there(tmp_path):
    job = Job(tmp_path)
    process = job.start()
    job.started()
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 75, out
    assert (job.logs / "put-away").read_text() == "False"
    assert not (job.logs / "scontrol").exists()


def test_a_job_whose_time_is_up_is_queued_again(tmp_path):
    job = Job(tmp_path, stop_seconds=40)
    assert "#SBATCH --signal=B:USR1@100\n" in job.script
    process = job.start()
    job.started()
    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 75, out
    assert (job.logs / "put-away").exists()
    assert (job.logs / "scontrol").read_text() == "requeue 42\n"


def test_ray_that_does_not_start_is_a_failure(tmp_path):
    """`ray symmetric-run` ends with 0 where `ray start` failed."""
    job = Job(tmp_path)
    (job.logs / "broken").touch()
    code, out = job.run()
    assert code == 1
    assert "Ray did not start" in out


def test_the_job_has_its_variables_its_own_token_and_an_address(tmp_path, monkeypatch):
    hostile = {
        "PLAIN": "a", "state": "x", "step": "-1", "QUOTES": "'\"\\ $(touch x) `touch x` ${HOME} !",
        "LINES": "a\nb\n", "WIDE": "\u00e9\U0001f600", "DASH": "--flag", "EMPTY": "",
    }  # fmt: skip
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "value-of-the-key")
    job = Job(tmp_path, variables=hostile, pass_variables=["AWS_SECRET_ACCESS_KEY"])
    assert "value-of-the-key" not in job.script
    (job.logs / "code").write_text("0")
    assert job.run()[0] == 0
    found = json.loads((job.logs / "environment").read_text())
    assert {name: found[name] for name in hostile} == hostile
    assert found["AWS_SECRET_ACCESS_KEY"] == "value-of-the-key"
    assert found["RAY_ADDRESS"] == "10.1.2.3:6379"
    assert found["RAY_AUTH_MODE"] == "token"
    assert (job.logs / "others").read_text() == "0o0"
    assert found["PYTHONPATH"].split(":")[0] == f"{job.folder}/state-42/package"
    assert "RAY_AUTH_TOKEN" not in job.script.replace("RAY_AUTH_TOKEN_PATH", "")
    assert "--nodes=2" in (job.logs / "srun").read_text()


@pytest.mark.parametrize("case", ["variable", "folder"])
def test_what_is_missing_is_said(tmp_path, case):
    job = Job(tmp_path, pass_variables=["NOT_SET_HERE"] if case == "variable" else [])
    if case == "folder":
        job.environment["SLURM_SUBMIT_DIR"] = str(tmp_path)
    code, out = job.run()
    assert code == 2
    assert {"variable": "NOT_SET_HERE is not set", "folder": "call sbatch in the"}[case] in out


def test_ray_takes_the_options(tmp_path):
    """By Ray's own parsers, which start nothing here."""
    from ray.scripts.scripts import start
    from ray.scripts.symmetric_run import symmetric_run

    labels = {"example.com/kind": "gpu", "zone": "a.b_c"}
    job = Job(tmp_path, pools={"gpu": POOL | {"labels": labels}})
    (job.logs / "code").write_text("0")
    job.run()
    words = (job.logs / "ray").read_text().splitlines()
    assert words[0] == "symmetric-run"
    options = words[1 : words.index("--")]
    context = symmetric_run.make_context("_", options, resilient_parsing=True)
    assert context.params["address"] == "10.1.2.3:6379"
    assert context.params["min_nodes"] == 2
    rest = list(context.params["ray_args_and_entrypoint"])
    found = start.make_context("_", ["--head", *rest]).params
    assert (found["num_cpus"], found["num_gpus"]) == (8, 2)
    assert dict(part.split("=") for part in found["labels"].split(",")) == labels


# Each node in its namespaces: it sees its own network, processes and /tmp/ray, and a shared disk.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for number in {numbers}; do
    ip netns exec sentray-$number unshare --mount --pid --fork --kill-child --mount-proc \\
        bash -c 'mount -t tmpfs tmpfs /tmp/ray; exec "$@"' node "$@" >>"$LOGS/$number" 2>&1 &
done
wait
"""


@pytest.mark.thorough
def test_ray_itself_starts_on_two_nodes(nodes, manifest, tmp_path, monkeypatch):
    """`ray symmetric-run` and all that follows."""
    names = [nodes.add_network(number) for number in (8, 9)]
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "srun").write_text(SRUN.format(numbers="8 9"))
    (commands / "srun").chmod(0o755)
    kinds = ("sentences", "embed", "tokens", "train", "evaluate", "export")
    pool = {"cpus": 1, "nodes": [2, 2], "stages": {kind: {} for kind in kinds}}
    manifest("slurm", pools={"work": pool}, storage=str(tmp_path / "shared"))
    job = tmp_path / "manifests/tiny"
    done = subprocess.run(
        ["ip", "netns", "exec", names[0], "bash", str(job / "job.sh")], cwd=job,
        env=os.environ | {
            "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "LOGS": str(tmp_path), "SLURM_JOB_ID": "42", "SLURM_JOB_NUM_NODES": "2",
            "SLURM_SUBMIT_DIR": str(job),
        },
    )  # fmt: skip
    logs = {number: (tmp_path / str(number)).read_text() for number in (8, 9)}
    assert done.returncode == 0, logs[8]
    assert "student after" in logs[8]
    assert "On worker node" in logs[9], logs[9]
    assert not list(job.glob("state-*"))


def test_pools_and_settings_become_directives(manifest):
    pool = POOL | {"nodes": [0, 4]}
    manifest("slurm", pools={"gpu": pool}, slurm={
        "partition": "a100", "account": "ml", "time": "1-00:00:00", "modules": ["python/3.11"],
        "venv": "/shared/my venv",
    })  # fmt: skip
    script = Path("manifests/tiny/job.sh").read_text()
    found = {line.removeprefix("#SBATCH ") for line in script.splitlines() if "#SBATCH" in line}
    assert found >= {
        "--nodes=1-4", "--cpus-per-task=8", "--gpus-per-node=2", "--mem=30994M", "--exclusive",
        "--requeue", "--partition=a100", "--account=ml", "--time=1-00:00:00",
    }  # fmt: skip
    assert script.index("#SBATCH") < script.index("set -eo")
    assert "venv='/shared/my venv'" in script
    (package,) = Path("manifests/tiny").glob("*.zip")
    with zipfile.ZipFile(package) as archive:
        assert {"start.py", "job.json", "recipes/tiny.yaml", "pipeline/cli.py"} <= set(
            archive.namelist()
        )


def test_nodes_of_several_kinds_are_refused(manifest):
    assert "SLURM gives a script nodes of one kind" in manifest("slurm", code=2)


def test_shellcheck_finds_nothing(tmp_path):
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    job = Job(
        tmp_path, variables={"A": "'\"$(x)\n"}, pass_variables=["B"],
        manifest={"slurm": {"modules": ["a b", "c"], "venv": "/v"}},
    )  # fmt: skip
    done = subprocess.run(
        ["shellcheck", str(job.folder / "job.sh")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
