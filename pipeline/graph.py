"""The stage graph of a recipe: which artifacts it needs, and what each one depends on.

A node's fingerprint covers its stage's version, its identity settings, the content of its files
and models, and the fingerprints of its inputs, so the whole graph is known before anything runs.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.fingerprint import fingerprint
from pipeline.provenance import describe_model, describe_packages, describe_path
from pipeline.recipe import Recipe, load_recipe
from stages.encoder.settings import EncoderSettings, ModelSettings, space_is_part_of_a_token
from stages.errors import UserError
from stages.evaluate.settings import EvaluateSettings, StsSettings
from stages.negation import parser_versions
from stages.perturb.settings import BackTranslation, PerturbSettings

# Raised when a stage's code changes what it computes. train 4: RankEncoder's maximum is with the
# contrastive part only, InfoNCE and consistency keep their digits, factors are renormalised when
# read, head and pooling run in float32.
VERSIONS = {"sentences": 1, "translate": 1, "perturb": 2, "embed": 1, "corpus": 1, "ranks": 1,
            "tokens": 2, "train": 4, "evaluate": 1, "export": 2, "speed": 1}  # fmt: skip
# Of encoders whose template has a space before the sentence that may be part of a token: until 1
# that space was a token of its own. Others have no such mark: what they made is found as before.
TEMPLATE_TOKENS = 2
# Written by shard from a shard of their first input; these can be continued shard by shard.
ROW_WISE = ("translate", "perturb", "embed", "ranks", "tokens")


@dataclass(frozen=True)
class Node:
    """One artifact of a run.

    name: in messages and on the command line, e.g. `embed:minilm`, or `simcse/train` for a node
        of the recipe simcse that this one builds on.
    recipe: the recipe it belongs to.
    settings: identity by setting path; an encoder's own settings are under `encoder.`, so that
        the same encoder is the same artifact as a teacher, a student's start or in another recipe.
    encoder_path: where the recipe has that encoder, e.g. `teachers[0]`.
    inputs: the nodes it reads: their names here, by what its recipe calls them (`train`,
        `embed:minilm`; `recipe:FILE` for the student of another recipe).
    """

    name: str
    recipe: Recipe
    kind: str
    title: str
    settings: dict[str, Any]
    encoder_path: str
    inputs: dict[str, str]
    fingerprint: str


def build_graph(recipe: Recipe, above: tuple[str, ...] = ()) -> dict[str, Node]:
    """All nodes by name, inputs before those who read them.

    Args:
        above: files of the recipes that need this one as an encoder.

    Raises:
        UserError: a file, model folder or package that the recipe names is not there, or a recipe
            that builds on itself.
    """
    return _Builder(recipe, above).build()


class _Builder:
    def __init__(self, recipe: Recipe, above: tuple[str, ...]) -> None:
        self._recipe = recipe
        self._above = above
        self._nodes: dict[str, Node] = {}
        self._students: dict[str, str] = {}

    def _add(
        self,
        name: str,
        settings: dict[str, Any],
        inputs: dict[str, str],
        title: str | None = None,
        encoder_path: str = "",
    ) -> None:
        kind = name.partition(":")[0]
        whole = fingerprint({
            "kind": kind,
            "version": VERSIONS[kind],
            "settings": settings,
            "inputs": [self._nodes[name].fingerprint for name in inputs.values()],
        })  # fmt: skip
        node = Node(
            name, self._recipe, kind, title or self._recipe.name, settings, encoder_path, inputs,
            whole,
        )  # fmt: skip
        # the same step of a recipe that this one builds on becomes this recipe's
        alike = [n.name for n in self._nodes.values() if n.fingerprint == whole and "/" in n.name]
        self._nodes[name] = node
        if alike:
            self._put_in_place_of(alike[0], node)

    def _put_in_place_of(self, old: str, new: Node) -> None:
        nodes = {}
        for node in self._nodes.values():
            if node.name == old:
                nodes[new.name] = new
            elif node.name != new.name:
                inputs = {own: new.name if n == old else n for own, n in node.inputs.items()}
                nodes[node.name] = replace(node, inputs=inputs)
        self._nodes = nodes
        self._students = {f: new.name if n == old else n for f, n in self._students.items()}

    def build(self) -> dict[str, Node]:
        recipe, ranks = self._recipe, self._recipe.ranks
        self._add("sentences", _sentences(recipe), {})
        factors = []
        for number, teacher in enumerate(recipe.teachers):
            teaches, by_ranks = recipe.train.objectives.needs_teacher, teacher.similarity == "ranks"
            embed, corpus, own = (f"{kind}:{teacher.name}" for kind in ("embed", "corpus", "ranks"))
            if teaches or by_ranks:
                identity, student = self._encoder(teacher.encoder())
                inputs, path = _same("sentences") | student, f"teachers[{number}]"
                self._add(embed, identity, inputs, teacher.name, path)
            if by_ranks:
                self._add(corpus, _ranks(recipe), _same("sentences", embed), teacher.name)
            if by_ranks and teaches:
                self._add(own, {}, _same(embed, corpus), teacher.name)
            if teaches:
                factors.append(own if by_ranks else embed)

        identity, student = self._encoder(recipe.student)  # head and dropout included
        keys = ("model", "template", "second_template", "pooling", "max_length", "final_period")
        names = [f"encoder.{key}" for key in (*keys, "template_tokens")]
        tokenizer = {name: identity[name] for name in names if name in identity}
        inputs = _same("sentences") | student
        self._add("tokens", tokenizer, inputs, encoder_path="student")
        tokens = ["tokens"]
        for number, source in enumerate(recipe.perturb):
            own, where = f"perturb:{source.name}", f"perturb[{number}]"
            needed = _same("sentences")
            if source.backtranslation is not None:  # another filter must not translate again
                raw = f"translate:{source.name}"
                self._add(raw, _translation(source.backtranslation, where), needed, source.name)
                needed = _same(raw, "sentences")
            self._add(own, _perturb(source, where), needed, source.name)
            # a rewrite's hard negative is another row of tokens with the same owner
            wanted = ["text", "negative"][: 1 + recipe.train.objectives.needs_negatives]
            for column in wanted:
                tokens.append(f"tokens:{source.name}" + "+negatives" * (column == "negative"))
                settings = tokenizer | {"column": column}
                self._add(tokens[-1], settings, _same(own) | student, encoder_path="student")
        if recipe.train.objectives.soft_negative:
            tokens.append("tokens:negated")
            negation = {"negation": parser_versions()}
            self._add(tokens[-1], tokenizer | negation, inputs, encoder_path="student")
        inputs = _same(*tokens, *factors) | student
        self._add("train", identity | _train(recipe), inputs, encoder_path="student")
        if ranks and ranks.inference_weight is not None:
            read = {"evaluate.max_length": recipe.evaluate.max_length}
            self._add("corpus:after", _ranks(recipe) | read, _same("sentences", "train"))
        self._add_evaluations()
        results = [name for name in self._nodes if name.startswith("evaluate:")]
        after = ["corpus:after"] if "corpus:after" in self._nodes else []
        settings = {"ranks.inference_weight": ranks.inference_weight} if ranks and after else {}
        self._add("export", settings, _same("sentences", "train", *after, *results))
        if recipe.evaluate.speed and recipe.teachers:
            students: dict[str, str] = {}
            for teacher in recipe.teachers:
                students |= self._encoder(teacher.encoder())[1]
            self._add("speed", {}, _same("sentences", "train", "export") | students)
        return self._nodes

    def _add_evaluations(self) -> None:
        """Before, every teacher, after; and what ranks add to rank teachers and to the student."""
        recipe, suite = self._recipe, _suite(self._recipe.evaluate)
        held_out = _same("sentences") if recipe.evaluate.retrieval else {}
        encoders = [("before", "student", recipe.student.encoder())] + [
            (teacher.name, f"teachers[{number}]", teacher.encoder())
            for number, teacher in enumerate(recipe.teachers)
        ]
        for name, path, settings in encoders:
            identity, student = self._encoder(settings)
            identity = {key: v for key, v in identity.items() if key != "encoder.max_length"}
            title = recipe.name if name == "before" else name
            inputs = held_out | student
            self._add(f"evaluate:{name}", identity | suite, inputs, title, path)
            if f"corpus:{name}" in self._nodes:  # Eq. 2: ranks alone
                weight = {"ranks.inference_weight": 1.0}
                inputs = _same(f"corpus:{name}") | inputs
                self._add(f"evaluate:{name}+ranks", identity | suite | weight, inputs, title, path)
        self._add("evaluate:after", suite, _same("train") | held_out)
        if "corpus:after" in self._nodes:
            assert recipe.ranks is not None
            weight = {"ranks.inference_weight": recipe.ranks.inference_weight or 0.0}
            inputs = _same("corpus:after", "train") | held_out
            self._add("evaluate:after+ranks", suite | weight, inputs)

    def _encoder(self, settings: EncoderSettings) -> tuple[dict[str, Any], dict[str, str]]:
        """Identity of an encoder, and the training that makes it, if a recipe does."""
        identity = settings.identity()
        identity.pop("revision")  # part of the model's description where it matters
        inputs = {}
        if space_is_part_of_a_token(settings):
            identity["template_tokens"] = TEMPLATE_TOKENS
        if settings.recipe_file is None:
            identity["model"] = describe_model(settings)
        else:
            name = self._student_of(settings.recipe_file)
            identity["model"] = {"recipe": self._nodes[name].fingerprint}
            inputs[settings.model] = name
        return {f"encoder.{key}": value for key, value in identity.items()}, inputs

    def _student_of(self, file: str) -> str:
        """Adds what another recipe needs to train its student; returns that training's node."""
        if file in self._students:
            return self._students[file]
        if file in self._above:
            raise UserError(f"recipe {file}: builds on its own student; use another model")
        recipe = student_recipe(file, self._recipe.unexpanded(self._recipe.storage))
        known = {node.fingerprint: name for name, node in self._nodes.items()}
        names: dict[str, str] = {}
        nodes = build_graph(recipe, (*self._above, file))
        needed = _needed(nodes, "train")
        for name, node in nodes.items():
            if name not in needed:
                continue
            names[name] = known.get(node.fingerprint, f"{recipe.name}/{name}")
            if names[name] not in self._nodes:
                inputs = {own: names[there] for own, there in node.inputs.items()}
                self._nodes[names[name]] = replace(node, name=names[name], inputs=inputs)
            elif self._nodes[names[name]].fingerprint != node.fingerprint:
                raise UserError(
                    f"recipe {file}: two recipes with different settings are called "
                    f"'{recipe.name}'; rename one of them"
                )
        self._students[file] = names["train"]
        return names["train"]


def student_recipe(file: str, storage: str) -> Recipe:
    """The recipe whose student another one uses; its artifacts go to that one's storage."""
    return load_recipe(file, [f"storage={storage}"])


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


def _needed(nodes: dict[str, Node], target: str) -> set[str]:
    """`target` and all it depends on."""
    found = {target}
    for name in reversed(nodes):
        if name in found:
            found.update(nodes[name].inputs.values())
    return found


def _ranks(recipe: Recipe) -> dict[str, Any]:
    assert recipe.ranks is not None
    identity = recipe.ranks.identity()
    identity.pop("inference_weight")
    return {f"ranks.{key}": value for key, value in identity.items()}


def _sentences(recipe: Recipe) -> dict[str, Any]:
    settings = recipe.sentences
    identity = settings.identity()
    identity.pop("path")
    if settings.path is not None:
        identity["path"] = describe_path(settings.path, "sentences.path")
    if settings.dataset is not None and Path(settings.dataset).is_dir():
        identity["dataset"] = describe_path(settings.dataset, "sentences.dataset")
    if settings.source == "python-docs":
        identity["packages"] = describe_packages(settings.packages)
    return {f"sentences.{key}": value for key, value in identity.items()}


def _perturb(source: PerturbSettings, where: str) -> dict[str, Any]:
    whole = source.identity()
    if source.pairs is not None:
        whole["pairs"]["path"] = describe_path(source.pairs.path, f"{where}.pairs.path")
    if source.rewriting is not None and source.rewriting.engine == "vllm":
        model = ModelSettings(model=source.rewriting.model)
        whole["rewriting"]["model"] = describe_model(model)
    used = ("filters", "pairs", "rewriting")
    return {f"perturb.{key}": whole[key] for key in used if whole[key] is not None}


def _translation(settings: BackTranslation, where: str) -> dict[str, Any]:
    whole = settings.identity()
    for key in ("to_pivot", "from_pivot"):
        whole[key]["model"] = describe_model(getattr(settings, key))
    return {f"perturb.backtranslation.{key}": value for key, value in whole.items()}


def _train(recipe: Recipe) -> dict[str, Any]:
    found = {f"train.{key}": value for key, value in recipe.train.identity().items()}
    if detector := recipe.train.objectives.replaced_token:
        found["train.objectives"]["replaced_token"]["generator"] = describe_model(
            detector.generator
        )
    if recipe.train.dev is not None:
        sets = enumerate(recipe.train.dev.sts)
        found["train.dev"] = recipe.train.dev.identity() | {
            "sts": [_sts(one, f"train.dev.sts[{number}]") for number, one in sets]
        }
    if recipe.train.objectives.needs_teacher:
        for number, teacher in enumerate(recipe.teachers):
            found[f"teachers[{number}].weight"] = teacher.weight
    return found


def _suite(settings: EvaluateSettings) -> dict[str, Any]:
    sets = [_sts(one, f"evaluate.sts[{number}]") for number, one in enumerate(settings.sts)]
    whole = settings.identity() | {"sts": sets}
    if settings.geometry is not None:
        where = _sts(settings.geometry, "evaluate.geometry")
        whole["geometry"] = settings.geometry.identity() | where
    whole.pop("speed")
    return {f"evaluate.{key}": value for key, value in whole.items()}


def _sts(settings: StsSettings, prefix: str) -> dict[str, Any]:
    identity = settings.identity()
    if settings.path is not None:
        identity["path"] = describe_path(settings.path, f"{prefix}.path")
    if settings.dataset is not None and Path(settings.dataset).is_dir():
        identity["dataset"] = describe_path(settings.dataset, f"{prefix}.dataset")
    return identity
