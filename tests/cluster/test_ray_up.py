"""Ray's autoscaler file, read as `ray up` reads it."""

import copy
from pathlib import Path

import pytest
import yaml


def read(file="manifests/tiny/ray-up.yaml"):
    return yaml.safe_load(Path(file).read_text())


def prepared(config):
    """The file with Ray's defaults, checked by Ray."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    found = prepare_config(copy.deepcopy(config))
    validate_config(found)
    return found


@pytest.mark.parametrize("image", [None, "registry.lab/sentray:1"])
def test_ray_takes_the_file(manifest, image):
    manifest("ray-up", ray_up={"image": image, "setup": ["pip install 'sentray'"]}, stop_seconds=40)
    config = prepared(read())
    assert config["cluster_name"] == "lab"
    kinds = config["available_node_types"]
    assert kinds["head"]["resources"] == {"CPU": 0}
    assert kinds["cpu"]["node_config"] == {"InstanceType": "large-cpu"}
    gpu = kinds["gpu"]
    assert (gpu["min_workers"], gpu["max_workers"]) == (0, 4)
    assert gpu["resources"] == {"CPU": 8, "GPU": 2}
    assert gpu["labels"] == {"sentray-pool": "gpu"}
    assert config["max_workers"] == 12
    assert "pip install 'sentray'" in config["worker_setup_commands"]
    assert "RAY_JOB_STOP_WAIT_TIME_S=40" in config["head_start_ray_commands"][-1]


def test_ray_s_check_sees_mistakes(manifest):
    from jsonschema import ValidationError

    manifest("ray-up")
    config = read()
    config["available_node_types"]["gpu"]["lables"] = {}
    with pytest.raises(ValidationError, match="lables"):
        prepared(config)


def test_ray_start_takes_the_options(manifest):
    """By Ray's own parser, which starts nothing here."""
    import shlex

    from ray.scripts.scripts import start

    manifest("ray-up")
    config = read()
    for role in ("head", "worker"):
        command = config[f"{role}_start_ray_commands"][-1].rpartition("ray start ")[2]
        start.make_context("_", shlex.split(command))


def test_the_recipe_is_submitted_with_its_options(manifest):
    out = manifest("ray-up", "--set", "train.seed=7", "--only", "embed")
    assert "sentray submit recipe.yaml --cluster lab run --only=embed --set=train.seed=7" in out
    assert "ray up manifests/tiny/ray-up.yaml" in out
