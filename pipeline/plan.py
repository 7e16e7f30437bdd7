"""What would run, and why. Reads manifests and records only: no torch, no Ray."""

import json
from dataclasses import dataclass
from typing import Any

from pipeline.artifacts import ArtifactStore, Manifest
from pipeline.graph import ROW_WISE, Node, build_graph
from pipeline.history import last_settings
from pipeline.recipe import Recipe
from stages.errors import UserError
from stages.files import masked_uri


@dataclass(frozen=True)
class Step:
    """One node's state. `reason` is for people; done means that nothing is to do.

    damage: what a published artifact lacks. Nothing can read it until it is made again; whether
        that must be, who reads it knows.
    """

    node: Node
    folder: str
    manifest: Manifest | None
    reason: str
    damage: str | None = None

    @property
    def done(self) -> bool:
        return self.manifest is not None


def make_plan(recipe: Recipe) -> list[Step]:
    """Every node of the recipe with its state, in an order in which they could run."""
    store = ArtifactStore(recipe.storage)
    nodes = build_graph(recipe)
    before = last_settings(store.root, recipe.name)
    steps: dict[str, Step] = {}
    for node in nodes.values():
        folder = store.folder(node.kind, node.title, node.fingerprint)
        manifest = store.manifest(folder)
        if manifest is not None and manifest.fingerprint != node.fingerprint:
            raise UserError(
                f"artifact {folder}: belongs to another fingerprint that starts alike "
                f"({manifest.fingerprint}); choose another `storage` for one of the two"
            )
        damage = None
        if manifest is None:
            reason = _why(store, node, folder, steps, before)
        else:
            source = steps[next(iter(node.inputs.values()))] if node.kind in ROW_WISE else None
            known = source.manifest if source is not None else None
            damage = store.damage(
                folder, manifest, [shard.number for shard in known.shards] if known else []
            )
            reason = f"done, {_size(manifest)}"
            if damage is not None:
                reason = f"damaged: {damage}; make it again with --force {node.name}"
        steps[node.name] = Step(node, folder, manifest, reason, damage)
    return list(steps.values())


def artifact_folders(recipe: Recipe) -> dict[str, str]:
    """Folder of every node's artifact, published or not, by node."""
    return {step.node.name: step.folder for step in make_plan(recipe)}


def _why(
    store: ArtifactStore, node: Node, folder: str, steps: dict[str, Step], before: dict[str, Any]
) -> str:
    source = steps[next(iter(node.inputs.values()))] if node.kind in ROW_WISE else None
    if source is not None and source.manifest is not None:
        total = len(source.manifest.shards)
        finished = store.finished_shards(folder)
        missing = sum(shard.number not in finished for shard in source.manifest.shards)
        if missing < total:
            return f"missing {missing} of {total} shards"
    checkpoints = [name for name in store.root.list(f"work/{folder}") if name.startswith("step-")]
    if checkpoints:
        return "unfinished, continues at its newest checkpoint"
    changes = _changes(node, before.get(node.name))
    if changes:
        return "stale because " + "; ".join(changes)
    stale = [name for name in node.inputs.values() if not steps[name].done]
    if stale and node.name in before:
        return f"stale because {', '.join(stale)} will be made again"
    return "to do"


def _changes(node: Node, old: dict[str, Any] | None) -> list[str]:
    if old is None:
        return []
    found = []
    old, new = (node.recipe.unexpanded(settings) for settings in (old, node.settings))
    for key in sorted(new.keys() | old.keys()):
        was, now = old.get(key), new.get(key)
        if was != now:
            path = key.replace("encoder", node.encoder_path, 1) if node.encoder_path else key
            found += _difference(path, was, now)
    return found


def _difference(path: str, was: Any, now: Any) -> list[str]:
    if isinstance(was, dict) and isinstance(now, dict):
        return [
            change
            for key in sorted(was.keys() | now.keys())
            if was.get(key) != now.get(key)
            for change in _difference(f"{path}.{key}", was.get(key), now.get(key))
        ]
    if path.endswith(".model.recipe"):
        return [f"{path.removesuffix('.recipe')} is another student of its recipe"]
    if path.endswith(("sha256", "path")) and was and now:
        return [f"the content of {path.removesuffix('.sha256')} changed"]
    return [f"{path} was {_shown(was)} and is {_shown(now)}"]


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _size(manifest: Manifest) -> str:
    seconds = f"{manifest.seconds:.0f} s on {manifest.created[:10]}"
    if manifest.shards:
        return f"{manifest.num_rows:,} rows in {len(manifest.shards)} shards, {seconds}"
    return seconds


def plan_text(recipe: Recipe, steps: list[Step]) -> str:
    """The plan as a table for a terminal."""
    width = max(len(step.node.name) for step in steps)
    place = max(len(step.folder) for step in steps)
    lines = [f"{recipe.name}: storage {masked_uri(recipe.storage)}"]
    for step in steps:
        mark = "!" if step.damage else "=" if step.done else "+"
        lines.append(f" {mark} {step.node.name:<{width}}  {step.folder:<{place}}  {step.reason}")
        if not step.done and step.node.inputs:
            lines.append(f"   {'':<{width}}  reads {', '.join(step.node.inputs.values())}")
    lines += [f"warning: {warning}" for warning in recipe.warnings()]
    to_do = sum(not step.done for step in steps)
    damaged = sum(step.damage is not None for step in steps)
    lines.append(
        (f"{to_do} of {len(steps)} to do" if to_do else "nothing to do")
        + (f", {damaged} damaged" if damaged else "")
    )
    return "\n".join(lines)
