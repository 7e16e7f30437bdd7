"""Clusters as files, and a real one: a head with a job server and a token, an S3 server."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.cli import main
from tests.support.nodes import HERE, Nodes, need_namespaces
from tests.support.s3 import s3_server


@pytest.fixture
def cluster_file(tmp_path: Path) -> Callable[..., str]:
    """Writes or changes clusters/lab.yaml of the test's folder; returns its path."""

    def write(**settings: Any) -> str:
        (tmp_path / "clusters").mkdir(exist_ok=True)
        file = tmp_path / "clusters" / "lab.yaml"
        whole = {"address": "http://127.0.0.1:8265", "storage": "s3://bucket/lab"}
        if file.exists():
            whole = yaml.safe_load(file.read_text())
        whole |= settings
        file.write_text(yaml.safe_dump(whole))
        return str(file)

    return write


@pytest.fixture(scope="session")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """A head of one core with a job server that wants a token; tests may add nodes."""
    need_namespaces()
    found = Nodes(tmp_path_factory.mktemp("nodes"))
    try:
        found.start_head()
        yield found
    finally:
        found.stop()


@pytest.fixture(scope="session")
def s3(nodes: Nodes) -> Iterator[str]:
    """Storage that all nodes share and nothing else does: `s3.format("folder")` is a root."""
    with s3_server(HERE) as root:
        yield root


@pytest.fixture
def lab(
    nodes: Nodes,
    s3: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cluster_file: Callable[..., str],
    capfd: pytest.CaptureFixture[str],
) -> Iterator[Callable[..., str]]:
    """`sentray` on a laptop, in a folder with a file about the cluster; returns what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAB_TOKEN", nodes.token)
    cluster_file(
        address=nodes.dashboard, storage=s3.format(tmp_path.name), token_variable="LAB_TOKEN",
        pass_variables=["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"],
    )  # fmt: skip

    def command(*arguments: object, code: int = 0) -> str:
        found = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        assert found == code, out + err
        return out + err

    yield command
    nodes.tidy()


@pytest.fixture
def lab_file(cluster_file: Callable[..., str]) -> Callable[..., str]:
    """Writes a cluster's file with pools and a section for every place; returns its path.

    Settings of `manifest.kuberay` and the like are given as `kuberay={...}`.
    """

    def write(**settings: Any) -> str:
        manifest = {place: settings.pop(place, {}) for place in ("kuberay", "slurm", "ray_up")}
        pools = {
            "cpu": {"cpus": 16, "memory_gb": 64, "nodes": [1, 8], "stages": {"embed": {}}},
            "gpu": {"cpus": 8, "gpus": 2, "memory_gb": 32.5, "nodes": [0, 4]},
        }
        usual: dict[str, Any] = {
            "kuberay": {"image": "registry.lab/sentray:1"},
            "slurm": {},
            "ray_up": {
                "provider": {"type": "aws", "region": "us-west-2"},
                "head": {"InstanceType": "m6i.xlarge"},
                "machines": {name: {"InstanceType": f"large-{name}"} for name in pools},
            },
        }
        whole = {"pools": pools} | settings
        whole["manifest"] = {
            place: None if given is None else usual[place] | given
            for place, given in manifest.items()
        }
        return cluster_file(**whole)

    return write


@pytest.fixture
def manifest(
    lab_file: Callable[..., str],
    tiny_recipe: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., str]:
    """`sentray manifest` of the tiny recipe in the test's folder; returns what it prints.

    What it made is in manifests/tiny.
    """
    monkeypatch.chdir(tmp_path)

    def command(
        place: str,
        *words: str,
        recipe: dict[str, Any] | None = None,
        code: int = 0,
        **settings: Any,
    ) -> str:
        lab_file(**settings)
        Path("recipe.yaml").write_text(yaml.safe_dump(recipe or tiny_recipe()))
        found = main(["manifest", "--for", place, "recipe.yaml", "--cluster", "lab", *words])
        out, err = capsys.readouterr()
        assert found == code, out + err
        return out + err

    return command
