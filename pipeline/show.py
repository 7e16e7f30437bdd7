"""What a run or an artifact is: where from, when, how long, how many rows, a sample of them."""

import json
from typing import Any

import numpy as np

from pipeline.artifacts import Artifact, ArtifactStore
from pipeline.history import newest_record
from pipeline.job import read_texts
from pipeline.plan import artifact_folders
from pipeline.recipe import Recipe
from pipeline.table import results_table
from stages.errors import UserError
from stages.files import masked_uri

# of one sentence: enough to see how much they differ
MAX_REWRITES_SHOWN = 3


def show(what: str, storage: str, num_rows: int) -> str:
    """Text about a recipe's newest run, or about the artifact whose folder is `what`.

    Raises:
        UserError: there is neither.
    """
    store = ArtifactStore(storage)
    what = what.strip("/")
    if store.manifest(what) is not None:
        return _artifact(store, store.open(what), num_rows)
    record = newest_record(store.root, what)
    if record is None:
        known = ", ".join(store.root.list("history")) or "none"
        raise UserError(
            f"show {what}: storage '{masked_uri(storage)}' has neither such an artifact nor "
            f"a run of that recipe (recipes run here: {known})"
        )
    return _run(store, record)


def _run(store: ArtifactStore, record: str) -> str:
    nodes = json.loads(store.root.read(f"{record}/run.json"))
    lines = [record]
    for name, entry in nodes.items():
        manifest = store.manifest(entry["folder"])
        state = f"{manifest.created}, {manifest.seconds:,.0f} s" if manifest else "not finished"
        lines.append(f"  {name:<18} {entry['folder']:<40} {state}")
    if store.root.exists(f"{record}/results.json"):
        results = json.loads(store.root.read(f"{record}/results.json"))
        lines += ["", results_table(results["evaluations"], results["speed"])]
    return "\n".join(lines)


def _artifact(store: ArtifactStore, artifact: Artifact, num_rows: int) -> str:
    manifest = artifact.manifest
    lines = [
        artifact.folder,
        f"  made      {manifest.created} in {manifest.seconds:,.0f} s by recipe {manifest.recipe}",
        f"  machine   {manifest.machine}; "
        + ", ".join(f"{name} {version}" for name, version in manifest.versions.items()),
        f"  print     {manifest.fingerprint}",
        f"  inputs    {', '.join(manifest.inputs.values()) or 'none'}",
    ]
    if manifest.shards:
        size = sum(f.num_bytes for shard in manifest.shards for f in shard.files.values())
        lines.append(
            f"  holds     {manifest.num_rows:,} rows in {len(manifest.shards)} shards, "
            f"{size / 1e6:,.1f} MB"
        )
    if manifest.files:
        lines.append(f"  files     {', '.join(manifest.files)}")
    lines.append("  settings")
    lines += [f"    {key} = {json.dumps(value)}" for key, value in manifest.identity.items()]
    if manifest.stats:
        lines.append("  figures")
        for key, value in manifest.stats.items():
            lines += _figure(key, value)
    if manifest.kind == "perturb":
        sentences = store.open(manifest.inputs["sentences"])
        lines += _rewrites(read_texts(sentences, 0), artifact, num_rows)
    lines += _sample(artifact, num_rows)
    return "\n".join(lines)


def _figure(key: str, value: Any) -> list[str]:
    """`key = value`; a table (a list of figures) gets a line each."""
    if isinstance(value, dict) and any(isinstance(inner, list | dict) for inner in value.values()):
        return [line for name, inner in value.items() for line in _figure(f"{key}.{name}", inner)]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [f"    {key}"] + [f"      {json.dumps(row)}" for row in value]
    return [f"    {key} = {json.dumps(value)}"]


def _sample(artifact: Artifact, num_rows: int) -> list[str]:
    found: list[str] = []
    names = artifact.manifest.shards[0].files if artifact.manifest.shards else {}
    if "rows.parquet" in names:
        found += _table_rows("sample", artifact.shard_path(0, "rows.parquet"), num_rows)
    if "translations.parquet" in names:
        path = artifact.shard_path(0, "translations.parquet")
        found += _table_rows("pivot, and back", path, num_rows)
    if "factors.npy" in names:
        factors = np.load(artifact.shard_path(0, "factors.npy"), mmap_mode="r")
        found.append(f"  sample    {factors.shape[1]} dimensions, {factors.dtype}")
        with np.printoptions(precision=4, suppress=True, threshold=8, edgeitems=4):
            found += [f"    {row}" for row in factors[:num_rows].astype(np.float32)]
    if "ids.npy" in names:
        ids = np.load(artifact.shard_path(0, "ids.npy"), mmap_mode="r")
        offsets = np.load(artifact.shard_path(0, "offsets.npy"))
        found.append("  sample")
        count = min(num_rows, len(offsets) - 1)
        found += [f"    {ids[offsets[i] : offsets[i + 1]].tolist()}" for i in range(count)]
    for name in ("holdout.parquet", "rejects.parquet"):
        if name in artifact.manifest.files:
            title = name.removesuffix(".parquet")
            found += _table_rows(title, artifact.file_path(name), num_rows)
    return found


def _rewrites(texts: list[str], artifact: Artifact, num_rows: int) -> list[str]:
    """Sentences with the rewrites below them, and what was rejected, from the first shard."""
    import pyarrow.parquet as pq

    path = artifact.shard_path(0, "rewrites.parquet")
    kept = pq.read_table(path).slice(0, 10_000).to_pylist()
    rows = list(dict.fromkeys(one["row"] for one in kept))[:num_rows]
    lines = ["  rewrites"]
    for row in rows:
        lines.append(f"    {texts[row]}")
        for one in [one for one in kept if one["row"] == row][:MAX_REWRITES_SHOWN]:
            lines.append(f"      -> {one['text']}")
            if one["negative"] is not None:
                lines.append(f"      != {one['negative']}")
    lines.append("  rejected")
    rejects = pq.read_table(artifact.shard_path(0, "rejects.parquet")).slice(0, num_rows)
    for one in rejects.to_pylist():
        lines += [f"    {texts[one['row']]}", f"      {one['reason']}: {one['text']}"]
    return lines


def _table_rows(title: str, path: Any, num_rows: int) -> list[str]:
    import pyarrow.parquet as pq

    rows = pq.read_table(path).slice(0, num_rows).to_pylist()
    return [f"  {title}"] + ["    " + "  |  ".join(str(v) for v in row.values()) for row in rows]


def show_result(recipe: Recipe) -> str:
    """The table of a recipe whose artifacts are up to date, and where to find everything."""
    from pipeline.runner import collect_results

    store = ArtifactStore(recipe.storage)
    folders = artifact_folders(recipe)
    results = collect_results(store, folders)
    if "after" not in results["evaluations"]:
        return "no results yet: the evaluation has not been made"
    lines = ["", results_table(results["evaluations"], results["speed"]), ""]
    if store.manifest(folders["export"]) is not None:
        link = store.root.local_path(f"students/{recipe.name}")
        place = link or store.root.path(f"{folders['export']}/files")
        lines.append(f"student: {place}  (SentenceTransformer loads this folder)")
    record = newest_record(store.root, recipe.name, folders)
    if record is not None:
        lines.append(f"report:  {store.root.path(record)}/report.html")
        lines.append(f"as JSON: {store.root.path(record)}/results.json")
    return "\n".join(lines)
