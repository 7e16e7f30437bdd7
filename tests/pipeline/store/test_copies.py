"""Copies on this machine: fetched once for all processes, within a limit, kept while in use."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pipeline.store import copies
from pipeline.store.copies import byte_limit, local_copy, used_meanwhile
from stages.errors import UserError

KB = 1000

# What another process does: holds copies until its input ends, or stops in the middle of a fetch.
OTHER = """
import sys, time
from pipeline.store.copies import local_copy
from tests.pipeline.store.test_copies import Remote
remote = Remote(sys.argv[1])
if sys.argv[2] == "hang":
    def fetch(to):
        to.write(b"x" * 500)
        to.flush()
        print("fetching", flush=True)
        time.sleep(600)
    local_copy("a/0", 1000, remote.is_right, fetch)
for name in sys.argv[2:]:
    remote.copy(name)
print("has them", flush=True)
sys.stdin.read()
"""


class Remote:
    """A storage of files of 1,000 bytes that writes down what is fetched."""

    def __init__(self, log, content=b"x" * KB):
        self.log, self.content = log, content

    def fetch(self, to):
        with open(self.log, "a") as log:
            log.write("fetched\n")
        to.write(self.content)

    @staticmethod
    def is_right(file):
        return file.exists() and file.stat().st_size == KB  # reading could count as a use

    def copy(self, name):
        return local_copy(f"a/{name}", KB, self.is_right, self.fetch)

    def copies(self, *names):
        with used_meanwhile():
            return [self.copy(name) for name in names]

    @property
    def fetched(self):
        return len(open(self.log).readlines())


@pytest.fixture
def remote(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SENTRAY_CACHE_GB", str(5 * KB / 1e9))
    return Remote(str(tmp_path / "log"))


@pytest.fixture
def other(remote):
    """Starts other processes; each has said one line when it is given."""
    started = []

    def start(*arguments):
        command = [sys.executable, "-c", OTHER, remote.log, *arguments]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, **pipes)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def kept():
    folder = os.path.join(os.environ["XDG_CACHE_HOME"], "sentray", "files", "a")
    return sorted(os.listdir(folder))


def test_a_file_is_fetched_once_for_all_processes_and_threads(remote, other):
    others = [other("0", "1") for _ in range(4)]
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(remote.copy, ["0", "1"] * 4))) == 2
    for process in others:
        assert process.stdout.readline() == "has them\n"
    assert remote.fetched == 2


def test_what_was_used_longest_ago_makes_room(remote):
    for name in ("0", "1", "2", "3", "0", "4"):
        remote.copies(name)
    assert kept() == ["0", "1", "2", "3", "4"]
    remote.copies("5")  # one more than there is room for, and a tenth of the limit to spare
    assert kept() == ["0", "3", "4", "5"]


def test_the_limit_holds_at_every_moment(remote, monkeypatch):
    fetch, sizes = remote.fetch, []

    def measured(to):
        fetch(to)
        to.flush()
        folder = Path(to.name).parents[1]
        with copies._locked(folder / ".lock"):  # nobody makes room meanwhile
            sizes.append(sum(size for _, size, _ in copies._copies(folder)))

    monkeypatch.setattr(remote, "fetch", measured)
    with ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(remote.copies, str(number)) for number in range(40)]:
            future.result()
    assert len(sizes) == 40
    assert max(sizes) <= 5 * KB


def test_what_another_process_uses_stays_until_it_is_gone(remote, other):
    process = other("0", "1")
    assert process.stdout.readline() == "has them\n"
    for number in range(2, 10):
        remote.copies(str(number))
    assert {"0", "1"} < set(kept())
    process.send_signal(signal.SIGKILL)
    process.wait()
    for number in range(10, 14):
        remote.copies(str(number))
    assert not {"0", "1"} & set(kept())


def test_what_is_mapped_can_be_read_after_it_was_removed(remote):
    (file,) = remote.copies("0")
    rows = np.memmap(file, mode="r")
    for number in range(1, 10):
        remote.copies(str(number))
    assert not file.exists()
    assert bytes(rows) == b"x" * KB


def test_more_than_the_limit_in_use_is_refused(remote):
    with used_meanwhile():
        for number in range(5):
            remote.copy(str(number))
        with pytest.raises(UserError, match=r"does not fit under the limit.*SENTRAY_CACHE_GB"):
            remote.copy("5")
    assert kept() == ["0", "1", "2", "3", "4"]
    remote.copies("5")


def test_a_killed_fetch_is_begun_again_and_its_room_is_free(remote, other):
    process = other("hang")
    assert process.stdout.readline() == "fetching\n"
    for number in range(1, 5):
        remote.copies(str(number))
    assert kept() == ["0.part", "1", "2", "3", "4"]  # it counts whole while it comes
    process.send_signal(signal.SIGKILL)
    process.wait()
    remote.copies("5")
    assert "0.part" not in kept()
    remote.copies("0")
    assert "0" in kept()


def test_what_came_wrong_is_not_kept(remote):
    remote.content = b"of another size"
    assert remote.copies("0") == [None]
    assert kept() == []
    remote.content = b"x" * KB
    (file,) = remote.copies("0")
    file.write_bytes(b"damaged")
    assert remote.copies("0") == [file]
    assert remote.is_right(file)


def test_a_lock_that_was_removed_meanwhile_holds_nothing_and_is_taken_again(remote, monkeypatch):
    flock = fcntl.flock

    def after_removal(lock, how):
        monkeypatch.setattr(fcntl, "flock", flock)
        os.unlink(os.readlink(f"/proc/self/fd/{lock}"))
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", after_removal)
    with used_meanwhile():
        file = remote.copy("0")
        for number in range(1, 5):
            remote.copies(str(number))
        remote.copies("5")
        assert file.exists()


@pytest.mark.parametrize("given", ["much", "0", "-1", "inf", "nan"])
def test_a_limit_that_is_none(given, monkeypatch):
    monkeypatch.setenv("SENTRAY_CACHE_GB", given)
    with pytest.raises(UserError, match="SENTRAY_CACHE_GB: "):
        byte_limit()


def test_without_a_limit_half_of_the_disk_is_used(remote, monkeypatch):
    monkeypatch.delenv("SENTRAY_CACHE_GB")

    def disk_usage(folder):
        return SimpleNamespace(free=(10 - len(kept())) * KB)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    for number in range(5):
        remote.copies(str(number))
    assert kept() == ["0", "1", "2", "3", "4"]
    remote.copies("5")
    assert kept() == ["2", "3", "4", "5"]
