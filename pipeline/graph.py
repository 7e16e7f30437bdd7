"""The stage graph of a recipe: which artifacts it needs, and what each one depends on.

A node's fingerprint covers its stage's version, its identity settings, the content of its files
and models, and the fingerprints of its inputs, so the whole graph is known before anything runs.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.fingerprint import fingerprint
from pipeline.provenance import describe_model, describe_packages, describe_path
from pipeline.recipe import Recipe
from stages.encoder.settings import EncoderSettings
from stages.evaluate.settings import EvaluateSettings, StsSettings

# Raised when a stage's code changes what it computes.
VERSIONS = {"sentences": 1, "embed": 1, "tokens": 1, "train": 1, "evaluate": 1, "export": 1,
            "speed": 1}  # fmt: skip
# Written by shard from a shard of sentences; these can be continued shard by shard.
ROW_WISE = ("embed", "tokens")


@dataclass(frozen=True)
class Node:
    """One artifact of a run.

    name: in messages and on the command line, e.g. `embed:minilm`; kind: its folder.
    settings: identity by setting path; an encoder's own settings are under `encoder.`, so that
        the same encoder is the same artifact as a teacher, a student's start or in another recipe.
    encoder_path: where the recipe has that encoder, e.g. `teachers[0]`.
    inputs: names of the nodes it reads.
    """

    name: str
    kind: str
    title: str
    settings: dict[str, Any]
    encoder_path: str
    inputs: tuple[str, ...]
    fingerprint: str


def build_graph(recipe: Recipe) -> dict[str, Node]:
    """All nodes by name, inputs before those who read them.

    Raises:
        UserError: a file, model folder or package that the recipe names is not there.
    """
    nodes: dict[str, Node] = {}

    def add(
        name: str,
        settings: dict[str, Any],
        inputs: tuple[str, ...] = (),
        title: str = recipe.name,
        encoder_path: str = "",
    ) -> None:
        kind = name.partition(":")[0]
        whole = {
            "kind": kind,
            "version": VERSIONS[kind],
            "settings": settings,
            "inputs": [nodes[name].fingerprint for name in inputs],
        }
        nodes[name] = Node(name, kind, title, settings, encoder_path, inputs, fingerprint(whole))

    add("sentences", _sentences(recipe))
    embedded = []
    for number, teacher in enumerate(recipe.teachers):
        if recipe.train.objectives.needs_teacher:
            identity = encoder_identity(teacher.encoder())
            embedded.append(f"embed:{teacher.name}")
            add(embedded[-1], identity, ("sentences",), teacher.name, f"teachers[{number}]")
    start = recipe.student.encoder()
    tokenizer = {f"encoder.{key}" for key in ("model", "template", "pooling", "max_length")}
    identity = {k: v for k, v in encoder_identity(start).items() if k in tokenizer}
    add("tokens", identity, ("sentences",), encoder_path="student")
    add("train", _train(recipe), ("tokens", *embedded), encoder_path="student")

    suite = _suite(recipe.evaluate)
    held_out = ("sentences",) if recipe.evaluate.retrieval else ()
    identity = encoder_identity(start, evaluated=True)
    add("evaluate:before", identity | suite, held_out, encoder_path="student")
    for number, teacher in enumerate(recipe.teachers):
        identity = encoder_identity(teacher.encoder(), evaluated=True)
        path = f"teachers[{number}]"
        add(f"evaluate:{teacher.name}", identity | suite, held_out, teacher.name, path)
    add("evaluate:after", suite, ("train", *held_out))
    add("export", {}, ("train", *(name for name in nodes if name.startswith("evaluate:"))))
    if recipe.evaluate.speed and recipe.teachers:
        add("speed", {}, ("sentences", "export"))
    return nodes


def encoder_identity(settings: EncoderSettings, evaluated: bool = False) -> dict[str, Any]:
    """Identity of an encoder. Evaluation reads test sentences at its own maximum length."""
    identity = settings.identity() | {"model": describe_model(settings)}
    identity.pop("revision")  # part of the model's description where it matters
    if evaluated:
        identity.pop("max_length")
    return {f"encoder.{key}": value for key, value in identity.items()}


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


def _train(recipe: Recipe) -> dict[str, Any]:
    found = encoder_identity(recipe.student)  # head and dropout included
    found |= {f"train.{key}": value for key, value in recipe.train.identity().items()}
    if recipe.train.dev is not None:
        found["train.dev"] = recipe.train.dev.identity() | {
            "sts": _sts(recipe.train.dev.sts, "train.dev.sts")
        }
    if recipe.train.objectives.needs_teacher:
        for number, teacher in enumerate(recipe.teachers):
            found[f"teachers[{number}].weight"] = teacher.weight
    return found


def _suite(settings: EvaluateSettings) -> dict[str, Any]:
    sets = [_sts(one, f"evaluate.sts[{number}]") for number, one in enumerate(settings.sts)]
    whole = settings.identity() | {"sts": sets}
    whole.pop("speed")
    return {f"evaluate.{key}": value for key, value in whole.items()}


def _sts(settings: StsSettings, prefix: str) -> dict[str, Any]:
    identity = settings.identity()
    if settings.path is not None:
        identity["path"] = describe_path(settings.path, f"{prefix}.path")
    if settings.dataset is not None and Path(settings.dataset).is_dir():
        identity["dataset"] = describe_path(settings.dataset, f"{prefix}.dataset")
    return identity
