"""What would run, and why. Reads manifests and records only: no torch, no Ray."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from pipeline.plan.graph import Node, build_graph
from pipeline.store.artifacts import ArtifactStore
from pipeline.store.history import last_settings
from pipeline.store.manifest import Manifest, version_here, versions_here
from stages.encoder.hub import cached_commit
from stages.errors import UserError
from stages.files import masked_uri
from stages.recipe import Recipe


@dataclass(frozen=True)
class Planned:
    """One node's state. `reason` is for people; done means that nothing is to do.

    damage: what a published artifact lacks. Nothing can read it until it is made again; whether
        that must be, who reads it knows.
    again: it is being made again; until it is, others read it as it was.
    spare: it is not there, and nothing that is to be made reads it.
    """

    node: Node
    folder: str
    manifest: Manifest | None
    reason: str
    damage: str | None = None
    again: bool = False
    spare: bool = False

    @property
    def done(self) -> bool:
        return self.manifest is not None and not self.again

    @property
    def to_do(self) -> bool:
        return not self.done and not self.spare


@dataclass(frozen=True)
class Plan:
    """The nodes of a recipe with their states, in an order in which they could run.

    recipes: the recipe itself, and those whose students it uses, by name.
    """

    recipe: Recipe
    recipes: dict[str, Recipe]
    nodes: dict[str, Planned]

    @property
    def store(self) -> ArtifactStore:
        return ArtifactStore(self.recipe.storage)

    @property
    def folders(self) -> dict[str, str]:
        """Folder of every node's artifact, published or not, by node."""
        return {name: planned.folder for name, planned in self.nodes.items()}

    @property
    def graph(self) -> dict[str, Node]:
        """The nodes alone."""
        return {name: planned.node for name, planned in self.nodes.items()}

    def missing_for(self, targets: Iterable[str]) -> list[Node]:
        """What is not there of these nodes, and of what their making needs; in an order in which
        they can be made."""
        needed = set(targets)
        for name, planned in reversed(self.nodes.items()):
            if name in needed and not planned.done:
                needed.update(planned.node.inputs.values())
        return [one.node for name, one in self.nodes.items() if name in needed and not one.done]


def make_plan(recipe: Recipe) -> Plan:
    """Every node of the recipe with its state."""
    store = ArtifactStore(recipe.storage)
    graph = build_graph(recipe)
    before = last_settings(store.root, recipe.name)
    planned: dict[str, Planned] = {}
    for node in graph.nodes.values():
        folder = store.folder(node.kind, node.title, node.fingerprint)
        manifest = store.manifest(folder)
        if manifest is not None and manifest.fingerprint != node.fingerprint:
            raise UserError(
                f"artifact {folder}: belongs to another fingerprint with the same first "
                f"digits ({manifest.fingerprint}); choose another `storage` for one of the two"
            )
        damage, names = None, set() if manifest is None else store.root.names(folder)
        again = store.is_made_again(folder, names)
        if manifest is None:
            reason = _why(store, node, folder, planned, before)
        elif again:
            reason = f"being made again: {_how_far(store, node, folder, planned) or 'begun'}"
        else:
            known = planned[node.source].manifest if node.source else None
            numbers = known.shards.number if known else []
            damage = store.damage(folder, manifest, names, numbers)
            reason = f"done, {_size(manifest)}"
            if damage is not None:
                reason = f"damaged: {damage}; make it again: sentray run RECIPE --force {node.name}"
        planned[node.name] = Planned(node, folder, manifest, reason, damage, again)
    plan = Plan(recipe, graph.recipes, planned)
    read = {name for node in graph.nodes.values() for name in node.inputs.values()}
    wanted = {name for name, node in graph.nodes.items() if name not in read or node.stage.wanted}
    missing = {node.name for node in plan.missing_for(wanted)}
    for name, one in planned.items():
        if not one.done and name not in missing:
            planned[name] = replace(one, reason="not there, and not needed", spare=True)
    return plan


def _why(
    store: ArtifactStore, node: Node, folder: str, done: dict[str, Planned], before: dict[str, Any]
) -> str:
    if begun := _how_far(store, node, folder, done):
        return begun
    changes = _changes(node, before.get(node.name))
    if changes:
        return "stale because " + "; ".join(changes)
    stale = [name for name in node.inputs.values() if not done[name].done]
    if stale and node.name in before:
        return f"stale because {', '.join(stale)} will be made again"
    return "to do"


def _how_far(store: ArtifactStore, node: Node, folder: str, done: dict[str, Planned]) -> str:
    """What there is of an unfinished artifact; "" for nothing."""
    source = done[node.source].manifest if node.source else None
    if source is not None:
        total = len(source.shards)
        finished = store.recorded_shards(folder)
        missing = sum(number not in finished for number in source.shards.number)
        if missing < total:
            return f"missing {missing} of {total} shards"
    return node.stage.unfinished(store.root.list(f"work/{folder}"))


def _changes(node: Node, old: dict[str, Any] | None) -> list[str]:
    if old is None:
        return []
    found = []
    for key in sorted(node.identity.keys() | old.keys()):
        was, now = old.get(key), node.identity.get(key)
        if was != now:
            path = key.replace("encoder", node.where, 1) if node.where else key
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
    if path.endswith(".model.vocabulary") and was and now:
        return [f"{path.removesuffix('.vocabulary')} has another vocabulary"]
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


def _other_versions(plan: Plan) -> list[str]:
    """What is there and was made with other versions of packages, or other commits of the hub's
    models; it stays as it is."""
    here: dict[str, str | None] = {**versions_here()}
    made: dict[tuple[str, str], list[str]] = {}
    for name, one in plan.nodes.items():
        for what, version in one.manifest.versions.items() if one.manifest else ():
            if what not in here:
                model, at, revision = what.partition("@")
                here[what] = cached_commit(model, revision) if at else version_here(what)
            if here[what] not in (version, None):
                made.setdefault((what, version), []).append(name)
    return [
        f"made with {what} {version}, and now {here[what]} is here: {names[0]}"
        + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        + ("; what is still to do reads the former; to read the latter, name it as `revision`"
           if "@" in what else "")
        for (what, version), names in made.items()
    ]  # fmt: skip


def plan_text(plan: Plan) -> str:
    """The plan as a table for a terminal."""
    everyone = plan.nodes.values()
    width = max(len(one.node.name) for one in everyone)
    place = max(len(one.folder) for one in everyone)
    lines = [f"{plan.recipe.name}: storage {masked_uri(plan.recipe.storage)}"]
    for one in everyone:
        mark = "!" if one.damage else "=" if one.done else "-" if one.spare else "+"
        lines.append(f" {mark} {one.node.name:<{width}}  {one.folder:<{place}}  {one.reason}")
        if one.to_do and one.node.inputs:
            lines.append(f"   {'':<{width}}  reads {', '.join(one.node.inputs.values())}")
    lines += [f"warning: {warning}" for warning in plan.recipe.warnings()]
    lines += [f"note: {note}" for note in _other_versions(plan)]
    to_do = sum(one.to_do for one in everyone)
    damaged = sum(one.damage is not None for one in everyone)
    end = f"{to_do} of {len(plan.nodes)} to do" if to_do else "nothing to do"
    lines.append(end + (f", {damaged} damaged" if damaged else ""))
    return "\n".join(lines)
