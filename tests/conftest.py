"""Shared by all tests: tiny models made here, real data when it is there, one Ray cluster."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tests.support.environment  # noqa: F401 - before what imports numpy
from tests.support import REPOSITORY
from tests.support.command import Sentray
from tests.support.models import make_model
from tests.support.recipes import overridden, tiny, write_recipe
from tests.support.s3 import s3_server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests that need the Ray cluster: `-m "not ray"` leaves the quick ones."""
    for item in items:
        if "ray_cluster" in getattr(item, "fixturenames", ()):
            item.add_marker("ray")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Real data: SENTRAY_DATA, or a folder beside the checkout; its tests need it."""
    place = Path(os.environ.get("SENTRAY_DATA", REPOSITORY.parent / "shared" / "data"))
    if not place.is_dir():
        pytest.skip("no real data: set SENTRAY_DATA to run this test")
    return place


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """Golden values of the formulas, when the file is there."""
    file = REPOSITORY.parent / "shared" / "golden" / "losses.json"
    if not file.is_file():
        pytest.skip("no golden values beside the checkout")
    return dict(json.loads(file.read_text()))


@pytest.fixture(scope="session")
def teacher_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "teacher", layers=3, width=48, seed=1)


@pytest.fixture(scope="session")
def student_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "student", layers=2, width=32, seed=2)


@pytest.fixture
def tiny_recipe(
    tmp_path: Path, teacher_folder: Path, student_folder: Path
) -> Callable[..., dict[str, Any]]:
    """Builds the tiny recipe as plain data, overridden as on the command line.

    `tiny_recipe("train.batch_size=8", setting("teachers", []))`
    """

    def build(*overrides: str) -> dict[str, Any]:
        recipe = tiny(tmp_path, teacher_folder, student_folder)
        file = tmp_path / "tiny.yaml"
        write_recipe(file, recipe)
        return overridden(file, overrides)

    return build


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """A real cluster of two Ray nodes (a core each) on this machine; the address to join.

    The second one is the pool `second`.

    This process joins it once. Commands in this process use that session, so Ray's workers stay,
    and what they have imported stays with them.
    """
    import ray
    from ray.cluster_utils import Cluster

    from pipeline.run.session import ray_session

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    cluster.add_node(num_cpus=1, labels={"sentray-pool": "second"})
    cluster.wait_for_nodes()
    with ray_session(cluster.address):
        yield cluster.address
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def sentray(tmp_path: Path, ray_cluster: str) -> Sentray:
    """Commands in the test's folder, on the cluster."""
    return Sentray(tmp_path, ray_cluster)


@pytest.fixture(scope="session")
def made_once(
    ray_cluster: str,
    tmp_path_factory: pytest.TempPathFactory,
    teacher_folder: Path,
    student_folder: Path,
) -> Path:
    """A storage with everything of the tiny recipe that is made before training."""
    folder = tmp_path_factory.mktemp("made")
    sentray = Sentray(folder, ray_cluster)
    file = sentray.recipe_file(tiny(folder, teacher_folder, student_folder))
    for stage in ("sentences", "embed", "tokens", "evaluate:before", "evaluate:t"):
        sentray("run", file, "--only", stage)
    return folder / "runs"


@pytest.fixture
def inputs_made(made_once: Path, tmp_path: Path) -> None:
    """The tiny recipe's storage has what training reads: for tests of what comes later."""
    shutil.copytree(made_once, tmp_path / "runs")


@pytest.fixture(scope="session")
def bucket() -> Iterator[str]:
    """Address of a folder in a bucket of an S3 server on loopback: `bucket.format("folder")`."""
    with s3_server("127.0.0.1") as root:
        yield root
