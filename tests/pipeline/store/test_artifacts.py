"""Artifacts appear last, and what changed afterwards is noticed."""

import time
from types import SimpleNamespace

import pytest

from pipeline.store.artifacts import AGAIN, MANIFEST, ArtifactStore
from pipeline.store.manifest import new_manifest, shard_line
from stages.errors import UserError


def publish(store, folder, **changes):
    node = SimpleNamespace(kind="embed", title="x", fingerprint="f" * 64, identity={})
    settings = dict(
        inputs={}, shards=list(store.finished_shards(folder).values()), files={},
        stats={"node": "embed:x"}, started=time.time(), recipe="r",
    )  # fmt: skip
    manifest = new_manifest(node, **(settings | changes))
    store.publish(folder, manifest, {shard.number: shard.num_rows for shard in manifest.shards})


def test_an_artifact_exists_only_once_its_manifest_is_written(tmp_path):
    store = ArtifactStore(str(tmp_path))
    store.put_shard("embed/x-1", 0, {"a.npy": b"data"}, 3)
    assert store.manifest("embed/x-1") is None
    assert list(store.finished_shards("embed/x-1")) == [0]
    publish(store, "embed/x-1")
    opened = store.open("embed/x-1")
    assert opened.manifest.num_rows == 3
    assert opened.shard_path(0, "a.npy").read_bytes() == b"data"


def test_a_manifest_holds_its_shards_as_they_were_recorded(tmp_path):
    """Also where not every shard has the same files."""
    store = ArtifactStore(str(tmp_path))
    for number, files in enumerate([{"a": b"one"}, {"a": b"two", "b": b"three"}, {}]):
        store.put_shard("embed/x-1", number, files, number)
    recorded = list(store.finished_shards("embed/x-1").values())
    publish(store, "embed/x-1", shards=recorded[::-1])
    shards = store.manifest("embed/x-1").shards
    assert list(shards) == recorded
    assert shards.paths == [recorded[0].files["a"].path,
                            *(recorded[1].files[name].path for name in "ab")]  # fmt: skip
    assert shards.num_bytes == 11


def test_a_shard_that_was_lost_and_made_again_is_finished(tmp_path):
    """Though a segment still has its older record, of other bytes."""
    store = ArtifactStore(str(tmp_path))
    record = store.put_shard("embed/x-1", 0, {"a.npy": b"one"}, 3)
    store.put_segment("embed/x-1", [shard_line(record)])
    store.root.delete(f"embed/x-1/{record.files['a.npy'].path}")
    assert not store.finished_shards("embed/x-1")
    again = store.put_shard("embed/x-1", 0, {"a.npy": b"two"}, 3)
    assert store.finished_shards("embed/x-1") == {0: again}


def test_what_was_made_again_while_somebody_looked_is_made(tmp_path):
    """The note of it is listed, and gone before it is read."""
    store = ArtifactStore(str(tmp_path))
    publish(store, "embed/x-1")
    listed = [MANIFEST, AGAIN]
    assert not store.is_made_again("embed/x-1", listed) and not store.begun_again("embed/x-1")
    store.begin_again("embed/x-1")
    assert store.is_made_again("embed/x-1", listed)


@pytest.mark.parametrize("damage", ["change", "remove"])
def test_a_shard_changed_after_publication_is_noticed(tmp_path, damage):
    store = ArtifactStore(str(tmp_path))
    store.put_shard("embed/x-1", 0, {"a.npy": b"data"}, 3)
    publish(store, "embed/x-1")
    path = store.open("embed/x-1").shard_path(0, "a.npy")
    path.write_bytes(b"date") if damage == "change" else path.unlink()
    with pytest.raises(UserError, match="--force embed:mine"):
        store.open("embed/x-1", "embed:mine").shard_paths("a.npy")


def test_two_writers_of_one_artifact_do_not_spoil_each_other(tmp_path):
    """The first manifest keeps pointing to bytes that match it, whatever comes later."""
    first, second = ArtifactStore(str(tmp_path)), ArtifactStore(str(tmp_path))
    first.put_shard("embed/x-1", 0, {"a.npy": b"one"}, 1)
    shards = list(first.finished_shards("embed/x-1").values())
    second.put_shard("embed/x-1", 0, {"a.npy": b"two"}, 1)
    publish(first, "embed/x-1", shards=shards)
    publish(second, "embed/x-1")
    assert first.open("embed/x-1").shard_path(0, "a.npy").read_bytes() == b"one"


def test_a_storage_root_that_is_a_file_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be read or written"):
        ArtifactStore(str(tmp_path / "file")).check_writable()
