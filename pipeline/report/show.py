"""What a run or an artifact is: where from, when, how long, how many rows, a sample of them."""

import json
from collections.abc import Sequence
from typing import Any

from pipeline.plan.plan import make_plan
from pipeline.report.advice import advice_for
from pipeline.report.figures import read_results, told
from pipeline.report.table import results_table
from pipeline.store.artifacts import Artifact, ArtifactStore
from pipeline.store.history import folders_of, newest_record
from pipeline.store.leases import run_lease, seen_leases
from pipeline.upkeep.status import run_state
from stages.builtin import BUILTIN
from stages.errors import StorageError, UserError
from stages.files import masked_uri
from stages.plain import shortened
from stages.plugins import load_extensions
from stages.recipe import Recipe


def show(what: str, storage: str, num_rows: int, plugins: Sequence[str] = ()) -> str:
    """Text about a recipe's newest run, or about the artifact whose folder is `what`.

    Args:
        plugins: packages that know further kinds of artifacts.

    Raises:
        UserError: there is neither.
    """
    store = ArtifactStore(storage)
    what = what.strip("/")
    if store.manifest(what) is not None:
        return _artifact(store, store.open(what), num_rows, plugins)
    record = newest_record(store.root, what)
    if record is None:
        known = ", ".join(store.root.list("history")) or "none"
        raise UserError(
            f"show {what}: storage '{masked_uri(storage)}' has neither such an artifact nor "
            f"a run of that recipe (recipes run here: {known})"
        )
    return _run(store, record)


def _run(store: ArtifactStore, record: str) -> str:
    folders = folders_of(store.root, record)
    held = {one.folder: one for one in seen_leases(store.root)}
    how = run_state(store.root, record, held.get(run_lease(record)))
    lines = [f"{record}  {how.state}{': ' * bool(how.told)}{shortened(how.told)}"]
    width = max(map(len, folders), default=0)
    for name, folder in folders.items():
        manifest = store.manifest(folder)
        state = f"{manifest.created}, {manifest.seconds:,.0f} s" if manifest else "not made"
        if manifest and str(manifest.usage):
            state += f" ({manifest.usage})"
        lines.append(f"  {name:<{width}} {folder:<40} {state}")
    if store.root.list(f"{record}/log"):
        lines.append(f"log: {store.root.shown(record)}/log")
    if store.root.exists(f"{record}/results.json"):
        try:
            results = read_results(store.root, record)
        except StorageError as error:  # all else of the run can be shown
            return "\n".join([*lines, "", str(error)])
        lines += ["", results_table(results)]
        lines += ["", results.advice] if results.advice else []
    return "\n".join(lines)


def _artifact(
    store: ArtifactStore, artifact: Artifact, num_rows: int, plugins: Sequence[str]
) -> str:
    manifest = artifact.manifest
    lines = [
        artifact.folder,
        f"  made      {manifest.created} in {manifest.seconds:,.0f} s by recipe {manifest.recipe}",
        *([f"  took      {manifest.usage}"] if str(manifest.usage) else []),
        f"  machine   {manifest.machine}; "
        + ", ".join(f"{name} {version}" for name, version in manifest.versions.items()),
        f"  print     {manifest.fingerprint}",
        f"  inputs    {', '.join(manifest.inputs.values()) or 'none'}",
    ]
    if manifest.shards:
        lines.append(
            f"  holds     {manifest.num_rows:,} rows in {len(manifest.shards)} shards, "
            f"{manifest.shards.num_bytes / 1e6:,.1f} MB"
        )
    if manifest.files:
        lines.append(f"  files     {', '.join(manifest.files)}")
    lines.append("  settings")
    lines += [f"    {key} = {json.dumps(value)}" for key, value in manifest.identity.items()]
    if manifest.stats:
        lines.append("  figures")
        for key, value in manifest.stats.items():
            lines += _figure(key, value)
    stages = {stage.kind: stage for stage in load_extensions(BUILTIN, plugins).stages}
    if manifest.kind in stages:
        stage = stages[manifest.kind]
        lines += stage.sample(artifact, lambda name: store.open(manifest.inputs[name]), num_rows)
    return "\n".join(lines)


def _figure(key: str, value: Any) -> list[str]:
    """`key = value`; a table (a list of figures) gets a line each."""
    if isinstance(value, dict) and any(isinstance(inner, list | dict) for inner in value.values()):
        return [line for name, inner in value.items() for line in _figure(f"{key}.{name}", inner)]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [f"    {key}"] + [f"      {json.dumps(row)}" for row in value]
    return [f"    {key} = {json.dumps(value)}"]


def show_result(recipe: Recipe) -> str:
    """The table of a recipe whose artifacts are up to date, and where to find everything."""
    plan = make_plan(recipe)
    root, (results, record) = plan.store.root, told(plan)
    if not results.complete:
        return "no results yet: the evaluation has not been made"
    lines = ["", results_table(results), ""]
    if line := results.advice or advice_for(plan, results):
        lines.append(line)
    link = root.local_path(f"students/{recipe.name}")
    if link is not None and link.exists():
        lines.append(f"student: {link}  (SentenceTransformer loads this folder)")
    if record is not None:
        lines.append(f"report:  {root.shown(record)}/report.html")
        lines.append(f"as JSON: {root.shown(record)}/results.json")
    return "\n".join(lines)
