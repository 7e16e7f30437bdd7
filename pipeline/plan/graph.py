"""The graph of a recipe: which artifacts it needs, and what each one depends on.

Every stage's room adds its nodes (`plans` of stages/builtin.py and of plug-ins). A node's
fingerprint covers its stage's version, its identity settings, the content of its files and models,
and the fingerprints of its inputs, so the whole graph is known before anything runs.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pipeline.recipe.read import load_recipe
from stages.builtin import BUILTIN
from stages.content import Described, noting
from stages.contract import Stage
from stages.encoder.settings import OWN_STUDENT, EncoderSettings
from stages.encoder.source import EncoderSource
from stages.errors import UserError
from stages.fingerprint import fingerprint
from stages.plain import yaml_line
from stages.planning import Inputs
from stages.plugins import Extensions, load_extensions, plugin_of
from stages.recipe import Recipe


@dataclass(frozen=True)
class Node:
    """One artifact of a run.

    name: in messages and on the command line, e.g. `embed:minilm`, or `simcse/train` for a node
        of the recipe simcse that this one builds on. It is never taken apart for meaning.
    recipe: name of the recipe it belongs to.
    identity: what changes the result, by setting path, as it is recorded (${VARIABLES} by name);
        an encoder's own settings are under `encoder.`, so that the same encoder is the same
        artifact as a teacher, a student's start or in another recipe.
    where: where the recipe has that encoder, e.g. `teachers[0]`.
    inputs: the nodes it reads: their names here, by what its stage calls them.
    reads: the user's files and folders that it reads.
    retries: how often a lost worker is replaced.
    """

    name: str
    recipe: str
    stage: Stage
    title: str
    identity: dict[str, Any]
    where: str
    inputs: dict[str, str]
    fingerprint: str
    retries: int
    reads: tuple[Described, ...] = ()

    @property
    def kind(self) -> str:
        return self.stage.kind

    @property
    def source(self) -> str | None:
        """Node whose shards a row-wise stage reads: its first input."""
        return next(iter(self.inputs.values())) if self.stage.row_wise else None


def rows_root(node: Node, graph: Mapping[str, Node]) -> str:
    """The node whose rows are this one's: at the end of the chain of first inputs."""
    while node.inputs:
        node = graph[next(iter(node.inputs.values()))]
    return node.name


def fingerprint_of(stage: Stage, identity: dict[str, Any], inputs: list[str]) -> str:
    """Of what a stage computes from inputs with these fingerprints."""
    return fingerprint({
        "kind": stage.kind,
        "version": stage.version,
        "settings": identity | plugin_of(type(stage)),
        "inputs": inputs,
    })  # fmt: skip


def build_graph(recipe: Recipe, above: tuple[str, ...] = ()) -> "RecipeGraph":
    """All nodes of a recipe, inputs before those who read them.

    Args:
        above: files of the recipes that need this one as an encoder.

    Raises:
        UserError: a file, model folder or package that the recipe names is not there, or a recipe
            that builds on itself.
    """
    graph = RecipeGraph(recipe, above)
    for plan in graph.extensions.plans:
        plan(graph)
    return graph


class RecipeGraph:
    """What rooms add their nodes to (`stages.planning.Graph`).

    nodes: by name. recipes: this one, and those whose students it uses, by name.
    """

    def __init__(self, recipe: Recipe, above: tuple[str, ...]) -> None:
        self.recipe = recipe
        self.extensions: Extensions = load_extensions(BUILTIN, recipe.plugins)
        self.factors: dict[str, str] = {}
        self.trainings: list[str] = []
        self.nodes: dict[str, Node] = {}
        self.recipes = {recipe.name: recipe}
        self._borrowed: set[str] = set()  # nodes of the other recipes
        self._above = above
        self._students: dict[str, str] = {}

    def __contains__(self, name: object) -> bool:
        return name in self.nodes

    def stage(self, name: str) -> Stage:
        return self.nodes[name].stage

    def add(
        self,
        name: str,
        stage: Stage,
        inputs: Inputs,
        title: str | None = None,
        where: str = "",
    ) -> str:
        """Adds a node.

        Args:
            inputs: nodes that it reads; with another name for it where the stage has one.
            title: names the artifact's folder; None: the recipe's name.
            where: where the recipe has the encoder that it is about, for messages.
        """
        assert name not in self.nodes, f"two nodes are called {name}"
        named = _named(inputs)
        with noting() as reads:
            identity, whole = self._identified(stage, named)
        recorded = self.recipe.unexpanded(identity)
        node = Node(
            name, self.recipe.name, stage, title or self.recipe.name, recorded, where, named, whole,
            self.recipe.train.max_failures, tuple(reads),
        )  # fmt: skip
        # the same node of a recipe that this one builds on becomes this recipe's
        alike = [
            other.name
            for other in self.nodes.values()
            if other.fingerprint == whole and other.name in self._borrowed
        ]
        self.nodes[name] = node
        if alike:
            self._put_in_place_of(alike[0], node)
        return name

    def fingerprint(self, stage: Stage, inputs: Inputs) -> str:
        """What a node would have."""
        return self._identified(stage, _named(inputs))[1]

    def _identified(self, stage: Stage, named: dict[str, str]) -> tuple[dict[str, Any], str]:
        """Identity and fingerprint."""
        known = {own: self.nodes[there] for own, there in named.items()}
        identity = stage.identity(known)
        inputs = [node.fingerprint for node in known.values()]
        return identity, fingerprint_of(stage, identity, inputs)

    def _put_in_place_of(self, old: str, new: Node) -> None:
        self._borrowed.discard(old)
        nodes = {}
        for node in self.nodes.values():
            if node.name == old:
                nodes[new.name] = new
            elif node.name != new.name:
                inputs = {own: new.name if n == old else n for own, n in node.inputs.items()}
                nodes[node.name] = replace(node, inputs=inputs)
        self.nodes = nodes
        self._students = {f: new.name if n == old else n for f, n in self._students.items()}

    def encoder(self, settings: EncoderSettings) -> EncoderSource[Any]:
        """The encoder, with the training that makes it, if a recipe does; adds that recipe's."""
        if settings.recipe_file is None:
            return EncoderSource(settings, has_kinds=self._has_kinds)
        name = self._student_of(settings.recipe_file)
        return self._trained(settings, name)

    def student(self) -> EncoderSource[Any]:
        """This recipe's student before training, with its vocabulary cut where that is asked for;
        adds what it needs."""
        whole = self.encoder(self.recipe.student)
        if "vocabulary" not in self.nodes:
            return whole
        stage: Any = self.nodes["vocabulary"].stage
        return EncoderSource(whole.settings, stage, "vocabulary", self._has_kinds, whole)

    def trained_student(self, training: str | None = None) -> EncoderSource[Any]:
        """This recipe's own student after training, as it is tested and used.

        Args:
            training: of one of several seeds; None: of the first.
        """
        start = self.recipe.student
        settings = EncoderSettings(
            model=OWN_STUDENT,
            max_length=self.recipe.evaluate.max_length,
            tokens_per_batch=start.tokens_per_batch,
            device=start.device,
            trust_remote_code=start.trust_remote_code,
        )
        return self._trained(settings, training or self.trainings[0])

    def _trained(self, settings: EncoderSettings, name: str) -> EncoderSource[Any]:
        stage: Any = self.nodes[name].stage
        return EncoderSource(settings, stage, name, self._has_kinds)

    @property
    def _has_kinds(self) -> bool:
        return self.recipe.sentences.columns is not None

    def _student_of(self, file: str) -> str:
        """Adds what another recipe needs to train its student; returns that training's node."""
        if file in self._students:
            return self._students[file]
        if file in self._above:
            raise UserError(f"recipe {file}: builds on its own student; use another model")
        storage = yaml_line(self.recipe.unexpanded(self.recipe.storage))
        recipe = load_recipe(file, [f"storage={storage}"])
        known = {node.fingerprint: name for name, node in self.nodes.items()}
        names: dict[str, str] = {}
        other = build_graph(recipe, (*self._above, file))
        for name, one in other.recipes.items():
            if _as_trained(self.recipes.setdefault(name, one)) != _as_trained(one):
                raise UserError(
                    f"recipe {file}: two recipes with different settings are called '{name}'; "
                    "rename one of them"
                )
        needed = needed_for(other.nodes, ["train"])
        for name, node in other.nodes.items():
            if name not in needed:
                continue
            names[name] = known.get(node.fingerprint, f"{recipe.name}/{name}")
            if names[name] not in self.nodes:
                inputs = {own: names[there] for own, there in node.inputs.items()}
                self.nodes[names[name]] = replace(node, name=names[name], inputs=inputs)
                self._borrowed.add(names[name])
        self._students[file] = names["train"]
        return names["train"]


def _as_trained(recipe: Recipe) -> dict[str, Any]:
    """What its student depends on."""
    return recipe.model_dump(exclude={"evaluate", "export"})


def _named(inputs: Inputs) -> dict[str, str]:
    """Nodes by what a stage calls them."""
    return dict((one, one) if isinstance(one, str) else one for one in inputs)


def needed_for(nodes: dict[str, Node], targets: Iterable[str]) -> set[str]:
    """`targets` and all they depend on."""
    found = set(targets)
    for name in reversed(nodes):
        if name in found:
            found.update(nodes[name].inputs.values())
    return found
