"""Leases: one of several makes an artifact, the others wait for it or take over."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipeline.store import leases as module
from pipeline.store.leases import Holder, Lease, Leases, Watch
from stages.errors import StorageError
from stages.files import Root
from tests.support.command import wait_until


@pytest.fixture(params=["folder", "bucket"])
def root(request, tmp_path):
    if request.param == "folder":
        return Root(str(tmp_path))
    bucket = request.getfixturevalue("bucket")
    return Root(bucket.format(tmp_path.name))


class Listener:
    """Takes what a waiting run says."""

    def __init__(self):
        self.said = []

    def __call__(self, text, important=False):
        self.said.append(text)


def quick(root, warn=pytest.fail, stale_seconds=0.6):
    return Leases(root, warn, beat_seconds=0.1, stale_seconds=stale_seconds)


HOLDER = {
    "id": "0a0a0a0a", "who": "ann@other", "since": "10:00:00",
    "process": ["another boot", 1, "2"], "beat": 0, "said": "3/9 shards",
}  # fmt: skip


def elsewhere(root, folder="embed/0a1b2c3d", number=1):
    """A lease of a process on another machine, about which nothing else is known."""
    root.write(f"leases/{folder}/{number:06d}.json", json.dumps(HOLDER).encode())
    return HOLDER


def never():
    return False


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"\x00\xff", b"{}", b"[1]", b"[" * 100_000, b'{"id": "0a0a0a0a", "who": "ann"',
        json.dumps(HOLDER | {"process": []}).encode(), json.dumps(HOLDER | {"who": 3}).encode(),
    ],
    ids=lambda raw: raw[:20],
)  # fmt: skip
def test_what_is_no_lease_is_waited_for_in_words_and_taken_over(root, raw):
    root.write("leases/embed/0a1b2c3d/000001.json", raw)
    told = Listener()
    with quick(root) as runs:
        assert runs.take("embed/0a1b2c3d", never, told, str) is not None
    assert told.said == [
        "waits for leases/embed/0a1b2c3d/000001.json, which cannot be read; of another version of "
        "Sentray, while it changes",
        "takes over from a lease that cannot be read, which is gone",
    ]


@pytest.mark.parametrize("number", [999_999, 123_456_789])
def test_a_number_of_more_digits_is_followed(root, number):
    elsewhere(root, number=number)
    root.write("leases/embed/0a1b2c3d/notes.json", b"{}")
    with quick(root) as runs:
        lease = runs.take("embed/0a1b2c3d", never, Listener(), str)
        assert lease.number == number + 1 and not runs.is_lost(lease)
        assert root.list("leases/embed/0a1b2c3d") == [f"{number + 1}.json", "notes.json"]
        assert [one.holder.id for one in module.seen_leases(root)] == [lease.holder.id]


def test_a_holder_whose_clock_is_far_ahead_does_not_live_for_ever(tmp_path):
    root = Root(str(tmp_path))
    elsewhere(root)
    for seconds, alive in ((60, True), (86_400, False)):
        os.utime(tmp_path / "leases/embed/0a1b2c3d/000001.json", (time.time() + seconds,) * 2)
        (seen,) = module.seen_leases(root)
        assert seen.age < 0 and seen.alive == alive


def test_a_later_version_that_says_more_is_waited_for_by_name(root):
    holder = elsewhere(root) | {"cores": 8}
    root.write("leases/embed/0a1b2c3d/000001.json", json.dumps(holder).encode())
    told = Listener()
    with quick(root) as runs:
        assert runs.take("embed/0a1b2c3d", never, told, str) is not None
    assert told.said[0] == "waits for ann@other, at it since 10:00:00: 3/9 shards"


def test_one_of_many_gets_it(root):
    with quick(root) as many, ThreadPoolExecutor(8) as pool:
        attempts = [pool.submit(many._create, "embed/0a1b2c3d", 1, str) for _ in range(8)]
        assert sum(attempt.result() is not None for attempt in attempts) == 1


def test_who_comes_second_waits_and_uses_what_was_made(root):
    made, listener = threading.Event(), Listener()
    with quick(root) as first, quick(root) as second, ThreadPoolExecutor(1) as pool:
        lease = first.take("embed/0a1b2c3d", made.is_set, listener, lambda: "5/9 shards")
        waiting = pool.submit(second.take, "embed/0a1b2c3d", made.is_set, listener, str)
        wait_until(lambda: listener.said)
        assert not waiting.done()
        made.set()
        first.release(lease)
        assert waiting.result() is None
    assert listener.said[0].startswith(f"waits for {module.user_name()}@")
    assert root.list("leases/embed/0a1b2c3d") == []


def test_how_far_the_holder_is_reaches_who_waits(root, monkeypatch):
    monkeypatch.setattr(module, "TELL_SECONDS", 0.0)
    listener = Listener()
    with quick(root) as first, quick(root) as second, ThreadPoolExecutor(1) as pool:
        lease = first.take("embed/0a1b2c3d", never, listener, lambda: "5/9 shards")
        waiting = pool.submit(second.take, "embed/0a1b2c3d", never, listener, str)
        wait_until(lambda: any(line.endswith(": 5/9 shards") for line in listener.said))
        first.release(lease)
        assert waiting.result() is not None


def test_a_holder_elsewhere_that_no_longer_beats_is_followed(root):
    elsewhere(root, number=3)
    listener = Listener()
    with quick(root) as leases:
        lease = leases.take("embed/0a1b2c3d", never, listener, str)
        assert lease.number == 4
        assert root.list("leases/embed/0a1b2c3d") == ["000004.json"]
    assert listener.said == [
        "waits for ann@other, at it since 10:00:00: 3/9 shards",
        "takes over from ann@other, which is gone",
    ]


def test_a_holder_that_beats_is_never_followed(tmp_path, monkeypatch):
    """Though it lives on another machine, and its clock may say anything."""
    root = Root(str(tmp_path))
    holder = elsewhere(root)
    looks = []

    def newest(self, folder):
        """It beats between every second look; by the waiter's clock a look takes 0.4 of the time
        after which it would be dead."""
        looks.append(folder)
        if len(looks) == 50:
            root.delete("leases/embed/0a1b2c3d/000001.json")
            monkeypatch.undo()
        return 1, json.dumps(holder | {"beat": len(looks) // 2}).encode()

    with quick(root, stale_seconds=1.0) as leases:
        monkeypatch.setattr(Leases, "_newest", newest)
        monkeypatch.setattr(leases, "_now", lambda: 0.4 * len(looks))
        monkeypatch.setattr(leases._stop, "wait", lambda seconds: None)
        assert leases.take("embed/0a1b2c3d", never, Listener(), str).number == 1
    assert len(looks) == 50


@pytest.mark.parametrize("met_by", ["lease", "artifact"])
def test_a_holder_is_not_followed_for_a_silence_of_the_storage(root, monkeypatch, met_by):
    """Which lasted longer than a lease that nobody renews, whichever request meets it."""
    elsewhere(root)
    clock, looks = [0.0], []
    runs = quick(root, stale_seconds=30.0)
    monkeypatch.setattr(runs, "_now", lambda: clock[0])
    newest = runs._newest

    def silent_once(folder):
        looks.append(clock[0])
        clock[0] += 100.0 if len(looks) == 3 and met_by == "lease" else 1.0
        return newest(folder)

    def is_made():
        clock[0] += 100.0 if len(looks) == 3 and met_by == "artifact" else 0.0

    monkeypatch.setattr(runs, "_newest", silent_once)
    monkeypatch.setattr(runs._stop, "wait", lambda seconds: None)
    assert runs.take("embed/0a1b2c3d", is_made, Listener(), str).number == 2
    heard = 102 if met_by == "lease" else 104
    assert looks[-1] == heard + 30


def test_where_the_system_has_no_name_for_itself_a_process_is_one_machine(monkeypatch):
    monkeypatch.setattr(module, "boot_id", lambda: "")
    module._machine.cache_clear()
    try:
        assert module._machine() == module._machine()
    finally:
        module._machine.cache_clear()


def test_a_process_of_this_machine_that_is_gone_is_not_waited_for(tmp_path):
    code = (
        "import sys, time\n"
        "from pipeline.store.leases import Leases\n"
        "from stages.files import Root\n"
        "with Leases(Root(sys.argv[1]), print) as leases:\n"
        "    leases.take('embed/0a1b2c3d', lambda: False, print, str)\n"
        "    print('held', flush=True)\n"
        "    time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    with quick(Root(str(tmp_path)), stale_seconds=1e6) as leases:
        assert leases.take("embed/0a1b2c3d", never, Listener(), str).number == 2


def test_a_holder_that_was_frozen_has_lost_its_lease(root):
    with quick(root, stale_seconds=1e6) as frozen, quick(root) as other:
        frozen._end.set()  # its heart stops
        lease = frozen._create("embed/0a1b2c3d", 1, str)
        root.write(lease.file, json.dumps(elsewhere(root) | {"id": lease.holder.id}).encode())
        taken = other.take("embed/0a1b2c3d", never, Listener(), str)
        assert frozen.is_lost(lease)
        frozen.release(lease)
        assert not other.is_lost(taken)


def test_a_worker_hears_whether_its_run_still_holds_the_lease(root, monkeypatch):
    """It stops what must not be done twice before anybody takes over, and goes on when it hears."""
    clock = [100.0]
    monkeypatch.setattr(module, "now_awake", lambda: clock[0])
    lease = Lease("embed/0a1b2c3d", 1, Holder(**elsewhere(root)), str)
    hears = Watch(root, lease.folder, lease.holder.id, stale_seconds=30.0)
    assert hears()
    clock[0] += 14.0
    assert hears()
    clock[0] += 2.0
    assert not hears()  # silent for 16 s of 30
    root.write(lease.file, json.dumps(elsewhere(root) | {"beat": 1}).encode())
    assert not hears()  # it has looked a moment ago
    clock[0] += 4.0
    assert hears()
    other = elsewhere(root, number=2) | {"id": "0b0b0b0b"}
    root.write("leases/embed/0a1b2c3d/000002.json", json.dumps(other).encode())
    clock[0] += 40.0  # asleep meanwhile: it looks before anything else
    with pytest.raises(StorageError, match="ann@other has taken over embed/0a1b2c3d"):
        hears()
    root.delete_all(f"leases/embed/0a1b2c3d/{name}" for name in ("000001.json", "000002.json"))
    clock[0] += 40.0  # and the other one has ended meanwhile
    with pytest.raises(StorageError, match="had taken over embed/0a1b2c3d, and has ended"):
        hears()


def test_what_was_made_at_the_last_moment_is_not_made_again(root):
    answers = iter([False, True, True])
    with quick(root) as leases:
        assert leases.take("embed/0a1b2c3d", lambda: next(answers), Listener(), str) is None
    assert root.list("leases/embed/0a1b2c3d") == []


def test_a_storage_without_conditional_writes_says_so(tmp_path, monkeypatch):
    from stages.object_store import NoConditionalWrites

    def refuse(*arguments):
        raise NoConditionalWrites("501")

    monkeypatch.setattr(Root, "create", refuse)
    warnings = []
    with quick(Root(str(tmp_path)), warnings.append) as leases:
        assert leases.take("embed/0a1b2c3d", never, Listener(), str)
        assert leases.take("embed/4d3c2b1a", never, Listener(), str)
    assert len(warnings) == 1
    assert "made twice" in warnings[0]
