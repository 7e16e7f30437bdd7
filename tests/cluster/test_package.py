"""What travels with a job, and what does not."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from cluster.package import pack
from cluster.settings import load_cluster
from pipeline.plan.graph import build_graph
from pipeline.recipe.read import load_recipe
from stages.errors import UserError
from tests.support.recipes import setting


@pytest.fixture
def packed(cluster_file, tmp_path, monkeypatch, tiny_recipe):
    """Packs a recipe; `packed.unzipped` is the package as machines of the cluster have it."""
    monkeypatch.chdir(tmp_path)

    def build(recipe=None, command="run", options=(), **settings):
        file = Path("recipe.yaml")
        file.write_text(yaml.safe_dump(recipe or tiny_recipe()))
        return pack(command, str(file), [], list(options), load_cluster(cluster_file(**settings)))

    return build


def unzipped(package, folder):
    package.write(folder / "package.zip")
    with zipfile.ZipFile(folder / "package.zip") as archive:
        archive.extractall(folder / "there")
    return folder / "there"


def fingerprints(file):
    return {name: node.fingerprint for name, node in build_graph(load_recipe(file)).nodes.items()}


def test_the_same_work_is_found_there(packed, tiny_recipe, tmp_path, monkeypatch):
    """Files and models are sent, by content they are the same; and the storage is the cluster's."""
    recipe = tiny_recipe()
    here = fingerprints(tmp_path / "tiny.yaml")
    there = unzipped(packed(recipe), tmp_path)
    monkeypatch.chdir(there)
    sent = there / "recipes" / "tiny.yaml"
    assert fingerprints(str(sent)) == here
    assert load_recipe(str(sent)).storage == "s3://bucket/lab"
    assert str(tmp_path) not in sent.read_text()


def test_the_same_job_is_the_same_bytes(packed, tmp_path):
    first, second = packed(), packed()
    first.write(tmp_path / "1.zip")
    second.write(tmp_path / "2.zip")
    assert (tmp_path / "1.zip").read_bytes() == (tmp_path / "2.zip").read_bytes()
    assert first.digest == second.digest
    assert packed(options=["--only=embed"]).digest != first.digest


def test_another_file_is_another_job(packed, tmp_path):
    before = packed().digest
    with open(tmp_path / "sentences.txt", "a") as file:
        file.write("One more sentence here.\n")
    assert packed().digest != before


def test_what_tools_keep_in_a_folder_is_not_sent(packed, tiny_recipe, tmp_path):
    texts = tmp_path / "texts"
    (texts / ".cache").mkdir(parents=True)
    (texts / ".cache" / "times.json").write_text("{}")
    (texts / "a.txt").write_text("A sentence of its own.\n" * 9)
    package = packed(tiny_recipe(setting("sentences.path", str(texts))))
    sent = {file.name for file in unzipped(package, tmp_path).rglob("*")}
    assert "a.txt" in sent and "times.json" not in sent


def test_what_machines_share_is_not_sent(packed, tmp_path):
    assert [name for name in packed().parts if name.startswith("files/")]
    package = packed(shared=["/"])
    assert list(package.parts) == ["recipes/tiny.yaml"]
    assert str(tmp_path / "sentences.txt") in package.parts["recipes/tiny.yaml"].decode()


def test_a_variable_of_the_cluster_stays_one(packed, tiny_recipe, tmp_path):
    """It means the cluster's folder there, though this machine has one too."""
    recipe = tiny_recipe(setting("sentences.path", "${CORPORA}/sentences.txt"))
    package = packed(recipe, variables={"CORPORA": str(tmp_path)})
    sent = yaml.safe_load(package.parts["recipes/tiny.yaml"])
    assert sent["sentences"]["path"] == "${CORPORA}/sentences.txt"
    assert "CORPORA" not in os.environ


def test_a_path_that_is_not_here_is_the_cluster_s(packed, tiny_recipe):
    package = packed(tiny_recipe("sentences.path=/mnt/corpus/all.txt"))
    assert package.elsewhere == ["sentences.path /mnt/corpus/all.txt"]


def test_a_relative_path_that_is_not_here_is_refused(packed, tiny_recipe):
    recipe = tiny_recipe() | {"sentences": {"path": "./missing.txt"}}
    with pytest.raises(UserError, match=r"sentences.path: there is no file or folder .*missing"):
        packed(recipe)


def test_what_is_too_large_is_named_with_its_size(packed, tiny_recipe, tmp_path):
    (tmp_path / "large.txt").write_bytes(b"A line of text that is long enough.\n" * 60_000)
    recipe = tiny_recipe(f"sentences.path={tmp_path}/large.txt")
    assert "files/1/large.txt 2.2 MB" in packed(recipe).large()
    with pytest.raises(UserError, match=r"files/1/large.txt 2.2 MB.*where all machines"):
        packed(recipe, upload_limit_mb=2)


def test_another_recipe_goes_along(packed, tiny_recipe, tmp_path, monkeypatch):
    base = tiny_recipe(setting("name", "base"))
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    recipe = tiny_recipe(setting("teachers.0", {"name": "t", "model": "recipe:base.yaml"}))
    package = packed(recipe)
    (tmp_path / "here.yaml").write_text(yaml.safe_dump(recipe))
    here = fingerprints(str(tmp_path / "here.yaml"))
    there = unzipped(package, tmp_path)
    monkeypatch.chdir(there)
    assert fingerprints("recipes/tiny.yaml") == here


def test_sentray_itself_comes_first(packed, tmp_path):
    """Folders called like Sentray's, where the job runs or where it was submitted, are not used."""
    for name in ("pipeline", "stages"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the wrong one')")
    there = unzipped(packed(), tmp_path)
    found = subprocess.run(
        [sys.executable, "-I", "-c",
         f"import sys; sys.path.insert(0, {str(there)!r})\n"
         "import pipeline.cli, stages, cluster, tune\n"
         "from importlib.metadata import version\n"
         "print(pipeline.__file__, version('sentray'))"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert found.stdout.startswith(f"{there}/pipeline/__init__.py 0."), found.stderr
    assert packed(sentray="installed").code == {}


def test_a_search_goes_as_one_file(packed, tiny_recipe):
    recipe = tiny_recipe() | {"search": {"space": {"train.learning_rate": {"grid": [1e-3, 1e-4]}}}}
    package = packed(recipe, command="tune")
    assert package.arguments == ["tune", "recipes/tiny.yaml"]
    sent = yaml.safe_load(package.parts["recipes/tiny.yaml"])
    assert sent["search"]["space"]["train.learning_rate"]["grid"] == [1e-3, 1e-4]
    with pytest.raises(UserError, match="there is no `search` section"):
        packed(tiny_recipe(), command="tune")
