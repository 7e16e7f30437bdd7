"""Files appear whole, and are replaced and never rewritten."""

import errno
import hashlib
import os
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from pipeline.store.artifacts import ArtifactStore
from stages.errors import UserError
from stages.files import Root
from stages.patience import Patience


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


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_large_files_are_stored_a_piece_at_a_time(kind, tmp_path, request):
    where = request.getfixturevalue("bucket").format("large") if kind == "bucket" else tmp_path
    store, local = ArtifactStore(str(where)), tmp_path / "local"
    local.mkdir()
    content = os.urandom(40 << 20)
    (local / "weights").write_bytes(content)
    tracemalloc.start()
    try:
        (record,) = store.put_files("train/x-00000001", local).values()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20 or kind == "bucket"  # whose server is in this process
    assert store.root.read(f"train/x-00000001/{record.path}") == content
    assert record.sha256 == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize(
    ("uri", "expected"),
    [("s3://key:secret@bucket/x", "credentials"), ("nosuch://bucket/x", "cannot be opened")],
)
def test_bad_storage_roots_are_explained(uri, expected):
    with pytest.raises(UserError, match=expected) as caught:
        Root(uri)
    assert "secret@" not in str(caught.value)


def test_many_files_are_read_in_order(tmp_path):
    root = Root(str(tmp_path))
    names = [f"many/{number}.bin" for number in range(50)]
    for name in names:
        root.write(name, name.encode())
    assert list(root.read_all(reversed(names))) == [name.encode() for name in reversed(names)]
    with pytest.raises(FileNotFoundError):
        root.read_all([*names, "many/50.bin"])


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_what_lies_below_a_folder_of_the_same_name(kind, tmp_path, request):
    """As of a recipe that is called like its bucket, or like a folder of Sentray's."""
    where = str(tmp_path / "runs")
    if kind == "bucket":
        where = request.getfixturevalue("bucket").format(f"{tmp_path.name}/runs")
    root = Root(where)
    names = {"runs/runs/a-runs/run.json", "a-runs/b", "runs/b"}
    for name in names:
        root.write(name, b"1234")
    assert root.sizes("") == dict.fromkeys(names, 4) and root.names("") == names
    assert root.sizes("runs") == {"runs/a-runs/run.json": 4, "b": 4}


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_a_file_that_changes_is_read_whole_or_not_there(kind, tmp_path, request):
    where = (
        request.getfixturevalue("bucket").format(tmp_path.name) if kind == "bucket" else tmp_path
    )
    root, texts = Root(str(where)), [b"a" * 90, b"b" * 300]
    seen = set()

    def change():
        for _ in range(40):
            for text in texts:
                root.write("lease.json", text)
            root.delete("lease.json")

    with ThreadPoolExecutor(1) as pool:
        changing = pool.submit(change)
        while not changing.done():
            with suppress(FileNotFoundError):
                seen.add(root.read_now("lease.json"))
        changing.result()
    assert seen == set(texts)


@pytest.mark.parametrize("given", ["5m", "", "nan", "-1"])
def test_a_patience_that_is_no_number_is_said_at_once(monkeypatch, given):
    """Not when a store stumbles, hours later."""
    monkeypatch.setenv("SENTRAY_STORAGE_PATIENCE", given)
    with pytest.raises(UserError, match=f"SENTRAY_STORAGE_PATIENCE: '{given}' is no number of sec"):
        Patience("s3://bucket")
