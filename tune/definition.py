"""A search as its file describes it: the recipe, the space, and the training of every trial."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pipeline.plan.graph import Node, build_graph
from pipeline.recipe.document import Document, setting_path
from pipeline.recipe.read import read_recipe, recipe_context
from pipeline.run.pools import PoolSettings
from pipeline.run.work import NodeWork, works_of
from pipeline.store.artifacts import ArtifactStore
from stages.errors import UserError
from stages.fields import LONGEST_SLUG
from stages.recipe import Recipe
from stages.variables import with_texts
from tune.searchers import SEARCHERS, Searcher
from tune.settings import SearchSettings
from tune.space import Configuration, Space, key_of
from tune.trials import Trial, TrialResult

# Behind a search's name: what its best recipe is called.
BEST = "-best"


@dataclass(frozen=True)
class SearchFile:
    """What a search's file says, before anything that it names is looked at.

    name: of the search. settings: all of it. plain_settings: the same as plain data, ${VARIABLES}
        as they were written.
    base: the recipe's document, without `search`.
    """

    name: str
    settings: SearchSettings
    plain_settings: dict[str, Any]
    base: Document
    recipe: Recipe


def read_search(file: str, overrides: list[str] | None = None) -> SearchFile:
    """Reads a search; arguments and errors as `Search`."""
    own = [text for text in overrides or [] if text.startswith(("search.", "search="))]
    document = Document(file, own)
    section = document.split("search")
    if section.raw is None:
        raise UserError(f"recipe {file}: there is no `search` section in it")
    other, path = document.raw.get("recipe"), file
    if other is not None:
        if set(document.raw) != {"recipe"} or not isinstance(other, str):
            raise UserError(
                f"recipe {file}: a file that names another `recipe` (a path) has nothing but "
                "`search` beside it; change that recipe's settings with --set"
            )
        path = str(document.folder / Path(other).expanduser())
    base = Document(path, [text for text in overrides or [] if text not in own])
    base.split("search")
    settings = section.read(SearchSettings, section="search")
    plain = with_texts(settings.model_dump(), section.texts(settings))
    recipe = read_recipe(base)
    name = settings.name or recipe.name
    if len(name) > (longest := LONGEST_SLUG - len(BEST)):
        raise UserError(
            f"recipe {file}: search.name: '{name}' has {len(name)} characters, but '{BEST}' is to "
            f"stand behind it in the name of the best recipe; give at most {longest}"
        )
    return SearchFile(name, settings, plain, base, recipe)


class Search:
    """One search: its settings, its recipe, and what a trial of it is.

    Args:
        file: a recipe with a `search` section, or a file with `recipe` (relative to it) and
            `search`.
        overrides: `key.sub=value` of the recipe, or of `search`.
        pools: where stages run; none: on any machine.

    Raises:
        UserError: anything wrong in either, a searched setting that the recipe lacks, a value that
            it refuses, a metric that training does not measure.
    """

    def __init__(
        self,
        file: str,
        overrides: list[str] | None = None,
        pools: Mapping[str, PoolSettings] = MappingProxyType({}),
    ) -> None:
        self.pools = pools
        read = read_search(file, overrides)
        self.settings, self.plain_settings = read.settings, read.plain_settings
        base = read.base
        # of several `train.seeds` the first: a trial is one training
        train = read.recipe.train.of_each_seed[0]
        self.recipe = read.recipe.model_copy(update={"train": train})
        self._searchers = {**SEARCHERS, **recipe_context(base)["extensions"].searchers}
        if self.settings.resolved_searcher not in self._searchers:
            raise UserError(
                f"recipe {file}: search.searcher: there is no '{self.settings.searcher}'; there "
                f"are {', '.join(self._searchers)}"
            )
        self.name = read.name
        self.folder = f"tune/{self.name}"
        self.store = ArtifactStore(self.recipe.storage)
        self.space = Space(self.settings.space)
        base.raw = self.recipe.plain()  # defaults are there too, and paths are absolute
        self._base = base
        self._folders: dict[tuple[str, str], str] = {}
        self._fingerprints: dict[tuple[str, int], str | None] = {}
        self.seeds = self.settings.seeds or [self.recipe.train.seed]
        self._check_metric()
        nested = self.recipe.train.resolved_engine == "deepspeed"
        if nested and self.settings.scheduler == "population":
            raise UserError("search.scheduler population needs train.num_workers: 1")
        for name in self.space.dimensions:
            self._check_dimension(name)

    def _check_dimension(self, name: str) -> None:
        """Refuses what no trial can have: a wrong path, or a first or last value out of bounds."""
        ends = [self.space.example(name, last) for last in (False, True)]
        fingerprints = []
        for values in ends:
            try:
                recipe = self.recipe_of(values, self.seeds[0], "search.space.")
            except UserError as error:
                path = setting_path(tuple(name.split(".")))
                names_it = (f"search.space.{name}:", *(f"{path}{end}" for end in ":.["))
                if any(text in str(error) for text in names_it):
                    raise
                continue  # other settings of the trial may go with this value
            fingerprints.append(build_graph(recipe).nodes["train"].fingerprint)
        if ends[0] != ends[1] and len(fingerprints) == 2 and len(set(fingerprints)) == 1:
            raise UserError(
                f"search.space.{name} changes nothing in what training gives; it can be set in "
                "the recipe, but not searched"
            )

    def recipe_of(self, values: Configuration, seed: int, who: str = "") -> Recipe:
        """The recipe of one trial; errors begin with `who`.

        Raises:
            UserError: these values do not go together.
        """
        return read_recipe(self._base.changed(values | {"train.seed": seed}, who))

    def best_recipe(self, values: Configuration, seed: int) -> Recipe:
        """As `best.yaml` has it."""
        return self.recipe_of(values, seed).model_copy(update={"name": f"{self.name}{BEST}"})

    def work_of(self, values: Configuration, seed: int) -> NodeWork:
        """The training of one trial, whose inputs must be there when it runs; raises as above."""
        nodes = build_graph(self.recipe_of(values, seed)).nodes
        needed = ("train", *nodes["train"].inputs.values())
        folders = {name: self._folder_of(nodes[name]) for name in needed}
        return works_of([nodes["train"]], self.recipe.storage, folders, self.pools)["train"]

    def result_work(self, work: NodeWork) -> NodeWork:
        """The trial's result as an artifact of its own: what was measured, without weights."""
        node = replace(work.node, stage=TrialResult(), name="trial")
        return replace(work, node=node, folder=self._folder_of(node))

    def _folder_of(self, node: Node) -> str:
        """Where a node's artifact lies or will lie."""
        key = (node.kind, node.fingerprint)
        if key not in self._folders:
            self._folders[key] = self.store.folder(node.kind, node.title, node.fingerprint)
        return self._folders[key]

    def configuration_id(self, values: Configuration) -> str:
        """What tells configurations apart: the training they make, however they are written."""
        return self._fingerprint(values, 0) or key_of(values)

    def owns(self, trial: Trial) -> bool:
        """Whether a trial is one of the recipe as it is now, with this metric."""
        # a population's member is "fingerprint of its last configuration-of its first"
        trained = trial.fingerprint.partition("-")[0] if trial.folder else None
        if trial.metric != self.settings.metric:
            return False
        return self._fingerprint(trial.values, trial.seed) == trained

    def _fingerprint(self, values: Configuration, seed: int) -> str | None:
        """Of a trial's training; None: these values do not go together."""
        key = (key_of(values), seed)
        if key not in self._fingerprints:
            try:
                train = build_graph(self.recipe_of(values, seed)).nodes["train"]
                self._fingerprints[key] = train.fingerprint
            except UserError:
                self._fingerprints[key] = None
        return self._fingerprints[key]

    def searcher(self, tried: list[Configuration]) -> Searcher:
        """Where configurations come from; those of earlier runs were `tried`."""
        make = self._searchers[self.settings.resolved_searcher]
        return make(self.settings, self.space, tried)

    def filled_in(self) -> Document:
        """The recipe as a document without ${VARIABLES}, for processes that may not have them."""
        whole = copy.copy(self._base)
        whole.raw = self.recipe.model_dump()
        return whole

    def _check_metric(self) -> None:
        metric, dev = self.settings.metric, self.recipe.dev
        known = ["loss"]
        if dev is not None:
            known = ["dev_spearman", *(f"dev/{name}" for name in dev.measures), *known]
        if metric not in known:
            without = (
                ""
                if dev is not None
                else (
                    " (there is no `train.dev` with labels to measure on, and no agreement "
                    "with teachers on `sentences.holdout`)"
                )
            )
            raise UserError(
                f"search.metric: training measures no '{metric}'{without}; it measures "
                f"{', '.join(known)}. Test sets under `evaluate` never take part in a search."
            )
