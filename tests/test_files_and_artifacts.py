"""Files appear whole, artifacts appear last, and what changed afterwards is noticed."""

import errno
import hashlib
import json
import os
import time

import pytest

from pipeline.artifacts import ArtifactStore, new_manifest
from pipeline.fingerprint import fingerprint
from stages.errors import UserError
from stages.files import Root


def publish(store, folder, **changes):
    settings = dict(
        kind="embed", title="x", fingerprint="f" * 64, identity={}, inputs={},
        shards=list(store.finished_shards(folder).values()), files={}, stats={"node": "embed:x"},
        started=time.time(), recipe="r",
    )  # fmt: skip
    manifest = new_manifest(**(settings | changes))
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


def test_a_file_is_replaced_and_never_rewritten(tmp_path):
    """Whoever has it open, or memory-mapped, keeps the bytes that were there."""
    root = Root(str(tmp_path))
    root.write("file", b"old")
    with (tmp_path / "file").open("rb") as reader:
        root.write("file", b"newer")
        assert reader.read() == b"old"
    assert root.read("file") == b"newer"
    assert root.list("") == ["file"]


def test_a_full_disk_is_one_message_and_leaves_nothing(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    root = Root(str(tmp_path))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="the disk is full"):
        root.write("folder/file", b"x")
    assert list((tmp_path / "folder").iterdir()) == []


@pytest.mark.parametrize(
    ("uri", "expected"),
    [("s3://key:secret@bucket/x", "credentials"), ("nosuch://bucket/x", "cannot be opened")],
)
def test_bad_storage_roots_are_explained(uri, expected):
    with pytest.raises(UserError, match=expected) as caught:
        Root(uri)
    assert "secret@" not in str(caught.value)


def test_a_storage_root_that_is_a_file_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be read or written"):
        ArtifactStore(str(tmp_path / "file")).check_writable()


def test_fingerprints_ignore_key_order_and_refuse_what_is_not_data():
    assert fingerprint({"a": 1, "b": [1.5, None]}) == fingerprint({"b": [1.5, None], "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 1.0})
    assert fingerprint("x") == hashlib.sha256(json.dumps("x").encode()).hexdigest()
    for value in (object(), {1: 2}, float("nan"), {"a": [fingerprint]}, b"bytes"):
        with pytest.raises(TypeError, match=r"no stable fingerprint|not a string"):
            fingerprint(value)
