"""What a cluster's file may not say, and how it is found."""

import pytest

from cluster.settings import load_cluster, unprepared
from stages.errors import UserError

WRONG = {
    "no scheme": ({"address": "head:8265"}, "not the address of a dashboard"),
    "Ray's own protocol": ({"address": "ray://head:10001"}, "not the address of a dashboard"),
    "no port": ({"address": "http://head:99999"}, "its port is not one"),
    "a password in it": ({"address": "http://ann:secret1@head:8265"}, "credentials do not belong"),
    "a folder of this machine": ({"storage": "runs"}, "'runs' is a folder of this machine"),
    "a key in the storage": ({"storage": "s3://KEY:SECRET@bucket/x"}, "credentials do not belong"),
    "a secret as it is": ({"variables": {"HF_TOKEN": "hf_abc123"}}, "HF_TOKEN looks like a secret"),
    "a key as it is": (
        {"variables": {"AWS_SECRET_ACCESS_KEY": "abc123"}}, "AWS_SECRET_ACCESS_KEY looks like",
    ),
    "a value to pass": ({"pass_variables": ["HF_TOKEN=hf_abc123"]}, r"'HF_TOKEN=\*+' is not the n"),
    "a token as it is": ({"token_variable": "abc-abc123"}, r"'abc\*+' is not the name of an"),
    "a secret to pass": ({"pass_variables": ["hf-abc123"]}, r"'hf-\*+' is not the name of an"),
    "no bucket": ({"storage": "s3://"}, "names no bucket"),
    "no Python": ({"python": ""}, "python: String should match"),
    "a machine of any size": (
        {"pools": {"a": {"cpus": 1, "memory_gb": 1e308}}}, "memory_gb: .* less than or equal",
    ),
    "a number": ({"variables": {"OMP_NUM_THREADS": 4}}, "valid string"),
    "a relative shared folder": ({"shared": ["data"]}, "'data' is not an absolute path"),
    "a typing error": ({"storag": "s3://b"}, "did you mean 'storage'"),
    "more than Ray takes": ({"upload_limit_mb": 500}, "less than or equal to 100"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings_are_named_with_their_line(cluster_file, case):
    settings, message = WRONG[case]
    file = cluster_file(**settings)
    with pytest.raises(UserError, match=message) as error:
        load_cluster(file)
    assert f"cluster {file}: line " in str(error.value)
    assert "abc123" not in str(error.value)
    assert "secret1" not in str(error.value)


def test_a_cluster_is_found_by_name(cluster_file, tmp_path, monkeypatch):
    cluster_file(pass_variables=["AWS_ACCESS_KEY_ID"], variables={"TOKENIZERS_PARALLELISM": "no"})
    monkeypatch.chdir(tmp_path)
    assert load_cluster("lab").storage == "s3://bucket/lab"
    with pytest.raises(UserError, match=r"there is no file clusters/lba.yaml; there are lab"):
        load_cluster("lba")


def test_an_unprepared_cluster_needs_a_storage_that_machines_share():
    assert unprepared("http://head:8265/", "/shared/runs").address == "http://head:8265"
    with pytest.raises(UserError, match="--storage 'runs' is a folder of this machine"):
        unprepared("http://head:8265", "runs")
    with pytest.raises(UserError, match="--address 'head' is not the address"):
        unprepared("head", "/shared/runs")
