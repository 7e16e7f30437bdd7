"""Kinds of files that people write, and what becomes of one with a setting that is changed."""

import argparse
import copy
import itertools
import re
import resource
import signal
import typing
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import yaml
from pydantic import BaseModel

from cluster.manifests.make import make_manifests
from cluster.settings import ClusterSettings
from pipeline.plan.plan import make_plan, plan_text
from pipeline.recipe.loader import read_yaml
from pipeline.recipe.read import dump_recipe, load_recipe
from stages.errors import UserError
from stages.plain import UNPRINTABLE, for_people
from stages.recipe import Recipe
from stages.settings import Settings
from tests.support.recipes import tiny, write_recipe
from tune.definition import Search
from tune.inputs import preparations
from tune.ranking import fresh_seeds
from tune.settings import SearchSettings

SECONDS = 10
# What a case may need beside what is there
MEMORY = 2**30
PLACES = ("kuberay", "slurm", "ray-up")
WRITTEN = "# hostile"


def settings_fields(model, where=(), seen=()):
    """Every setting below a class and its path, in lists the first (0), in mappings any (*)."""
    for name, field in model.model_fields.items():
        yield (*where, name), field
        for inner, place in settings_classes(field.annotation):
            if inner not in seen:
                yield from settings_fields(inner, (*where, name, *place), (*seen, inner))


def settings_classes(annotation, place=()):
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, place
    below = {list: ("0",), dict: ("*",)}.get(typing.get_origin(annotation), place)
    for inner in typing.get_args(annotation):
        yield from settings_classes(inner, below)


def with_value(raw, path, value):
    """A copy with a setting at a path; sections that are not there are made."""
    whole = place = copy.deepcopy(raw)
    for part, after in itertools.pairwise(path):
        if part == "0":
            place = place[0]
            continue
        key = next(iter(place), "x") if part == "*" else part
        if not place.get(key):
            place[key] = [{}] if after == "0" else {}
        place = place[key]
    place[path[-1]] = value
    return whole


@contextmanager
def written(subject, path, value):
    """Of a file that says `WRITTEN`, all is read that the subject says, but for one value."""

    def read(text, title):
        if text != WRITTEN:
            return read_yaml(text, title)
        raw = with_value(subject.raw, path, value)
        subject.adapt(raw, path)
        return raw, {}

    with mock.patch("pipeline.recipe.document.read_yaml", read):
        yield


@dataclass
class Subject:
    """A kind of file.

    raw: what one says; use: does with it what comes before any work; below: the section that is
    tried; adapt: changes what must not stand beside a setting.
    """

    model: type[Settings]
    raw: dict
    use: Callable[[], object]
    below: str = ""
    adapt: Callable[[dict, tuple], object] = lambda raw, path: None

    @property
    def fields(self):
        return [*settings_fields(self.model, (self.below,) * bool(self.below))]


def subjects(folder, teacher, student):
    """All kinds of files, for a tiny recipe."""
    recipe = tiny(folder, teacher, student)
    whole = write_recipe(folder / "recipe.yaml", recipe)
    file = folder / "tried.yaml"
    file.write_text(WRITTEN)

    def plan():
        read = load_recipe(str(file))
        plan_text(make_plan(read))
        dump_recipe(read).encode()

    def search():
        found = Search(str(file))
        preparations(found)
        proposed = found.searcher([])
        assert proposed.num_left() and proposed.next()
        fresh_seeds(found, [])
        yaml.safe_dump(found.plain_settings)

    def manifests():
        for place in PLACES:
            given = argparse.Namespace(
                recipe=whole, what="run", set=[], cluster=str(file), place=place, schedule=None
            )
            make_manifests(given, [], lambda line: None)

    def one_kind(raw, path):
        """A searched setting has one kind of values."""
        if path[1:3] == ("space", "*") and path[3] not in ("grid", "when"):
            dimension = raw["search"]["space"]["train.clip_norm"]
            del dimension["grid"]
            if path[3] == "factor":
                dimension["tied"] = "train.learning_rate"

    space = {
        "train.clip_norm": {"grid": [0.5, 1.0]},
        "train.learning_rate": {"uniform": [1e-4, 1e-2]},
    }
    searched = recipe | {"search": {"space": space, "trials": 2}}
    pools = {"cpu": {"cpus": 16, "memory_gb": 64, "stages": {"embed": {}}}}
    machine = {"InstanceType": "m6i.xlarge"}
    sections = {
        "kuberay": {"image": "sentray:1"}, "slurm": {},
        "ray_up": {"provider": {"type": "aws"}, "head": machine, "machines": {"cpu": machine}},
    }  # fmt: skip
    cluster = {"storage": "s3://bucket/runs", "pools": pools, "manifest": sections}
    return {
        "recipe": Subject(Recipe, recipe, plan),
        "search": Subject(SearchSettings, searched, search, "search", one_kind),
        "cluster": Subject(ClusterSettings, cluster, manifests),
    }


@contextmanager
def limited():
    """Raises TimeoutError after SECONDS, and MemoryError beyond MEMORY more than there is now."""

    def ring(*_):
        raise TimeoutError

    now = int(re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
    before, room = signal.signal(signal.SIGALRM, ring), resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (now + MEMORY, room[1]))
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_DATA, room)


def outcome(subject, path, value):
    """ "" where the file is accepted, else the message; anything else is raised."""
    with written(subject, path, value), limited():
        try:
            subject.use()
        except UserError as error:
            message = str(error)
        else:
            return ""
    told = for_people(message)
    assert len(told) < 3100 and not UNPRINTABLE.search(told)
    assert "Traceback" not in message
    return message


def use(subject, path, value):
    with written(subject, tuple(path.split(".")), value):
        subject.use()
