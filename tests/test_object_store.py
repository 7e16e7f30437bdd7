"""The same code on S3: a real server on loopback, store, checkpoints and a whole run."""

from functools import partial

import numpy as np
import pytest

from pipeline.store.artifacts import ArtifactStore
from stages.errors import UserError
from stages.files import Root
from stages.object_store import NoConditionalWrites
from stages.train.checkpoint import Checkpoints
from tests.pipeline.store.test_artifacts import publish
from tests.support.recipes import setting


def write_number(number, folder):
    (folder / "w.bin").write_bytes(b"%d" % number)


def test_artifacts_and_checkpoints_on_s3(bucket, tmp_path):
    store = ArtifactStore(bucket.format("unit"))
    assert store.manifest("embed/x-1") is None
    assert store.root.list("embed") == []
    store.put_shard("embed/x-1", 1, {"a.npy": b"data"}, 3)
    store.put_shard("embed/x-1", 0, {"a.npy": b"atad"}, 3)
    publish(store, "embed/x-1")
    opened = ArtifactStore(bucket.format("unit")).open("embed/x-1")
    assert [p.read_bytes() for p in opened.shard_paths("a.npy")] == [b"atad", b"data"]
    copy = opened.shard_path(0, "a.npy")
    copy.write_bytes(b"broken copy")
    assert opened.shard_path(0, "a.npy").read_bytes() == b"atad"
    store.root.write(f"embed/x-1/{opened.manifest.shards[0].files['a.npy'].path}", b"DATA")
    copy.unlink()
    with pytest.raises(UserError, match="has changed"):
        opened.shard_path(0, "a.npy")
    store.remove("embed/x-1")
    assert store.manifest("embed/x-1") is None
    assert store.root.list("embed/x-1/shards") == []

    checkpoints = Checkpoints(Root(bucket.format("unit")), "work/train")
    for step in (5, 10, 15):
        state = {"step": step, "layout": {"engine": "plain"}}
        checkpoints.save(step, partial(write_number, step), state)
    assert store.root.list("work/train") == ["step-000010", "step-000015"]
    newest = checkpoints.newest()
    with checkpoints.opened(newest) as found:
        assert found.state["step"] == 15
        assert (found.folder / "w.bin").read_bytes() == b"15"


def test_an_object_in_no_bucket_is_not_created(bucket):
    """It is no file that went away, which who takes a lease would wait for."""
    elsewhere = Root(bucket.format("unit").replace("s3://bucket", "s3://nowhere", 1))
    with pytest.raises(NoConditionalWrites, match="nowhere|NoSuchBucket|404"):
        elsewhere.create("a", b"1")


def test_a_whole_run_on_s3(bucket, tmp_path, sentray, tiny_recipe):
    recipe = tiny_recipe(setting("storage", bucket.format("run")), "evaluate.speed=false")
    file = sentray.recipe_file(recipe)
    out = sentray("run", file)
    assert "student after" in out
    assert "nothing to do" in sentray("plan", file)
    root = Root(recipe["storage"])
    (folder,) = root.list("embed")
    manifest = ArtifactStore(recipe["storage"]).manifest(f"embed/{folder}")
    shard = root.read(f"embed/{folder}/{manifest.shards[0].files['factors.npy'].path}")
    (tmp_path / "shard.npy").write_bytes(shard)
    assert np.load(tmp_path / "shard.npy").dtype == np.float16
    assert root.list("work/train") == []
