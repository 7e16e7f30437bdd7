"""Rates and budgets of an endpoint, and the journal of paid answers."""

import errno
import io
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.endpoint import failures
from stages.endpoint.failures import Failures, Patience
from stages.endpoint.http import Reply
from stages.endpoint.journal import BYTES_RESERVED, Journal, Spent, request_key
from stages.endpoint.limits import Limits, Pacer
from stages.errors import StorageSilent, UserError
from stages.files import Root
from stages.rewrite.chat import Answer
from tests.support.chat_client import settings_of


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@given(
    st.integers(50, 5000),
    st.lists(st.tuples(st.floats(0, 3), st.floats(1, 25)), min_size=1, max_size=60),
)
def test_no_minute_sees_more_than_the_limit(limit, requests):
    """Requests of any cost that come at any time, each sent as soon as the pacer lets it."""
    clock = Clock()
    pacer = Pacer(limit, clock)
    sent = []
    for pause, cost in requests:
        clock.now += pause
        clock.now += max(0.0, pacer.wait(cost))
        pacer.take(cost)
        sent.append((clock.now, cost))
    for start, _ in sent:
        assert sum(cost for at, cost in sent if start <= at < start + 60) <= limit


@pytest.mark.parametrize("limit", [1, 7, 600])
def test_the_pacer_uses_what_is_allowed(limit):
    clock = Clock()
    pacer = Pacer(limit, clock)
    for _ in range(10 * limit):
        clock.now += max(0.0, pacer.wait(1))
        pacer.take(1)
    assert 10 * limit / ((clock.now - 100) / 60 + 1 / limit) > 0.95 * limit


def test_unused_tokens_are_given_back_and_a_pause_holds_all():
    clock = Clock()
    limits = Limits(settings_of(tokens_per_minute=6000, max_answer_tokens=1000), Spent(), clock)
    assert limits.wait(100) <= 0
    taken = limits.take(100)
    assert limits.wait(100) > 10
    limits.settle(taken, Answer("", "stop", 100, 100))
    assert limits.wait(100) < 3
    limits.pause(30.0)
    assert limits.wait(100) == pytest.approx(30.0)
    clock.now += 31
    assert limits.wait(100) <= 0
    with pytest.raises(UserError, match="tokens_per_minute 6000 is less than one"):
        limits.wait(6000)


@pytest.mark.parametrize(
    ("budget", "requests"),
    [
        ({"max_requests": 3}, 3),
        ({"max_tokens": 420}, 3),
        ({"max_cost": 4.2, "price_per_million_prompt_tokens": 1e4,
          "price_per_million_answer_tokens": 1e4}, 3),
    ],
)  # fmt: skip
def test_requests_in_flight_count_against_the_budget(budget, requests):
    limits = Limits(settings_of(budget=budget, max_answer_tokens=100), spent := Spent())
    taken = []
    while limits.exceeded(40) is None:
        taken.append(limits.take(40))
    assert len(taken) == requests
    assert limits.exceeded(40) == next(iter(budget))
    limits.settle(taken.pop(), None)  # it failed: nothing was paid
    assert limits.exceeded(40) is None
    answer = Answer("", "stop", 40, 100)
    limits.settle(taken.pop(), answer)
    spent.add(answer)
    limits.take(40)
    assert limits.exceeded(40) == next(iter(budget))


def test_lost_requests_of_older_journals_are_told_as_such(tmp_path):
    lost = {"requests": 1, "prompt_tokens": 5, "answer_tokens": 7, "unanswered": 0}
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers/old.jsonl").write_text(json.dumps({"owner": "me", "unanswered": lost}))
    journal = Journal(Root(str(tmp_path)), "answers", "me", Answer)
    assert journal.spent() == Spent(1, 5, 7, unanswered=1)


def test_the_journal_finds_answers_of_others_and_skips_torn_lines(tmp_path):
    root = Root(str(tmp_path))
    mine, theirs = Journal(root, "answers", "me", Answer), Journal(root, "answers", "them", Answer)
    keys = [request_key({"n": number}) for number in range(5)]
    answers = [Answer(f"“{number}”\n", "stop", number, 1) for number in range(5)]
    for journal, number in ((mine, 0), (theirs, 1), (mine, 2), (theirs, 3)):
        journal.add([(keys[number], answers[number])])
    assert mine.get(keys[0]) == answers[0] and mine.get(keys[1]) is None
    files = sorted((tmp_path / "answers").iterdir())
    with files[0].open("ab") as file:
        file.write(b'{"key": "00", "owner": "me", "ans')
    again = Journal(root, "answers", "me", Answer)
    assert [again.get(key) for key in keys] == [*answers[:4], None]
    assert again.spent() == Spent(2, 2, 2)
    assert Journal(root, "answers", "new", Answer).spent() == Spent()


class SmallDisk(io.FileIO):
    """A file on a disk with `room` for so many bytes."""

    room = 0

    def write(self, data):
        data = data[: self.room]
        if not data:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= len(data)
        return super().write(data)


@pytest.fixture
def paid(tmp_path):
    """A journal on a full disk, its file, and answers that are on their way."""
    journal = Journal(Root(str(tmp_path)), "answers", "me", Answer)
    journal.ready()
    (file,) = (tmp_path / "answers").iterdir()  # what is held has no name to be left behind
    journal._file = SmallDisk(file, "ab")
    answers = [(request_key({"n": n}), Answer(f"“{n}”", "stop", n, 1)) for n in range(5)]
    return journal, answers, lambda: Journal(Root(str(tmp_path)), "answers", "me", Answer)


def test_answers_that_are_paid_for_have_room_on_a_full_disk(paid, monkeypatch):
    journal, answers, again = paid
    room = os.fstat(journal._reserve.fileno()).st_blocks * 512
    assert room >= BYTES_RESERVED
    journal._file.room = 20  # in the middle of a line
    close = journal._reserve.close
    monkeypatch.setattr(
        journal._reserve, "close", lambda: close() or setattr(journal._file, "room", room)
    )
    with pytest.raises(UserError, match="the disk is full"):  # so that no more are asked for
        journal.add(answers[:1])
    for one in answers[1:]:  # those that were on their way
        journal.add([one])
    for found in (journal, again()):
        assert [found.get(key) for key, _ in answers] == [answer for _, answer in answers]


def test_half_an_answer_does_not_spoil_the_next_one(paid, monkeypatch):
    """Where others took what was given back."""
    journal, answers, again = paid
    journal._file.room = 20
    for one in answers[:2]:
        with pytest.raises(UserError, match="the disk is full"):
            journal.add([one])
    journal._file.room = 1000
    journal.add(answers[2:])
    for found in (journal, again()):
        kept = [None, None, *(answer for _, answer in answers[2:])]
        assert [found.get(key) for key, _ in answers] == kept
        assert found.spent().requests == 3


def test_room_is_held_for_as_many_answers_as_are_under_way(tmp_path):
    journal = Journal(Root(str(tmp_path)), "answers", "me", Answer)
    journal.ready(64)
    assert os.fstat(journal._reserve.fileno()).st_size == BYTES_RESERVED
    journal.add([(request_key({}), Answer("x" * (1 << 17), "stop", 1, 1))])
    journal.ready(64)
    assert os.fstat(journal._reserve.fileno()).st_size >= 64 << 17


def test_answers_for_an_object_store_are_found_before_and_after_they_are_written(
    tmp_path, monkeypatch
):
    (tmp_path / "answers").mkdir()
    root = Root(str(tmp_path))
    root.is_local = False  # written as whole segments
    journal = Journal(root, "answers", "me", Answer)
    keys = [request_key({"n": number}) for number in range(4)]
    answers = [Answer(f"“{number}”", "stop", number, 1) for number in range(4)]
    for number in range(4):
        journal.add([(keys[number], answers[number])])
        if number == 1:
            journal.flush()
    assert [journal.get(key) for key in keys] == answers
    journal.flush()
    assert len(list((tmp_path / "answers").iterdir())) == 2
    again = Journal(root, "answers", "me", Answer)
    reads, read = [], root.read
    monkeypatch.setattr(root, "read", lambda name: reads.append(name) or read(name))
    for order in ((3, 0, 2, 1), (1, 2, 3, 0)):  # each file is fetched once, in whatever order
        assert [again.get(keys[number]) for number in order] == [answers[one] for one in order]
    assert len(reads) == 2
    assert again.spent() == Spent(4, 6, 4)


@pytest.fixture
def remote(tmp_path, monkeypatch):
    """A root that is written as an object store is, and the folder of what it has not got yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = Root(str(tmp_path / "store"))
    root.is_local = False
    (tmp_path / "store/answers").mkdir(parents=True)
    return root, tmp_path / "cache/sentray/answers"


SCRIPT = """
import sys
from stages.endpoint.journal import Journal, Spent, request_key
from stages.files import Root
from stages.rewrite.chat import Answer
root = Root(sys.argv[1])
root.is_local = False
journal = Journal(root, "answers", "me", Answer)
journal.add([(request_key({"n": 0}), Answer("zero", "stop", 1, 1))])
journal.flush()
journal.add([(request_key({"n": 1}), Answer("one", "stop", 1, 1))])
journal.charge(Spent(1, 5, 7, unanswered=1))
print("written", flush=True)
sys.stdin.read()
"""


def test_answers_that_a_killed_process_had_not_stored_are_stored_by_the_next(remote):
    root, spooled = remote
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, root.uri],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as other:  # fmt: skip
        assert other.stdout.readline() == "written\n"
        journal = Journal(root, "answers", "me", Answer)
        assert journal.spent() == Spent(1, 1, 1)  # whoever lives stores its own
        other.kill()
        other.wait()
    for _ in range(2):
        journal = Journal(root, "answers", "me", Answer)
        assert journal.get(request_key({"n": 1})).text == "one"
        assert journal.spent() == Spent(3, 7, 9, unanswered=1)
        assert not [*spooled.glob("*/[!.]*")]


def test_a_journal_whose_store_is_silent_leaves_its_answers_to_the_next(remote, monkeypatch):
    root, spooled = remote
    journal = Journal(root, "answers", "me", Answer)
    answers = [(request_key({"n": n}), Answer(str(n), "stop", n, 1)) for n in range(2)]
    with monkeypatch.context() as silent:
        silent.setattr(root, "write", lambda *_: (_ for _ in ()).throw(StorageSilent("silent")))
        for one in answers:
            journal.add([one])
            with pytest.raises(StorageSilent):
                journal.flush()
            journal.flush(1e-9)  # each try takes minutes: there is another one at the end only
        with pytest.raises(StorageSilent):
            journal.close()
        with pytest.raises(StorageSilent):
            Journal(root, "answers", "me", Answer)
    for _ in range(2):
        other = Journal(root, "answers", "me", Answer)
        assert [other.get(key) for key, _ in answers] == [answer for _, answer in answers]
        assert other.spent() == Spent(2, 1, 2)
    assert not [*spooled.glob("*/[!.]*")]


def test_what_another_journal_is_just_storing_is_waited_for(remote, monkeypatch):
    """Else whose answers they are would ask for them again."""
    root, _ = remote
    with monkeypatch.context() as silent:
        silent.setattr(root, "write", lambda *_: (_ for _ in ()).throw(StorageSilent("silent")))
        journal = Journal(root, "answers", "me", Answer)
        journal.add([(request_key({}), Answer("zero", "stop", 1, 1))])
        with pytest.raises(StorageSilent):
            journal.close()
    storing, go_on, write = threading.Event(), threading.Event(), root.write
    with monkeypatch.context() as slow, ThreadPoolExecutor(2) as pool:
        slow.setattr(root, "write", lambda *given: (storing.set(), go_on.wait(), write(*given)))
        first = pool.submit(Journal, root, "answers", "other", Answer)
        storing.wait()
        second = pool.submit(Journal, root, "answers", "me", Answer)
        try:
            with pytest.raises(TimeoutError):
                second.result(0.2)  # it waits
        finally:
            go_on.set()
        assert first.result().get(request_key({})) == second.result().get(request_key({}))
        assert second.result().spent() == Spent(1, 1, 1)


def test_half_an_answer_for_an_object_store_does_not_spoil_the_next_one(remote):
    root, _ = remote
    journal = Journal(root, "answers", "me", Answer)
    answers = [(request_key({"n": n}), Answer(str(n), "stop", n, 1)) for n in range(3)]
    journal.add(answers[:1])
    path = journal._spool._path
    journal._spool._file.close()
    journal._spool._file = SmallDisk(path, "ab")
    journal._spool._file.room = 20
    with pytest.raises(UserError, match="the disk is full"):
        journal.add(answers[1:2])
    journal._spool._file.room = 1000
    journal.add(answers[2:])
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert [line["answer"]["text"] for line in lines] == ["0", "2"]
    journal.close()
    again = Journal(root, "answers", "me", Answer)  # the segment had it, too
    assert again.spent().requests == 3


def test_an_endpoint_is_busy_from_its_first_429_on(monkeypatch):
    """However long nothing was asked before: of what is in the journal, or while a shard is put
    away."""
    clock, settings = Clock(), settings_of()
    monkeypatch.setattr(failures, "time", SimpleNamespace(monotonic=clock))
    endpoint = SimpleNamespace(url="http://here", message=str)
    limits, patience = Limits(settings, Spent(), clock), Patience(busy_seconds=600.0)
    found = Failures(settings, endpoint, limits, patience, None, lambda *_: None)
    for _ in range(2):
        clock.now += 3600
        found.busy(Reply(429, "busy"))
        clock.now += 500
        found.busy(Reply(429, "busy"))
        found.answered()
    found.busy(Reply(429, "busy"))
    clock.now += 601
    with pytest.raises(UserError, match="nothing but 429 .* for 601 s"):
        found.busy(Reply(429, "busy"))
