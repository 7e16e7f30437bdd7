"""Stages run on the machines of their pool, and what can never be placed is refused at once."""

import threading
from collections import Counter

import pytest
import yaml

from pipeline.run.placement import machines_for, place
from pipeline.run.pools import PoolSettings
from stages.contract import Resources, Stage, Workers
from stages.errors import UserError
from tests.support.recipes import setting


class Embedding(Stage):
    kind = "embed"

    def identity(self, inputs):
        return {}

    def resources(self):
        return Resources(cpus=1, gpu=True)


class Trains(Embedding):
    kind = "train"

    def __init__(self, **workers):
        self._workers = Workers(**workers)

    def resources(self):
        return Resources(workers=self._workers)


@pytest.fixture
def machines(monkeypatch):
    """Ray nodes that are alive: cores, GPUs and pool of each."""

    def start(*sizes):
        nodes = [
            {"Alive": True, "Resources": {"CPU": cpus, "GPU": gpus},
             "Labels": {"sentray-pool": pool}}
            for cpus, gpus, pool in sizes
        ]  # fmt: skip
        import ray

        monkeypatch.setattr(ray, "nodes", lambda: nodes)

    return start


def pools(**settings):
    return {"gpu": PoolSettings.model_validate({"cpus": 8, "gpus": 2} | settings)}


def test_without_pools_every_machine_counts(machines):
    machines((4.0, 0.0, "cpu"), (8.0, 0.0, "cpu"))
    found = place(Embedding(), "embed:t", {})
    assert (found.cpus, found.gpus, found.labels, found.slots) == (1, 0, {}, 12)
    assert place(Trains(count=3), "train", {}).cpus == 4


def test_small_encoders_share_a_gpu(machines):
    machines((8.0, 2.0, "gpu"), (64.0, 0.0, "cpu"))
    found = place(Embedding(), "embed:t", pools(stages={"embed": {"gpus": 0.25, "cpus": 0.5}}))
    assert (found.cpus, found.gpus, found.slots) == (0.5, 0.25, 8)
    assert found.labels == {"sentray-pool": "gpu"}
    assert place(Embedding(), "embed:t", pools(stages={"embed": {}})).slots == 2


def test_machines_that_an_autoscaler_may_start_count(machines):
    machines((4.0, 0.0, "cpu"))
    waiting = pools(nodes=[0, 3], stages={"embed": {}, "train": {}})
    assert place(Embedding(), "embed:t", waiting).slots == 6
    found = place(Trains(count=6, grouped=True), "train", waiting)
    assert (found.cpus, found.gpus, found.slots) == (4, 1, 6)


NEVER = {
    "no machine of the pool": (
        (4.0, 0.0, "cpu"), Embedding(), {"stages": {"embed": {}}},
        "its pool 'gpu' has no machine: none carries the labels sentray-pool=gpu; start some with "
        "`ray start --labels=sentray-pool=gpu`",
    ),
    "GPUs of a cluster with none": (
        (8.0, 0.0, "gpu"), Embedding(), {"stages": {"embed": {"gpus": 1.0}}},
        "fits on no machine of pool 'gpu' (1 machines: 8 cores, 0 GPUs)",
    ),
    "more workers than fit": (
        (8.0, 2.0, "gpu"), Trains(count=3, gpus=1), {"stages": {"train": {}}},
        "3 worker(s) with 2 core(s) and 1 GPU(s) each do not fit",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NEVER)
def test_what_can_never_be_placed_is_refused(machines, case):
    alive, stage, settings, message = NEVER[case]
    machines(alive)
    with pytest.raises(UserError) as error:
        place(stage, "a node", pools(**settings))
    assert str(error.value).startswith("a node: ")
    assert message in str(error.value)


def test_a_tenth_of_a_core_fits_ten_times(machines):
    machines((1.0, 0.0, "cpu"))
    found = machines_for(Embedding(), "embed:t", {})
    assert found.fitting(0.1, 0) == 10
    assert found.fitting(0, 0) > 100


WRONG = {
    "a process larger than its machine": (
        {"cpus": 4, "stages": {"embed": {"cpus": 8.0}}}, "more than one machine",
    ),
    "a GPU and a half": ({"cpus": 4, "gpus": 4, "stages": {"embed": {"gpus": 1.5}}}, "neither a"),
    "fewest above most": ({"cpus": 4, "nodes": [3, 1]}, "is not [fewest, most]"),
    "nothing at all": ({"cpus": 4, "nodes": [0, 0]}, "is not [fewest, most]"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_pools_are_named(case, tmp_path, sentray, tiny_recipe):
    settings, message = WRONG[case]
    (tmp_path / "pools.yaml").write_text(yaml.safe_dump({"pools": {"gpu": settings}}))
    file = sentray.recipe_file(tiny_recipe())
    err = sentray("run", file, "--pools", tmp_path / "pools.yaml", code=2)
    assert message in err
    assert "pools.yaml: line" in err


@pytest.fixture
def used(ray_cluster):
    """How often each Ray node was seen at work, by its pool, from now on."""
    import ray
    from ray._private.state import available_resources_per_node

    pool_of = {
        node["NodeID"]: node.get("Labels", {}).get("sentray-pool", "first") for node in ray.nodes()
    }
    seen, end = Counter(), threading.Event()

    def look():
        while not end.wait(0.05):
            for node, free in available_resources_per_node().items():
                seen[pool_of[node]] += free.get("CPU", 0) < 1

    watcher = threading.Thread(target=look)
    watcher.start()
    yield seen
    end.set()
    watcher.join()


KINDS = ("sentences", "embed", "tokens", "train", "evaluate", "export", "speed")


def test_a_run_stays_in_its_pool(sentray, tiny_recipe, tmp_path, used):
    whole = {"second": {"cpus": 1, "stages": {kind: {} for kind in KINDS}}}
    whole["second"]["stages"]["embedd"] = {}
    (tmp_path / "pools.yaml").write_text(yaml.safe_dump({"pools": whole}))
    recipe = tiny_recipe("train.max_steps=4", setting("evaluate.sts", []), "evaluate.speed=false")
    out = sentray("run", sentray.recipe_file(recipe), "--pools", tmp_path / "pools.yaml")
    assert "student after" in out
    assert "warning: pools: no stage is called 'embedd'; there are" in out
    assert used["second"] > 0
    assert used["first"] == 0


@pytest.mark.thorough
def test_trials_and_grouped_workers_stay_in_their_pool(
    sentray, tiny_recipe, tmp_path, inputs_made, used
):
    whole = {"second": {"cpus": 1, "stages": {"train": {"cpus": 0.5}}}}
    (tmp_path / "pools.yaml").write_text(yaml.safe_dump({"pools": whole}))
    recipe = tiny_recipe("train.max_steps=4", "train.engine=deepspeed", "train.num_workers=2")
    sentray.wait_for_idle()
    used.clear()
    sentray(
        "run", sentray.recipe_file(recipe), "--only", "train", "--pools", tmp_path / "pools.yaml"
    )
    assert used["second"] > 0
    assert used["first"] == 0
    used.clear()
    recipe = tiny_recipe("train.max_steps=4")
    recipe["search"] = {
        "space": {"train.learning_rate": {"grid": [1e-3, 2e-3]}}, "confirm": {"settings": 0},
    }  # fmt: skip
    search = sentray.recipe_file(recipe)
    process = sentray.start("tune", search, "--pools", tmp_path / "pools.yaml")
    sentray.wait(process, lambda: (tmp_path / "runs/tune/tiny/trials.jsonl").exists())
    sentray.wait(process, lambda: used["second"] > 5)
    assert used["first"] == 0
    process.kill()
    process.communicate()


def test_a_pool_without_machines_ends_the_run_before_it_begins(sentray, tiny_recipe, tmp_path):
    whole = {"gpu": {"cpus": 8, "gpus": 1, "stages": {"train": {}}}}
    (tmp_path / "pools.yaml").write_text(yaml.safe_dump({"pools": whole}))
    recipe = tiny_recipe()
    err = sentray("run", sentray.recipe_file(recipe), "--pools", tmp_path / "pools.yaml", code=2)
    assert "train: its pool 'gpu' has no machine" in err
    assert not (tmp_path / "runs" / "sentences").exists()
