"""A search as its file describes it: the recipe, the space, and the recipe of every trial."""

import copy
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.plan.graph import Node, build_graph
from pipeline.recipe.document import Document, setting_path
from pipeline.recipe.read import read_recipe, recipe_context
from pipeline.run.workspace import Workspace
from pipeline.store.artifacts import ArtifactStore
from stages.errors import UserError
from stages.recipe import Recipe
from stages.train.stage import Train
from stages.variables import with_texts
from tune.searchers import SEARCHERS, Source, listed_settings
from tune.settings import Dimension, SearchSettings
from tune.space import Space, Values, key_of
from tune.trials import Trial, TrialResult


class Search:
    """One search: its settings, its recipe, and what a trial of it is.

    Args:
        file: a recipe with a `search` section, or a file with `recipe` (relative to it) and
            `search`.
        overrides: `key.sub=value` of the recipe, or of `search`.

    Raises:
        UserError: anything wrong in either, a searched setting that the recipe lacks, a value that
            it refuses, a metric that training does not measure.
    """

    def __init__(self, file: str, overrides: list[str] | None = None) -> None:
        own = [one for one in overrides or [] if one.startswith(("search.", "search="))]
        others = [one for one in overrides or [] if one not in own]
        document = Document(file, own)
        section = document.split("search")
        if section.raw is None:
            raise UserError(f"recipe {file}: there is no `search` section in it")
        other = document.raw.get("recipe")
        if other is not None:
            if set(document.raw) != {"recipe"} or not isinstance(other, str):
                raise UserError(
                    f"recipe {file}: a file that names another `recipe` (a path) has nothing but "
                    "`search` beside it; change that recipe's settings with --set"
                )
            base = Document(str(document.folder / Path(other).expanduser()), others)
        else:
            base = Document(file, overrides)
        base.split("search")
        self.settings = section.read(SearchSettings, section="search")
        self._texts = section.texts(self.settings)
        self.recipe = read_recipe(base)
        self._searchers = {**SEARCHERS, **recipe_context(base)["extensions"].searchers}
        if self.settings.resolved_searcher not in self._searchers:
            raise UserError(
                f"{section.title}: search.searcher: there is no '{self.settings.searcher}'; there "
                f"are {', '.join(self._searchers)}"
            )
        self.name = self.settings.name or self.recipe.name
        self.folder = f"tune/{self.name}"
        self.store = ArtifactStore(self.recipe.storage)
        self.space = Space(self.settings.space)
        base.raw = self.recipe.plain()  # defaults are there too, and paths are absolute
        self._base = base
        self._folders: dict[tuple[str, str], str] = {}
        self._settings: dict[str, str] = {}
        self._own: dict[str, bool] = {}
        self.seeds = self.settings.seeds or [self.recipe.train.seed]
        self._check_metric()
        nested = self.recipe.train.resolved_engine == "deepspeed"
        if nested and self.settings.scheduler == "population":
            raise UserError("search.scheduler population needs train.num_workers: 1")
        for name in self.space.dimensions:
            self._check_dimension(name)

    def plain_settings(self) -> dict[str, Any]:
        """The search's settings as plain data, ${VARIABLES} as they were written."""
        return dict(with_texts(self.settings.model_dump(), self._texts))

    def _check_dimension(self, name: str) -> None:
        """Refuses what no trial can have: a wrong path, or a first or last value out of bounds."""
        ends = [self.space.example(name, last) for last in (False, True)]
        found = []
        for values in ends:
            try:
                recipe = self.recipe_of(values, self.seeds[0], "search.space.")
            except UserError as error:
                path = setting_path(tuple(name.split(".")))
                names_it = (f"search.space.{name}:", *(f"{path}{end}" for end in ":.["))
                if any(text in str(error) for text in names_it):
                    raise
                continue  # other settings of the trial may go with this value
            found.append(build_graph(recipe).nodes["train"].fingerprint)
        if len(found) == 2 and ends[0] != ends[1] and found[0] == found[1]:
            raise UserError(
                f"search.space.{name} changes nothing in what training gives; it can be set in "
                "the recipe, but not searched"
            )

    def recipe_of(self, values: Values, seed: int, who: str = "") -> Recipe:
        """The recipe of one trial.

        Raises:
            UserError: these values do not go together.
        """
        return read_recipe(self._base.changed(values | {"train.seed": seed}, who))

    def work_of(self, values: Values, seed: int) -> Workspace:
        """The training of one trial, whose inputs must be there when it runs.

        Raises:
            UserError: these values do not go together.
        """
        recipe = self.recipe_of(values, seed)
        nodes = build_graph(recipe).nodes
        node = nodes["train"]
        inputs = {own: self.folder_of(nodes[name]) for own, name in node.inputs.items()}
        return Workspace(node, self.recipe.storage, self.folder_of(node), inputs, time.time())

    def setting_of(self, values: Values) -> str:
        """What tells settings apart: the training they make, however they are written."""
        key = key_of(values)
        if key not in self._settings:
            try:
                node = build_graph(self.recipe_of(values, 0)).nodes["train"]
                self._settings[key] = node.fingerprint
            except UserError:
                self._settings[key] = key
        return self._settings[key]

    def folder_of(self, node: Node) -> str:
        """Where a node's artifact lies or will lie."""
        key = (node.kind, node.fingerprint)
        if key not in self._folders:
            self._folders[key] = self.store.folder(node.kind, node.title, node.fingerprint)
        return self._folders[key]

    def owns(self, trial: Trial) -> bool:
        """Whether a trial is one of the recipe as it is now, with this metric."""
        if trial.metric != self.settings.metric:
            return False
        if trial.fingerprint not in self._own:
            try:
                node = build_graph(self.recipe_of(trial.values, trial.seed)).nodes["train"]
                # a population's member is "fingerprint of its last setting-of its first"
                own = trial.fingerprint.partition("-")[0]
                self._own[trial.fingerprint] = node.fingerprint == own
            except UserError:  # refused then, refused now
                self._own[trial.fingerprint] = not trial.folder
        return self._own[trial.fingerprint]

    def result_work(self, work: Workspace) -> Workspace:
        """The trial's result as an artifact of its own: what was measured, without weights."""
        node = replace(work.node, stage=TrialResult(), name="trial")
        return replace(work, node=node, folder=self.folder_of(node))

    def source(self, tried: list[Values]) -> Source:
        """Where settings come from.

        Args:
            tried: settings of earlier runs.
        """
        make = self._searchers[self.settings.resolved_searcher]
        return make(self.settings, self.space, tried)

    def filled_in(self) -> Document:
        """The recipe as a document without ${VARIABLES}, for processes that may not have them."""
        whole = copy.copy(self._base)
        whole.raw = self.recipe.model_dump()
        return whole

    def preparations(self) -> list[Recipe]:
        """Recipes whose trainings together need all inputs that any trial will need.

        Raises:
            UserError: a range of numbers changes what must be prepared.
        """
        found: dict[tuple[str, ...], Recipe] = {}
        for values in self._preparing_values():
            try:
                recipe = self.recipe_of(values, self.seeds[0])
            except UserError:
                continue  # becomes a failed trial, with this reason
            found.setdefault(self._inputs(recipe), recipe)
        return list(found.values())

    def _preparing_values(self) -> list[Values]:
        if self.settings.lists_settings and self.settings.scheduler != "population":
            return listed_settings(self.settings, self.space)
        # settings that are chosen while it runs: those that change the inputs must be listed, and
        # so must those that they depend on
        needed: dict[str, Dimension] = {}
        waiting = [name for name in self.space.dimensions if self._changes_inputs(name)]
        while waiting:
            name = waiting.pop()
            dimension = self.space.dimensions[name]
            if dimension.bounds is not None:
                raise UserError(
                    f"search.space.{name} changes what is made before training (the inputs of "
                    "`train`), so its values must be a list: use grid or choice"
                )
            if name not in needed:
                needed[name] = dimension
                waiting += self.space.depends_on(name)
        return list(Space(needed).grid()) if needed else [{}]

    def _changes_inputs(self, name: str) -> bool:
        """Whether a searched setting changes what is made before training."""
        ends = [self.space.example(name, last) for last in (False, True)]
        listed = self.space.dimensions[name].values or []
        found = set()
        for values in [*ends, *({**ends[0], name: value} for value in listed)]:
            try:
                found.add(self._inputs(self.recipe_of(values, self.seeds[0])))
            except UserError:
                continue  # other settings of the trial may go with this value
        return len(found) > 1

    @staticmethod
    def _inputs(recipe: Recipe) -> tuple[str, ...]:
        nodes = build_graph(recipe).nodes
        return tuple(nodes[name].fingerprint for name in nodes["train"].inputs.values())

    def _check_metric(self) -> None:
        metric, dev = self.settings.metric, self.recipe.train.dev
        known = ["loss"]
        if dev is not None:
            known = ["dev_spearman", *(f"dev/{one.name}" for one in dev.sts), *known]
        if metric not in known:
            without = "" if dev else " (there is no `train.dev` with labelled pairs to measure on)"
            raise UserError(
                f"search.metric: training measures no '{metric}'{without}; it measures "
                f"{', '.join(known)}. Test sets under `evaluate` never take part in a search."
            )


def train_stage(document: Document, values: Values, seed: int) -> Train:
    """The training of a recipe with other values; the one way in which settings are changed.

    Raises:
        UserError: these values do not go together.
    """
    recipe = read_recipe(document.changed(values | {"train.seed": seed}, ""))
    stage = build_graph(recipe).nodes["train"].stage
    assert isinstance(stage, Train)
    return stage
