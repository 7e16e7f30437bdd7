"""Encoders tested without a recipe, in this process; what was measured is found again."""

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.plan.graph import Node, fingerprint_of
from pipeline.report.differences import with_differences
from pipeline.report.figures import Results, collect_from
from pipeline.run.commits import commits_beside
from pipeline.run.work import NodeWork
from pipeline.store.artifacts import ArtifactStore
from pipeline.store.leases import Leases, run_lease
from pipeline.store.needs import needs_are_settled, write_needs
from stages.content import noting
from stages.contract import EncoderLabel
from stages.encoder.config import described_in
from stages.encoder.hub import reading
from stages.encoder.modules import Pipeline, read_pipeline
from stages.encoder.settings import EncoderSettings
from stages.encoder.source import EncoderSource
from stages.errors import UserError
from stages.evaluate.base import Evaluation
from stages.evaluate.baselines import WordsSource
from stages.evaluate.settings import EvaluateSettings
from stages.evaluate.stage import Evaluate, known_to_mteb, slug
from stages.fields import RECIPE_PREFIX

Out = Callable[[str], None]
NEEDED = "work/compared"  # folders of what commands at work need


def evaluate_models(
    models: list[str],
    tests: EvaluateSettings,
    storage: str,
    out: Out,
    pooling: str | None = None,
) -> Results:
    """Figures of every model, and their differences to the first one's.

    Args:
        models: folders, ids of the hub, package:NAME, or names of runs whose student is meant.
        pooling: of models that do not say how they pool.

    Raises:
        UserError: there is no such model, or two that would have one name; a test set is bad.
    """
    store = ArtifactStore(storage)
    left_out = [test.title for test in tests.tests if test.reads]
    alone = [one for one in tests.baselines if one.whitening is None and one.recipe_file is None]
    left_out += [f"baseline {one.name}" for one in tests.baselines if one not in alone]
    if left_out:
        out(f"left out, as they need a recipe: {', '.join(left_out)}")
    encoders = [_encoder(model, store, pooling) for model in models]
    if pooling is not None and all(one.settings.pooling == "auto" for one in encoders):
        out(f"--pooling {pooling} changes nothing: every model says how it pools")
    nodes = [
        node
        for model, encoder in zip(models, encoders, strict=True)
        for node in _nodes(EncoderLabel("teacher", model), encoder, tests)
    ]
    for one in alone:
        encoder = EncoderSource[Any](one.encoder()) if one.model else WordsSource(one)
        nodes += _nodes(EncoderLabel("baseline", one.name), encoder, tests, one.takes)
    by_name = {node.name: node for node in nodes}
    if len(by_name) < len(nodes):
        raise UserError(f"{' '.join(models)}: one of them is there twice; name each once")
    folders = {name: store.folder(node.kind, node.title, node.fingerprint)
               for name, node in by_name.items()}  # fmt: skip
    manifests = {name: store.manifest(folder) for name, folder in folders.items()}
    if all(manifests.values()):
        return with_differences(store, collect_from(store, by_name, folders))
    store.check_writable()
    lacking = [node for node in nodes if manifests[node.name] is None]
    with (
        reading(commits_beside(manifests.values(), lacking)),
        _needed(store, list(folders.values()), out),
    ):
        for node in lacking:
            node.stage.check()
        loaded: dict[str, Any] = {}
        for node in lacking:
            work = NodeWork(node, storage, folders[node.name], {}, tell=_told(node, out))
            if node.stage.shares not in loaded:
                loaded = {node.stage.shares: node.stage.load(work)}  # one model is in memory
            node.stage.make(work, loaded[node.stage.shares])
        return with_differences(store, collect_from(store, by_name, folders))


@contextmanager
def _needed(store: ArtifactStore, folders: list[str], out: Out) -> Iterator[None]:
    """Within it `sentray gc` removes none of these artifacts, which no run may name; on a storage
    without conditional writes it does, and `out` is told that there are no leases."""
    own = f"{NEEDED}/{uuid.uuid4().hex[:8]}"

    def say(text: str, important: bool = False, figures: object = None) -> None:
        out(text)

    with Leases(store.root, out) as leases:
        leases.hold(run_lease(own), lambda: "sentray evaluate")
        with needs_are_settled(store.root, say):
            write_needs(store.root, own, folders)
        try:
            yield
        finally:
            store.root.delete(own)


def _encoder(model: str, store: ArtifactStore, pooling: str | None) -> EncoderSource[Any]:
    settings = EncoderSettings(model=_located(model, store), pooling="auto")
    if read_pipeline(described_in(settings)) == Pipeline():
        if pooling is None:
            raise UserError(f"{model}: it does not say how to pool; set --pooling")
        settings = settings.model_copy(update={"pooling": pooling})
    return EncoderSource(settings)


def _nodes(
    label: EncoderLabel,
    encoder: EncoderSource[Any] | WordsSource,
    tests: EvaluateSettings,
    takes: Callable[[Evaluation], bool] = lambda test: True,
) -> list[Node]:
    found = []
    for test in tests.tests:
        if test.reads or not takes(test):
            continue
        called = Path(label.name).name
        stage = Evaluate(test, encoder, label, tests.max_length)
        stage = known_to_mteb(stage, called, lambda one: fingerprint_of(one, one.identity({}), []))
        with noting() as reads:
            identity = stage.identity({})
        title = slug(f"{called}-{test.title}")
        fingerprint = fingerprint_of(stage, identity, [])
        name = f"evaluate:{label.name}:{test.title}"
        found.append(
            Node(name, "evaluate", stage, title, identity, "", {}, fingerprint, 0, tuple(reads))
        )
    return found


def _located(model: str, store: ArtifactStore) -> str:
    """The folder of a run's student, where that is what is meant."""
    if model.startswith(RECIPE_PREFIX):
        raise UserError(f"{model}: run that recipe, then name it: its student is found by its name")
    student = store.root.local_path(f"students/{model}")
    if not Path(model).exists() and student is not None and student.exists():
        return str(student)
    return model


def _told(node: Node, out: Out) -> Callable[..., None]:
    def tell(text: str, important: bool = False, figures: object = None) -> None:
        assert node.stage.measures is not None
        out(f"{node.stage.measures.name}: {text}")

    return tell
