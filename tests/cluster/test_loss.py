"""Machines that are lost, and one that comes late: the job ends as if nothing had happened."""

import json
import os
import signal

import pytest
import yaml

from cluster.server import JobServer
from cluster.settings import load_cluster
from pipeline.store.manifest import read_manifest
from stages.files import Root
from stages.recipe import Recipe
from tests.support.command import wait_until
from tests.support.here import make_here
from tests.support.models import make_sentences
from tests.support.recipes import setting
from tune.trials import TrialLog

NUM_SHARDS = 30
# What a training needs
INPUTS = ("tokens", "embed:t")
ONLY_TRAIN = ("run", "--only", "train")


def until(job, happened):
    """Until something is so while a job runs; returns what `happened` did.

    Args:
        happened: called with the job's log.
    """
    server, found = JobServer(load_cluster("lab")), []

    def seen():
        log = server.get_job_logs(job)
        assert not server.job(job).status.is_terminal(), log
        found[:] = [happened(log)]
        return found[0]

    wait_until(seen, pause=0.3)
    return found[0]


@pytest.fixture
def uri(s3, tmp_path):
    return s3.format(tmp_path.name)


@pytest.fixture
def root(uri):
    return Root(uri)


@pytest.fixture
def recipe(lab, tiny_recipe, tmp_path):
    """Many shards and steps, so that a kill finds work half done, and nothing is evaluated but
    sizes. Written as recipe.yaml."""
    text = tmp_path / "many.txt"
    text.write_text("\n".join(make_sentences(64 * NUM_SHARDS)) + "\n")

    def write(*overrides):
        whole = tiny_recipe(
            f"sentences.path={text}", "sentences.rows_per_shard=64", "train.max_steps=60",
            "train.checkpoint_every_steps=5", "evaluate.speed=false", "evaluate.sts=[]",
            "ranks={corpus_size: 500, dimensions: 32}", "teachers.0.similarity=ranks", *overrides,
        )  # fmt: skip
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(whole))
        return whole

    return write


def submitted(lab, *arguments):
    out = lab("submit", "recipe.yaml", "--cluster", "lab", "--detach", *arguments)
    return out.partition("submitted ")[2].split()[0].rstrip(",")


def contents(root):
    """What every artifact holds, by its folder: digests of its files."""
    found = {}
    for kind in ("sentences", "embed", "tokens", "corpus", "ranks", "train"):
        for folder in root.list(kind):
            manifest = read_manifest(root.read(f"{kind}/{folder}/manifest.json"))
            files = [file for shard in manifest.shards for file in shard.files.values()]
            found[f"{kind}/{folder}"] = sorted(
                file.sha256 for file in [*files, *manifest.files.values()]
                if "metrics" not in file.path
            )  # fmt: skip
    return found


def make_at(storage, whole, *names):
    """Makes in this process what these nodes need, and them; returns a recipe with that storage."""
    recipe = whole | {"storage": str(storage)}
    of_a_run = {key: value for key, value in recipe.items() if key != "search"}
    make_here(Recipe.model_validate(of_a_run), *names)
    return recipe


def check_made(root, alone):
    """All that an undisturbed run has made is there, and is the same."""
    expected, found = contents(Root(str(alone))), contents(root)
    assert {folder: found.get(folder) for folder in expected} == expected


def records(root, kind):
    """Finished shards of a kind of artifact, and when each was written."""
    from pyarrow import fs

    found = root.fs.get_file_info(
        fs.FileSelector(root.path(kind), recursive=True, allow_not_found=True)
    )
    return {i.path: i.mtime_ns for i in found if i.path.endswith(".json") and "/shards/" in i.path}


WORKER = ("--labels=sentray-pool=work",)


@pytest.mark.thorough
def test_machines_lost_while_they_embed_and_while_one_trains(
    lab, nodes, root, recipe, tmp_path, cluster_file
):
    """Two machines embed, one trains. One that is at it goes, another comes. What was finished is
    not made again."""
    cluster_file(pools={"work": {"cpus": 1, "nodes": [2, 2], "stages": {"embed": {}, "train": {}}}})
    whole = recipe("train.max_steps=400", "train.checkpoint_every_steps=20")
    machines = [2, 3]
    for number in machines:
        nodes.start_worker(number, options=WORKER)
    job = submitted(lab)

    def lose_one(title):
        victim = one_at_work(nodes, machines, job, title)
        nodes.kill(victim)
        machines[machines.index(victim)] = victim + 2
        # While it joins, work goes on, and may end, on the other.
        nodes.start_worker(victim + 2, options=WORKER, wait=False)

    until(job, lambda log: len(records(root, "embed")) > 3)
    finished = records(root, "embed")
    lose_one("ShardActor")
    until(job, lambda log: checkpoints(root))
    lose_one("_make_there")
    lab("jobs", "logs", job, "--cluster", "lab")
    nodes.tidy()
    made = records(root, "embed")
    assert finished.items() <= made.items()
    print(len(finished), "shards of", len(made), "were there when the first machine was lost")
    make_at(tmp_path / "undisturbed", whole, "train")
    check_made(root, tmp_path / "undisturbed")


def is_working(title, word):
    """Whether a process makes something, and how: ShardActor, shards side by side (embed, perturb,
    tokens, ranks); _make_there, a stage in one process (corpus, evaluate, export, a training
    without others); RayTrainWorker. Ray's own have such titles too."""
    return title.startswith("ray::") and word in title


def one_at_work(nodes, machines, job, word):
    """A machine with such a process, once there is one."""

    def at_it(log):
        return [
            number
            for number in machines
            if any(is_working(title, word) for title in nodes.titles(number))
        ]

    return until(job, at_it)[0]


def checkpoints(root):
    return [
        step
        for folder in root.list("work/train")
        for step in root.list(f"work/train/{folder}")
        if root.exists(f"work/train/{folder}/{step}/complete.json")
    ]


@pytest.mark.long
def test_two_training_workers_lose_a_machine(lab, nodes, uri, root, recipe, tmp_path, sentray):
    """One DeepSpeed worker on each; the lost machine is missed aloud, replaced by another, training
    goes on there, and the student is the same."""
    whole = recipe(
        "train.num_workers=2", "train.cpus_per_worker=1", "train.zero_stage=2",
        "train.max_steps=40", "teachers.0.similarity=cosine",
    )  # fmt: skip
    make_at(uri, whole, *INPUTS)
    nodes.start_worker(2)
    job = submitted(lab, *ONLY_TRAIN)
    until(job, lambda log: checkpoints(root))
    nodes.kill(2)
    until(job, lambda log: "there is room for 1 of 2 workers of 1 core(s)" in log)
    nodes.start_worker(3)
    out = lab("jobs", "logs", job, "--cluster", "lab")
    nodes.tidy()
    assert "goes on after step" in out
    assert "train             done in" in out
    alone = make_at(tmp_path / "undisturbed", whole, *INPUTS)
    sentray("run", sentray.recipe_file(alone), "--only", "train")
    check_made(root, tmp_path / "undisturbed")


@pytest.mark.thorough
def test_a_machine_that_joins_late_is_used_and_may_leave_as_the_last(
    lab, nodes, uri, root, recipe, cluster_file
):
    """The work is for minutes, longer than a machine takes to join. Machines that are taken away
    with notice are let go in the midst of it though there is no other. One that comes later goes
    on; nothing that is there is made again."""
    cluster_file(pools={"work": {"cpus": 1, "nodes": [1, 2], "stages": {"embed": {}}}})
    make_at(uri, recipe("sentences.rows_per_shard=4"), "sentences")
    nodes.start_worker(2, options=WORKER)
    job = submitted(lab, "run", "--only", "embed")
    until(job, lambda log: records(root, "embed"))
    nodes.start_worker(3, options=WORKER)
    one_at_work(nodes, [3], job, "ShardActor")
    nodes.leave(2)
    nodes.leave(3)
    before = records(root, "embed")
    assert len(before) < len(records(root, "sentences"))
    nodes.start_worker(4, options=WORKER)
    until(job, lambda log: len(records(root, "embed")) > len(before))
    lab("jobs", "stop", job, "--cluster", "lab")
    assert before.items() <= records(root, "embed").items()


@pytest.mark.thorough
def test_the_head_lost_in_the_middle(lab, nodes, uri, root, recipe, tmp_path):
    """A new cluster knows nothing of the job; the same command goes on with it."""
    whole = recipe("train.max_steps=200", "train.checkpoint_every_steps=20")
    make_at(uri, whole, "tokens", "ranks:t")
    job = submitted(lab, *ONLY_TRAIN)
    until(job, lambda log: checkpoints(root))
    nodes.kill(1)
    nodes.start_head()
    out = lab("jobs", "logs", job, "--cluster", "lab", code=2)
    assert "knows no job or recipe" in out
    out = lab("submit", "recipe.yaml", "--cluster", "lab", *ONLY_TRAIN)
    assert f"submitted {job}\n" in out
    assert "goes on after step" in out
    make_at(tmp_path / "undisturbed", whole, "train")
    check_made(root, tmp_path / "undisturbed")


@pytest.mark.long
def test_two_people_submit_the_same_at_once_and_the_one_that_trains_is_killed(
    lab, nodes, uri, root, recipe, tmp_path, monkeypatch
):
    whole = recipe("train.max_steps=1000", "train.checkpoint_every_steps=50")
    make_at(uri, whole, "tokens", "ranks:t")
    monkeypatch.setenv("LOGNAME", "ann")
    first = submitted(lab, *ONLY_TRAIN)
    until(first, lambda log: "train             started" in log)
    monkeypatch.setenv("LOGNAME", "bob")
    second = submitted(lab, *ONLY_TRAIN)
    assert first != second
    until(second, lambda log: checkpoints(root) and "waits for" in log)
    os.kill(int(JobServer(load_cluster("lab")).job(first).driver_info.pid), signal.SIGKILL)
    out = lab("jobs", "logs", second, "--cluster", "lab")
    assert "train             takes over from" in out
    assert "train             done in" in out
    lab("jobs", "status", first, "--cluster", "lab")
    make_at(tmp_path / "undisturbed", whole, "train")
    check_made(root, tmp_path / "undisturbed")


@pytest.mark.parametrize(
    ("workers", "process"),
    [
        pytest.param(1, "_make_there", marks=pytest.mark.thorough),
        pytest.param(2, "RayTrainWorker", marks=pytest.mark.long),
    ],
)
def test_a_machine_that_leaves_with_notice_loses_nothing(
    lab, nodes, uri, root, recipe, cluster_file, workers, process
):
    """What a power cut costs a notice does not: no step is made twice. The training lasts until
    that is seen, however fast a machine is; then the job is stopped."""
    cluster_file(pools={"work": {"cpus": 1, "nodes": [2, 2], "stages": {"train": {}}}})
    whole = recipe(
        f"train.num_workers={workers}", "train.cpus_per_worker=1", "train.max_steps=100000",
        "train.log_every_steps=1", "train.checkpoint_every_steps=400", "train.dev.every_steps=1",
        "teachers.0.similarity=cosine",
    )  # fmt: skip
    make_at(uri, whole, *INPUTS)
    machines = range(2, 3 + workers)  # a spare: another takes long to join
    for number in machines:
        nodes.start_worker(number, options=WORKER)
    job = submitted(lab, *ONLY_TRAIN)
    until(job, lambda log: "step " in log)
    nodes.leave(one_at_work(nodes, machines, job, process))
    taken_away = "train             its machine is taken away"
    until(job, lambda log: "step " in log.partition(taken_away)[2])
    lab("jobs", "stop", job, "--cluster", "lab")

    record = f"history/tiny/{root.list('history/tiny')[-1]}/log"
    files = [root.read(f"{record}/{name}") for name in root.list(record)]
    said = [json.loads(line) for file in files for line in file.splitlines()]
    steps = [one["figures"]["step"] for one in said if "step" in one.get("figures", ())]
    assert sorted(steps) == list(range(1, len(steps) + 1)), "some were made again, or not told of"


@pytest.mark.long
def test_a_search_loses_a_machine_and_then_its_head(
    lab, nodes, uri, root, recipe, sentray, tmp_path, cluster_file
):
    """Trials on three machines. One leaves with notice, one is lost, the search goes on with the
    third, and then that is lost with the head. In the end each trial has the score of an
    undisturbed search, and what had ended was not trained again. No checkpoint is due but those
    that the notice brings."""
    cluster_file(pools={"work": {"cpus": 1, "nodes": [3, 3], "stages": {"train": {}}}})
    rates = [1e-4, 1e-3, 3e-3, 1e-2]
    search = {
        "space": {"train.learning_rate": {"grid": rates}}, "confirm": {"settings": 0},
        "scheduler": "none",  # what others stop early depends on the order
    }  # fmt: skip
    whole = recipe(
        setting("search", search), "train.max_steps=1000", "train.checkpoint_every_steps=100000",
        "teachers.0.similarity=cosine", "train.cpus_per_worker=1",
    )  # fmt: skip
    make_at(uri, whole, *INPUTS)
    machines = [2, 3, 4]
    for number in machines:
        nodes.start_worker(number, options=WORKER)
    job = submitted(lab, "tune")

    def ended():
        return {one.fingerprint: one for one in TrialLog(root, "tune/tiny")}

    def training():
        return [n for n in machines if any("ResourceTrainable.train" in t for t in nodes.titles(n))]

    until(job, lambda log: training() == machines)
    nodes.leave(2)
    assert checkpoints(root)
    nodes.kill(3)
    machines, before = [4], ended()
    until(job, lambda log: training() == machines and len(ended()) > len(before))
    for number in (1, 4):
        nodes.kill(number)
    before = ended()
    nodes.start_head()
    for number in (5, 6):
        nodes.start_worker(number, options=WORKER)
    out = lab("submit", "recipe.yaml", "--cluster", "lab", "tune")
    nodes.tidy()
    assert f"submitted {job}\n" in out
    now = ended()
    assert len(before) < len(now) == len(rates)
    assert {key: now[key] for key in before} == before
    print("trials that had ended before the head was lost:", len(before))
    alone = make_at(tmp_path / "undisturbed", whole, *INPUTS)
    sentray("tune", sentray.recipe_file(alone))
    undisturbed = TrialLog(Root(str(tmp_path / "undisturbed")), "tune/tiny")
    assert {key: one.score for key, one in now.items()} == {
        one.fingerprint: one.score for one in undisturbed
    }
