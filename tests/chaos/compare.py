"""Whether an artifact is what an undisturbed run makes, and its ledger balances."""

import hashlib
import json
from dataclasses import replace
from typing import Any

from pipeline.store.artifacts import ArtifactStore
from pipeline.store.manifest import NO_USAGE, read_manifest, read_shard
from pipeline.upkeep.contents import key_of
from stages.files import Root

# What two runs of the same never share, how the work was cut into requests, and which of two nodes
# that are the same made it
PASSING = {
    "created", "seconds", "usage", "machine", "elapsed_seconds", "seconds_per_step",
    "tokens_per_second", "peak_memory_gib", "requests", "prompt_tokens", "answer_tokens", "spent",
    "node", "encoder",
}  # fmt: skip


def check_same(root: Root, folder: str, manifest: dict[str, Any], other: dict[str, Any]) -> None:
    """Raises AssertionError where an artifact is not as the `other`, or not whole."""
    one, expected = _lasting(manifest), _lasting(other)
    assert one == expected, f"{folder} is not as it should be: {_first(one, expected)}"
    _check_ledger(root, folder, manifest)


def _lasting(manifest: dict[str, Any]) -> dict[str, Any]:
    """What is the same whenever and wherever an artifact is made."""
    found = _plain(manifest)
    del found["title"]
    found["inputs"] = {name: key_of(folder) for name, folder in found["inputs"].items()}
    # a folder's name is of all its files, of which TensorBoard's have times
    found["files"] = {
        name: record["sha256"]
        for name, record in found["files"].items()
        if not name.startswith("metrics/")
    }
    if found["kind"] in ("variant", "speed"):  # their figures tell how fast it is
        del found["stats"]
    return dict(found)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items() if key not in PASSING}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value


def _first(one: Any, other: Any, path: str = "") -> str:
    """Where two differ first."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(one.keys() | other.keys()):
            if one.get(key) != other.get(key):
                return _first(one.get(key), other.get(key), f"{path}.{key}")
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            if a != b:
                return _first(a, b, f"{path}[{number}]")
    return f"{path}: {str(one)[:200]} instead of {str(other)[:200]}"


def _check_ledger(root: Root, folder: str, manifest: dict[str, Any]) -> None:
    """Every shard's record, and what a run reads of the ledger's segments, says what the manifest
    says, and its files hold what they should."""
    whole = read_manifest(json.dumps(manifest).encode())
    records = [*whole.files.values()]
    ledger = ArtifactStore(root.uri).finished_shards(folder)
    for shard in whole.shards:
        stored = read_shard(root.read(f"{folder}/shards/{shard.number:05d}.json"))
        for one in (stored, ledger[shard.number]):
            assert replace(one, usage=NO_USAGE) == shard
        records += shard.files.values()
    for record in records:
        data = root.read(f"{folder}/{record.path}")
        assert len(data) == record.num_bytes, f"{folder}/{record.path} is cut"
        assert hashlib.sha256(data).hexdigest() == record.sha256, f"{record.path} is damaged"
