"""Which commits of the hub's models a run reads."""

from collections.abc import Collection, Iterable

from pipeline.plan.graph import Node
from pipeline.plan.plan import Plan
from pipeline.store.manifest import Manifest
from stages.encoder.hub import models_in, named, settle


def commits_for(plan: Plan, nodes: Iterable[Node], again: Collection[str] = ()) -> dict[str, str]:
    """Commits for making these nodes: those that the plan's artifacts were made with, since theirs
    must fit together; of models that none of them names, what the hub says now.

    Args:
        again: nodes whose artifacts are made again.

    Raises:
        UserError: a model is not to be had.
    """
    kept = [one.manifest for name, one in plan.nodes.items() if name not in again]
    return commits_beside(kept, nodes)


def commits_beside(manifests: Iterable[Manifest | None], nodes: Iterable[Node]) -> dict[str, str]:
    """As `commits_for`, beside any artifacts."""
    made: dict[str, str] = {}
    for manifest in manifests:
        made |= manifest.versions if manifest is not None else {}
    identities = [node.identity for node in nodes if node.stage.reads_commits]
    models = {named(*model): model for model in models_in(identities)}
    return {name: made.get(name) or settle(*model) for name, model in sorted(models.items())}
