"""`sentray doctor` on real machines with planted faults, and its judgement of told ones."""

import copy

import pytest
import yaml

from cluster.findings import findings
from cluster.settings import ClusterSettings
from pipeline.cli import main
from tests.support.nodes import Nodes, need_namespaces

GB = 10**9


def healthy(address, **changes):
    whole = {
        "address": address, "python": "3.11.7", "gpus": 0,
        "versions": {"ray": "2.60.0", "sentray": "0.1.0", "torch": "2.13.0"},
        "disks": {"/tmp": 50 * GB}, "shm": 8 * GB, "missing": [], "labels": {},
        "resources": {"CPU": 4.0}, "storage": {"written": True, "unread": []},
        "clock": {"time": 1000.5},
    }  # fmt: skip
    return copy.deepcopy(whole) | changes


POOL = {"gpu": {"cpus": 4, "gpus": 1, "nodes": [1, 2], "stages": {"train": {}}}}
LABELLED = {"labels": {"sentray-pool": "gpu"}, "resources": {"CPU": 4.0, "GPU": 1.0}, "gpus": 1}

# What the second of two machines tells, the cluster's pools, and what is found
FAULTS = {
    "storage of its own": (
        {"storage": {"written": True, "unread": ["a"]}}, {}, "do not see in the storage",
    ),
    "storage that refuses": (
        {"storage": {"written": False, "why": "AccessDenied", "unread": []}}, {},
        "cannot write the storage (AccessDenied)",
    ),
    "another torch": (
        {"versions": {"ray": "2.60.0", "sentray": "0.1.0", "torch": "2.9.0"}}, {},
        "torch is 2.9.0, elsewhere 2.13.0",
    ),
    "no Sentray": (
        {"versions": {"ray": "2.60.0", "sentray": None, "torch": "2.13.0"}}, {},
        "sentray is missing, elsewhere 0.1.0",
    ),
    "another Python": ({"python": "3.12.1"}, {}, "python is 3.12.1, elsewhere 3.11.7"),
    "a GPU that is not there": (
        {"resources": {"CPU": 4.0, "GPU": 1.0}}, {}, "Ray has 1 GPU(s) there, torch sees 0",
    ),
    "a GPU that nobody uses": ({"gpus": 1}, {}, "has 1 GPU(s), Ray knows of 0"),
    "a full disk": ({"disks": {"/tmp": GB // 10}}, {}, "/tmp has 0.1 GB free"),
    "little shared memory": ({"shm": 64 * 10**6}, {}, "/dev/shm has 0.06 GB"),
    "a clock an hour off": ({"clock": {"time": 4600.5}}, {}, "its clock is 3600 s off"),
    "a missing model": ({"missing": ["/mnt/models/a"]}, {}, "has no /mnt/models/a"),
    "no answer": ({"error": "no answer within 60 s"}, {}, "started no task (no answer"),
    "no machine of a pool": ({}, POOL, "0 machine(s) with the labels sentray-pool=gpu"),
    "a smaller machine than promised": (
        LABELLED | {"resources": {"CPU": 2.0, "GPU": 1.0}}, POOL, "has 2 CPU of the 4",
    ),
}  # fmt: skip


def judged(second, pools):
    nodes = [healthy("10.0.0.1"), healthy("10.0.0.3"), healthy("10.0.0.2", **second)]
    cluster = ClusterSettings.model_validate(
        {"address": "http://10.0.0.1:8265", "storage": "s3://b", "pools": pools}
    )
    return findings({"nodes": nodes, "begun": 1000.0, "ended": 1001.0}, cluster)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_one_line_with_its_mend(fault):
    second, pools, text = FAULTS[fault]
    (found,) = judged(second, pools)
    assert text in str(found)
    assert "\n" not in str(found)
    assert found.mend


def test_a_healthy_cluster_has_no_findings():
    assert judged({}, {}) == []
    assert judged(LABELLED, POOL) == []


def planted(folder):
    """What makes processes of a machine an hour late and its Ray and transformers older."""
    for name in ("ray-2.59.0", "transformers-4.0.0"):
        (folder / f"{name}.dist-info").mkdir(parents=True)
        package, _, version = name.partition("-")
        text = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
        (folder / f"{name}.dist-info" / "METADATA").write_text(text)
    late = "import time\nright = time.time\ntime.time = lambda: right() - 3600\n"
    (folder / "sitecustomize.py").write_text(late)
    return folder


@pytest.fixture
def broken(tmp_path):
    """Two machines: what one stores the other does not see, and the second lacks what it
    promises."""
    need_namespaces()
    mine = tmp_path / "mine"
    nodes = Nodes(tmp_path, private=[mine])
    try:
        nodes.start_head()
        (tmp_path / "full").mkdir()
        nodes.start_worker(
            2, num_cpus=1, options=("--num-gpus=1",), small=tmp_path / "full",
            PYTHONPATH=str(planted(tmp_path / "planted")),
        )  # fmt: skip
        yield nodes, mine
    finally:
        nodes.stop()


@pytest.mark.thorough
def test_ten_planted_faults_are_found_on_real_machines(
    broken, cluster_file, tiny_recipe, tmp_path, capfd, monkeypatch
):
    nodes, mine = broken
    monkeypatch.setenv("LAB_TOKEN", "another")
    corpus = mine / "corpus.txt"  # in a folder that machines have, with something else in it
    corpus.parent.mkdir(exist_ok=True)
    corpus.write_text("A sentence.\n" * 100)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tiny_recipe(f"sentences.path={corpus}")))
    pools = {"cpu": {"cpus": 8, "nodes": [1, 4], "stages": {"tokens": {}}}}
    file = cluster_file(
        address=nodes.dashboard, storage=str(mine), token_variable="LAB_TOKEN", pools=pools,
        shared=[str(mine)],
    )  # fmt: skip
    assert main(["doctor", "--cluster", file, str(recipe)]) == 2
    assert "token" in capfd.readouterr().err
    monkeypatch.setenv("LAB_TOKEN", nodes.token)
    assert main(["doctor", "--cluster", file, str(recipe)]) == 2
    out = capfd.readouterr().out
    assert "2 machine(s)" in out
    for text in (
        "10.77.5.1, 10.77.5.2: do not see in the storage what other machines have written",
        "10.77.5.2: Ray has 1 GPU(s) there, torch sees 0",
        "pool cpu: 0 machine(s) with the labels sentray-pool=cpu",
        f"10.77.5.2: {tmp_path}/full has 0.0 GB free",
        "10.77.5.2: /dev/shm has 0.07 GB",
        "10.77.5.2: its clock is 3600 s off",
        "10.77.5.2: ray is 2.59.0, elsewhere 2.60.0",
        "10.77.5.2: transformers is 4.0.0, elsewhere",
        f"10.77.5.2: has no {corpus}",
    ):
        assert text in out, out
