"""Recipes submitted over HTTP with a token to a head with nothing of ours on its disk but a cache.

Storage is an S3 server; the head reaches it by its address in their network, and so do we.
"""

import os
import signal
import subprocess
import sys

import pytest
import yaml

from cluster.jobs import follow
from cluster.server import JobServer
from cluster.settings import load_cluster
from pipeline.recipe.read import load_recipe
from stages.files import Root
from tests.support.chat_server import ChatServer, Reply, rewrite_of
from tests.support.here import make_here
from tests.support.nodes import HERE
from tests.support.recipes import setting
from tests.support.secrets import EXTRA, SECRET, chat, left_by, process_list


def small(tiny_recipe, *overrides):
    recipe = tiny_recipe(
        "train.max_steps=4", "evaluate.speed=false", setting("evaluate.sts", []), *overrides
    )
    with open("recipe.yaml", "w") as file:
        yaml.safe_dump(recipe, file)
    return "recipe.yaml"


def made(out):
    return {line.split()[1] for line in out.splitlines() if line.endswith(" started")}


@pytest.fixture
def endpoint():
    def answer(sentence, *_):
        found.processes.append(process_list())
        return Reply(rewrite_of(sentence))

    found = ChatServer(answer, HERE)
    found.processes = []
    yield found
    found.stop()


@pytest.mark.thorough
def test_a_recipe_submitted_followed_and_pulled(
    lab, tiny_recipe, tmp_path, cluster_file, monkeypatch, endpoint, nodes, s3
):
    """The first one asks an endpoint with a secret, which nobody can read anywhere."""
    monkeypatch.setenv("GATEWAY_TOKEN", SECRET)
    cluster_file(pass_variables=["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "GATEWAY_TOKEN"])
    rewrites = setting("perturb", chat(base_url=endpoint.url, extra=EXTRA))
    out = lab("submit", small(tiny_recipe, rewrites), "--cluster", "lab")
    headers = {body["extra_headers"]["Authorization"] for body in endpoint.bodies}
    assert headers == {f"Bearer {SECRET}"}
    assert b"start.py" in endpoint.processes[-1]  # the job's command
    assert SECRET.encode() not in b"".join(endpoint.processes)
    assert "submitted tiny-" in out
    assert {"sentences", "embed:t", "train", "export"} <= made(out)
    assert "student after" in out
    job = out.partition("submitted ")[2].split()[0]

    out = lab("submit", "recipe.yaml", "--cluster", "lab")
    assert f"submitted {job}-2, which goes on after {job}" in out
    assert "nothing to do" in out
    assert not made(out)

    out = lab("submit", "--cluster=lab", "recipe.yaml", "run", "--set", "train.seed=7")
    assert made(out) == {"train", "export", "evaluate:after:size"}

    out = lab("jobs", "list", "--cluster", "lab")
    assert f"{job}-2" in out
    assert "succeeded" in out
    assert lab("jobs", "status", job, "--cluster", "lab").startswith(f"{job}: succeeded")
    out = lab("jobs", "logs", job, "--cluster", "lab")
    assert out.count("train             started") == 1
    assert lab("jobs", "stop", job, "--cluster", "lab", code=2).startswith(
        f"sentray: {job} has ended already: succeeded"
    )

    out = lab("pull", "tiny", "--cluster", "lab")
    assert "student after" in out
    assert (tmp_path / "pulled/tiny/report.html").is_file()
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(tmp_path / "pulled/tiny/student"))
    assert model.encode("A cat sleeps.").shape == (32,)
    stored = Root(s3.format(tmp_path.name))
    described = [job for job in JobServer(load_cluster("lab")).list_jobs() if job.runtime_env]
    assert len(described) >= 3
    assert not [job for job in described if "AWS_SECRET_ACCESS_KEY" in job.runtime_env["env_vars"]]
    places = [
        *left_by(tmp_path).values(), *left_by(nodes.folder).values(),
        *left_by(nodes.of_ray(1)).values(), *stored.read_all(stored.names("")),
        repr(described).encode(), out.encode(),
    ]  # fmt: skip
    assert len(places) > 100 and not [one for one in places if SECRET.encode() in one]
    lab("pull", "tiny", "--cluster", "lab")
    JobServer(load_cluster("lab")).delete_job(job)
    out = lab("submit", "recipe.yaml", "--cluster", "lab", "--detach")
    assert f"submitted {job}-3, which goes on after {job}-2" in out
    out = lab("pull", "tinny", "--cluster", "lab", code=2)
    assert "recipes run there: tiny" in out


def test_errors_of_a_job_are_those_of_the_command(lab, tiny_recipe):
    """The recipe names a file that is taken to be on the cluster, and is not."""
    file = small(tiny_recipe, "sentences.path=/mnt/nowhere/all.txt")
    out = lab("submit", file, "--cluster", "lab", code=2)
    assert "on the cluster: sentences.path /mnt/nowhere/all.txt" in out
    assert "sentray: sentences.path: there is no file or folder /mnt/nowhere/all.txt" in out
    assert "Traceback" not in out


def test_what_is_wrong_here_is_said_here(lab, tiny_recipe, monkeypatch, cluster_file, nodes):
    file = small(tiny_recipe)
    monkeypatch.setenv("LAB_TOKEN", "wrong")
    assert "this token is not" in lab("submit", file, "--cluster", "lab", code=2)
    monkeypatch.delenv("LAB_TOKEN")
    assert "LAB_TOKEN is not set" in lab("jobs", "list", "--cluster", "lab", code=2)
    cluster_file(token_variable=None, pass_variables=["NOT_SET_HERE"])
    monkeypatch.setenv("RAY_AUTH_TOKEN", nodes.token)
    out = lab("submit", file, "--cluster", "lab", code=2)
    assert "not set here: NOT_SET_HERE" in out
    out = lab("submit", file, "--address", nodes.dashboard, code=2)
    assert "--address needs --storage" in out


@pytest.mark.thorough
def test_a_job_that_is_stopped_saves_its_checkpoint_first(lab, tiny_recipe, s3, tmp_path):
    """Followed from here in a process that is frozen in between, as in a laptop that is closed."""
    root = Root(s3.format(tmp_path.name))
    file = small(tiny_recipe, "train.max_steps=100000", "train.checkpoint_every_steps=100000")
    make_here(load_recipe(file, [f"storage={root.uri}"]), "tokens", "embed:t")
    only_train = ("run", "--only", "train")
    command = ["submit", file, "--cluster", "lab", *only_train]
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline.cli", *command],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(os.environ),
    )  # fmt: skip
    lines = []

    def until(text):
        for line in process.stdout:
            lines.append(line)
            if text in line:
                return
        raise AssertionError("".join(lines))

    until("train             step")
    job = next(line.split()[1] for line in lines if line.startswith("submitted"))
    process.send_signal(signal.SIGSTOP)
    out = lab("submit", file, "--cluster", "lab", "--detach", *only_train)
    assert f"{job} is running already" in out
    out = lab("jobs", "stop", "tiny", "--cluster", "lab")
    assert "submit it again to go on" in out
    process.send_signal(signal.SIGCONT)
    rest, _ = process.communicate(timeout=120)
    assert "putting work away" in rest
    assert process.returncode != 0
    (work,) = root.list("work/train")
    assert [name for name in root.list(f"work/train/{work}") if name.startswith("step-")]


@pytest.mark.thorough
def test_following_goes_on_after_a_lost_connection(lab, tiny_recipe, nodes, s3, tmp_path):
    """The connection is cut twice; every line of the log is printed once."""
    server = JobServer(load_cluster("lab"))
    sentences = ("run", "--only", "sentences")
    out = lab("submit", small(tiny_recipe), "--cluster", "lab", "--detach", *sentences)
    job = out.partition("submitted ")[2].split()[0]
    text, cuts = [], []

    async def cut_off(job):
        async for part in tail(job):
            yield part
            if len(cuts) < 2:
                cuts.append(part)
                raise ConnectionError("cut off")

    tail = server.tail_job_logs
    server.tail_job_logs = cut_off
    follow(server, job, text.append)
    whole = "".join(part for part in text if not part.startswith("(connection lost"))
    assert whole == server.get_job_logs(job)
    assert len(cuts) == 2
