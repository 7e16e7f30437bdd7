"""What a run has written down of rewrites."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq


def perturbed(storage: str, name: str) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Any]]:
    """All rewrites and rejects of one entry, with shard numbers, and the manifest's figures."""
    (folder,) = Path(storage).glob(f"perturb/{name}-*")
    tables = {}
    for kind in ("rewrites", "rejects"):
        tables[kind] = [
            row | {"shard": int(file.name.split(".")[0])}
            for file in sorted(folder.glob(f"shards/*.{kind}.*.parquet"))
            for row in pq.read_table(file).to_pylist()
        ]
    return tables, json.loads((folder / "manifest.json").read_text())["stats"]


def sentences_of(storage: str) -> dict[tuple[int, int], str]:
    """Every sentence, by shard and place."""
    return {
        (int(file.name.split(".")[0]), place): text
        for file in Path(storage).glob("sentences/*/shards/*.parquet")
        for place, text in enumerate(pq.read_table(file).column("text").to_pylist())
    }
