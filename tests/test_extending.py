"""The package of docs/extending.md works as it is printed: in one process, and on Ray nodes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipeline.cli import main
from pipeline.plan.graph import build_graph
from pipeline.plan.plan import make_plan
from pipeline.recipe.read import load_recipe
from pipeline.report.figures import collect
from pipeline.store.artifacts import ArtifactStore
from stages.errors import UserError
from stages.plugins import version_of
from tests.support import REPOSITORY
from tests.support.here import make_here
from tune.definition import Search


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The package of the page, in a folder of its own; returns that folder."""
    page = (REPOSITORY / "docs" / "extending.md").read_text()
    for name, code in re.findall(r"```python\n# (my_package/\w+\.py)\n(.*?)```", page, re.DOTALL):
        file = tmp_path / "site" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    yield tmp_path / "site"
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_package"]:
        del sys.modules[name]


@pytest.fixture
def recipe_file(tmp_path, tiny_recipe):
    """A tiny recipe with the sections that the page shows."""
    page = (REPOSITORY / "docs" / "extending.md").read_text()
    (shown,) = [
        yaml.safe_load(text)
        for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
        if "lengths" in text
    ]
    recipe = tiny_recipe()
    recipe["train"]["objectives"] = shown.pop("train")["objectives"]
    recipe["train"]["max_steps"] = 4
    recipe["evaluate"] |= shown.pop("evaluate") | {"speed": False}
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe | shown))
    return file


def check_results(storage):
    recipe_results = {}
    store = ArtifactStore(str(storage))
    for kind in ("lengths", "hashed-words", "perturb"):
        (name,) = store.root.list(kind)
        recipe_results[kind] = store.open(f"{kind}/{name}")
    lengths = json.loads(recipe_results["lengths"].shard_path(0, "lengths.json").read_text())
    assert len(lengths) == store.open(recipe_results["lengths"].folder).shard_rows(0)
    assert all(4 <= length <= 12 for length in lengths)
    assert recipe_results["perturb"].stats["rewrites"] > 250


def test_the_package_of_the_page_works_in_one_process(package, recipe_file, tmp_path):
    recipe = load_recipe(str(recipe_file))
    made = make_here(recipe)
    assert {"lengths", "hashed:hash", "perturb:back", "evaluate:after:spread"} <= set(made)
    check_results(tmp_path / "runs")
    results = collect(make_plan(recipe))
    assert 0 < results.student["spread"].value < 2
    assert any(note.startswith("Spread:") for note in results.notes)
    metrics = ArtifactStore(recipe.storage).open(make_plan(recipe).folders["train"])
    rows = metrics.file_path("metrics/metrics.jsonl").read_text().splitlines()
    assert {"infonce", "margin"} <= json.loads(rows[0]).keys()
    assert make_here(recipe) == []


def test_the_package_of_the_page_works_on_two_nodes(package, recipe_file, tmp_path, ray_cluster):
    command = [sys.executable, "-m", "pipeline.cli", "run", str(recipe_file)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    # the working folder is where workers look too: it stands for a package installed everywhere
    ended = subprocess.run([*command, "--address", ray_cluster], env=environment, cwd=package,
                           capture_output=True, text=True, timeout=300)  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    check_results(tmp_path / "runs")
    assert "spread" in ended.stdout


def test_name_and_version_enter_the_fingerprints_of_what_it_makes(package, recipe_file):
    def prints():
        nodes = build_graph(load_recipe(str(recipe_file))).nodes
        return {name: node.fingerprint for name, node in nodes.items()}

    first = prints()
    code = package / "my_package" / "__init__.py"
    code.write_text(code.read_text().replace('"1.0"', '"1.0.1"'))  # another size: no stale bytecode
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_package"]:
        del sys.modules[name]
    version_of.cache_clear()
    second = prints()
    changed = {name for name in first if first[name] != second[name]}
    assert {"lengths", "hashed:hash", "perturb:back", "train", "evaluate:before:spread"} <= changed
    assert changed.isdisjoint({"sentences", "tokens", "evaluate:before:made-up"})


def test_a_searcher_of_the_package_chooses_the_configurations(package, recipe_file):
    recipe = yaml.safe_load(recipe_file.read_text())
    grid = {"train.learning_rate": {"grid": [0.1, 0.2, 0.3]}}
    recipe["search"] = {"space": grid, "searcher": "every-other", "trials": 3}
    recipe_file.write_text(yaml.safe_dump(recipe))
    searcher = Search(str(recipe_file)).searcher([])
    assert [searcher.next(), searcher.next(), searcher.next()] == [
        {"train.learning_rate": 0.1}, {"train.learning_rate": 0.3}, None]  # fmt: skip
    recipe["search"]["searcher"] = "every-thrid"
    recipe_file.write_text(yaml.safe_dump(recipe))
    with pytest.raises(UserError, match=r"no 'every-thrid'; there are grid, .*every-other"):
        Search(str(recipe_file))


@pytest.mark.parametrize(
    ("code", "plugins", "message"),
    [
        (None, ["nowhere_to_be_found"],
         r"line \d+: plugins\[0\]: the plug-in 'nowhere_to_be_found' is not installed"),
        ("raise RuntimeError('boom')", ["plug_a"],
         r"'plug_a' fails when it is imported \(RuntimeError: boom\)"),
        ("import missing_dependency", ["plug_a"], "needs 'missing_dependency', which is not inst"),
        ("x = 1", ["plug_a"], "is no plug-in: it has no `SENTRAY"),
        ("from stages.plugins import Extensions\nSENTRAY = Extensions()", ["plug_a"],
         "has no version"),
        ("from stages.plugins import Extensions\n__version__ = '1'\n"
         "SENTRAY = Extensions(objectives={'x': int})", ["plug_a", "plug_b"],
         r"plugins\[1\]: 'plug_b' brings objectives 'x', which 'plug_a' has already"),
        ("from stages.plugins import Extensions\n__version__ = '1'\n"
         "SENTRAY = Extensions(similarities={'cosine': int})", ["plug_a"],
         "'cosine', which Sentray itself has already"),
        ("from stages.plugins import Extensions\n__version__ = '1'\n"
         "class S: kind = 'embed'\nSENTRAY = Extensions(stages=(S,))", ["plug_a"],
         "a stage of kind 'embed', which is taken"),
    ],
)  # fmt: skip
def test_a_plugin_that_cannot_be_used(
    tmp_path, tiny_recipe, monkeypatch, capsys, code, plugins, message
):
    site = tmp_path / "site"
    site.mkdir()
    if code is not None:
        for name in plugins:
            (site / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(site))
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(tiny_recipe() | {"plugins": plugins}))
    try:
        assert main(["plan", str(file)]) == 2
    finally:
        for name in plugins:
            sys.modules.pop(name, None)
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert "recipe" in error and not Path(tmp_path / "runs").exists()


def test_a_worker_that_lacks_a_plugin_is_named_before_anything_starts(
    package, recipe_file, tmp_path, sentray
):
    """The driver finds the package through its own sys.path; the cluster's workers do not."""
    error = sentray("run", recipe_file, code=2)
    assert re.search(r"'my_package' 1.0 is installed here, but machine \w+ of the cl", error), error
    assert not list((tmp_path / "runs").glob("*/*/manifest.json"))
