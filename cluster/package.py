"""What travels with a job: the resolved recipes, small files that they name, plug-ins, Sentray.

    start.py, job.json       what the head runs (cluster/start.py)
    passed.pad               half of the variables that are passed (pipeline/run/passed.py)
    pools.yaml               which machines make which stages
    recipes/NAME.yaml        resolved; its storage is the cluster's
    files/1/sentences.txt    what a recipe names on this machine
    pipeline/, stages/, ...  Sentray's own source, and plug-ins, with their versions

Ray unpacks it on every machine and puts it before all else on Python's path. The folder of the
command line is not part of it, so no `pipeline` or `stages` of a user's can get in Sentray's way.
"""

import hashlib
import json
import platform
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

from cluster.settings import ClusterSettings
from pipeline.recipe.document import Document, assign, setting_path
from pipeline.recipe.read import read_recipe
from stages.content import files_of
from stages.errors import UserError
from stages.fields import RECIPE_PREFIX
from stages.plain import as_yaml
from stages.plugins import OWN_PACKAGES
from stages.recipe import Recipe
from stages.text import user_name
from stages.variables import VARIABLE, value_at
from tune.definition import read_search

# Parts of this size and more are listed.
LARGE_BYTES = 1_000_000


@dataclass
class Package:
    """A job's package, before it is written.

    name: the recipe's. arguments: of the command line there. module: whose `main` takes them.
    parts: what makes the job what it is, by place in the package. code: Sentray and plug-ins.
    elsewhere: settings that name something which is not here, and is taken to be on the cluster.
    paths: what is read there and not sent.
    """

    name: str
    arguments: list[str]
    module: str = "pipeline.cli"
    parts: dict[str, Path | bytes] = field(default_factory=dict)
    code: dict[str, Path | bytes] = field(default_factory=dict)
    elsewhere: list[str] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """Names the run: who does what, with which settings and files."""
        parts = {
            name: hashlib.sha256(_bytes(part)).hexdigest() for name, part in self.parts.items()
        }
        whole = json.dumps([user_name(), self.arguments, parts], sort_keys=True)
        return hashlib.sha256(whole.encode()).hexdigest()

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of every part; a sent file or folder, and a package of code, is one."""
        found: dict[str, int] = {}
        for name, part in (self.parts | self.code).items():
            depth = 3 if name.startswith("files/") else 1
            whole = "/".join(name.split("/")[:depth])
            size = len(part) if isinstance(part, bytes) else part.stat().st_size
            found[whole] = found.get(whole, 0) + size
        return found

    def check_size(self, limit_mb: int) -> None:
        """Raises UserError where it is too large to be sent, with what is large and what to do."""
        sizes = self.sizes
        if sum(sizes.values()) <= limit_mb * 1e6:
            return
        raise UserError(
            f"the package of this job has {_mb(sum(sizes.values()))}, and the limit is "
            f"{limit_mb} MB (upload_limit_mb): {self.large()}. Put large files where all machines "
            "of the cluster can read them and name that path; if that path is the same here, list "
            "its folder under `shared` in the cluster's file"
        )

    def large(self) -> str:
        """Its large parts with their sizes; "" for none."""
        large = sorted(
            ((size, name) for name, size in self.sizes.items() if size >= LARGE_BYTES), reverse=True
        )
        return ", ".join(f"{name} {_mb(size)}" for size, name in large)

    def contents(self) -> dict[str, bytes]:
        """Every file of the package, by its place in it."""
        versions = {
            "Python": platform.python_version(),
            "Ray": metadata.version("ray"),
            "Sentray": metadata.version("sentray"),
        }
        job = {"module": self.module, "arguments": self.arguments, "versions": versions}
        start = Path(__file__).with_name("start.py")
        whole = self.parts | self.code | {"start.py": start, "job.json": json.dumps(job).encode()}
        return {name: _bytes(part) for name, part in sorted(whole.items())}

    def write(self, file: Path | BinaryIO) -> None:
        """Writes the package as a zip file; the same content gives the same bytes."""
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in self.contents().items():
                about = zipfile.ZipInfo(name)  # of 1980: times would make every package another
                about.external_attr = 0o644 << 16
                archive.writestr(about, content, zipfile.ZIP_DEFLATED)


def pack(
    command: str, file: str, overrides: list[str], options: list[str], cluster: ClusterSettings
) -> Package:
    """Reads and checks a recipe or search, and gathers what a job of it needs.

    Args:
        command: "run" or "tune". options: more of that command's.

    Raises:
        UserError: anything wrong in the recipe, a file that is not here, a package that is too
            large.
    """
    with cluster.variables_set():
        more: dict[str, Any] = {}
        if command == "tune":
            search = read_search(file, overrides)
            base, recipe = search.base, search.recipe
            more["search"] = search.plain_settings
        else:
            base = Document(file, overrides)
            base.split("search")
            recipe = read_recipe(base)
        package = Package(recipe.name, [command, f"recipes/{recipe.name}.yaml", *options])
        packer = _Packer(package, cluster)
        packer.add_recipe(base, recipe, more)
    if cluster.pools:
        pools = {name: pool.model_dump() for name, pool in cluster.pools.items()}
        package.parts["pools.yaml"] = as_yaml({"pools": pools}).encode()
        package.arguments.append("--pools=pools.yaml")
    if cluster.sentray == "sent":
        add_sentray(package)
    package.check_size(cluster.upload_limit_mb)
    return package


def add_sentray(package: Package) -> None:
    """Adds Sentray's own source."""
    for name in OWN_PACKAGES:
        _add_code(package, name)
    package.code |= _described("sentray", list(OWN_PACKAGES))


def _add_code(package: Package, name: str) -> None:
    """Adds the source of a package that can be imported here."""
    spec = find_spec(name)
    assert spec is not None and spec.origin is not None, f"{name} cannot be imported"
    origin = Path(spec.origin)
    if spec.submodule_search_locations is None:
        package.code[origin.name] = origin
        return
    for inside, file in _below(origin.parent):
        if "__pycache__" not in inside:
            package.code[f"{name}/{inside}"] = file


class _Packer:
    def __init__(self, package: Package, cluster: ClusterSettings) -> None:
        self._package = package
        self._cluster = cluster
        self._recipes: dict[str, str] = {}
        self._files: dict[str, str] = {}

    def add_recipe(self, base: Document, recipe: Recipe, more: Mapping[str, Any]) -> str:
        """Adds a recipe and all that it names; returns its file's name."""
        file = f"{recipe.name}.yaml"
        if file in self._recipes.values():
            file = f"{recipe.name}-{len(self._recipes)}.yaml"
        self._recipes[base.title] = file
        plain = recipe.plain() | {"storage": self._cluster.storage}
        for where, value in recipe.named():
            there = self._place(setting_path(where), value, value_at(base.raw, where))
            if there is not None:
                assign(plain, ".".join(where), there, "")
        for plugin in recipe.plugins:
            self._add_plugin(plugin)
        self._package.parts[f"recipes/{file}"] = as_yaml({**plain, **more}).encode()
        return file

    def _place(self, setting: str, value: str, written: object) -> str | None:
        """Where something that a setting names will be; None: as the setting says."""
        if value.startswith(RECIPE_PREFIX):
            return RECIPE_PREFIX + self._other_recipe(value.removeprefix(RECIPE_PREFIX))
        place = Path(value)
        if not place.is_absolute():
            return None
        text = written if isinstance(written, str) else value
        # below a shared folder, or the cluster says where that is
        there = self._cluster.is_shared(place) or any(
            name in self._cluster.variables for name in VARIABLE.findall(text)
        )
        if not there and place.exists():
            return f"./{self._sent(place)}"
        if not there and not text.startswith(("/", "$")):
            raise UserError(f"{setting}: there is no file or folder {place}")
        self._package.paths.append(value)
        if not there:
            self._package.elsewhere.append(f"{setting} {text}")
        return None

    def _other_recipe(self, file: str) -> str:
        document = Document(file)
        if document.title not in self._recipes:
            document.split("search")
            return self.add_recipe(document, read_recipe(document), {})
        return self._recipes[document.title]

    def _sent(self, place: Path) -> str:
        if str(place) not in self._files:
            target = f"files/{len(self._files) + 1}/{place.name}"
            self._files[str(place)] = target
            self._package.parts |= {
                f"{target}/{name}" if name else target: file for name, file in _below(place)
            }
        return self._files[str(place)]

    def _add_plugin(self, plugin: str) -> None:
        package = plugin.partition(".")[0]
        _add_code(self._package, package)
        distributions = metadata.packages_distributions().get(package, [])
        if distributions:
            self._package.code |= _described(distributions[0], [package])


def _below(place: Path) -> Iterator[tuple[str, Path]]:
    """A file as ("", file), or the files of a folder with their places in it, but hidden ones."""
    if place.is_file():
        yield "", place
        return
    for file in files_of(place):
        yield file.relative_to(place).as_posix(), file


def _described(distribution: str, packages: list[str]) -> dict[str, Path | bytes]:
    """What tells the version of an installed distribution where only its source is sent."""
    found = metadata.distribution(distribution)
    folder = f"{distribution.replace('-', '_')}-{found.version}.dist-info"
    about = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {found.version}\n"
    return {
        f"{folder}/METADATA": about.encode(),
        f"{folder}/top_level.txt": "\n".join(packages).encode(),
    }


def _bytes(part: Path | bytes) -> bytes:
    return part if isinstance(part, bytes) else part.read_bytes()


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
