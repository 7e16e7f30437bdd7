"""The chat client against a real HTTP server on loopback: nothing lost, nothing paid twice."""

import base64
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from pydantic import SecretStr

from stages.endpoint.failures import Patience
from stages.endpoint.journal import Journal
from stages.errors import StorageError, UserError
from stages.files import Root
from stages.rewrite.chat import Answer
from stages.rewrite.client import ChatClient
from stages.rewrite.rewrites import Outcome
from tests.support.chat_client import QUICK, ask, settings_of
from tests.support.chat_server import Reply, rewrite_of
from tests.support.command import wait_until


def test_two_thousand_rows_through_every_kind_of_trouble(serve, tmp_path):
    """Each row is an outcome with its text or its reason; nothing answered is sent again."""
    cut = '{"sentence1": "In other'
    message = {"message": {"content": rewrite_of("x" * (2 << 20))}}
    huge = json.dumps({"choices": [message]}).encode()

    def behave(sentence, nth, total):
        kind = int(sentence.split()[1]) % 40 if sentence else 0
        good = Reply(rewrite_of(sentence))
        once = {
            1: Reply("slow down", 429, {"Retry-After": "0"}), 2: Reply("slow down", 429),
            3: Reply("oops", 500), 4: Reply("oops", 503, {"Retry-After": formatdate(usegmt=True)}),
            5: Reply(drop=True), 6: Reply(raw=b"<html>"), 7: Reply(raw=huge),
            8: Reply(cut, finish_reason="length"), 9: Reply("I would rather not."),
            10: Reply('{"other": "x"}'), 11: Reply(""),
            12: Reply(f"Sure: {rewrite_of(sentence)} ok?"),
        }  # fmt: skip
        always = {20: Reply("too long", 400), 21: Reply("oops", 500), 22: Reply("No."),
                  23: Reply(drop=True)}  # fmt: skip
        return always.get(kind) or (once.get(kind) if nth == 1 else None) or good

    server = serve(behave)
    sentences = [f"Number {number} is a cat." for number in range(2000)]
    found = ask(server, tmp_path, sentences, concurrency=16, max_attempts=3, max_answers=2)
    for sentence, outcome in found.items():
        kind = int(sentence.split()[1]) % 40
        if kind in (20, 21, 22, 23):
            expected = {20: "refused: HTTP 400", 21: "failed: HTTP 500", 22: "not_json"}
            assert outcome.reason.startswith(expected.get(kind, "failed: Server"))
        else:
            text = json.loads(rewrite_of(sentence))
            assert outcome == Outcome(text["sentence1"], text["sentence2"])
    assert set(server.answered.values()) == {1}
    before = len(server.bodies)
    failed = sum(one.reason is not None and one.reason != "not_json" for one in found.values())
    again = ask(server, tmp_path, sentences, concurrency=16, max_attempts=1, max_answers=2)
    assert set(server.answered.values()) == {1}
    assert len(server.bodies) - before == failed  # only what was never answered
    assert {s for s, o in again.items() if o.reason is None} == {
        s for s, o in found.items() if o.reason is None
    }


def test_the_allowed_concurrency_is_in_flight_and_no_more(serve, tmp_path):
    """One request is answered whenever twelve are there: fewer in flight would wait for ever."""
    held = []

    def behave(sentence, nth, total):
        if total == 1:  # the first goes alone
            return Reply(rewrite_of(sentence))
        held.append(threading.Event())
        if server.in_flight[-1] >= 12:
            held.pop(0).set()
        mine = held[-1]
        if total == 600:
            for event in held:
                event.set()
        return Reply(rewrite_of(sentence), hold=mine)

    server = serve(behave)
    found = ask(server, tmp_path, [f"N {n}" for n in range(600)], concurrency=12)
    assert all(outcome.reason is None for outcome in found.values())
    assert max(server.in_flight) == 12
    steady = server.in_flight[12:]
    assert sum(steady) / len(steady) > 0.9 * 12


def test_a_row_that_waits_holds_no_slot(serve, tmp_path, monkeypatch):
    """With one slot and a row that fails first, the others are answered before it comes back."""
    order = []

    def behave(sentence, nth, total):
        order.append(sentence)
        return Reply("oops", 500) if sentence == "N 1" and nth == 1 else Reply(rewrite_of(sentence))

    server = serve(behave)
    monkeypatch.setattr("random.uniform", lambda least, most: most)
    slow = Patience(first_seconds=1.0, most_seconds=1.0)
    ask(server, tmp_path, ["N 0", "N 1", "N 2", "N 3"], concurrency=1, patience=slow)
    assert order == ["N 0", "N 1", "N 2", "N 3", "N 1"]


def test_requests_keep_to_the_rate_as_the_server_sees_it(serve, tmp_path):
    server = serve(lambda sentence, nth, total: Reply(rewrite_of(sentence)))
    ask(server, tmp_path, [f"N {n}" for n in range(60)], requests_per_minute=1200)
    # 1,200 a minute are 20 a second: any 21 in a row take a second, jitter on arrival aside
    spans = [b - a for a, b in zip(server.arrivals, server.arrivals[21:], strict=False)]
    assert min(spans) > 0.9


def test_retry_after_holds_everybody_and_is_said(serve, tmp_path, monkeypatch):
    monkeypatch.setattr("stages.endpoint.failures.TOLD_SECONDS", 1.0)
    times, told = {}, []

    def behave(sentence, nth, total):
        if total == 10:
            times["told"] = time.monotonic()
            return Reply("slow down", 429, {"Retry-After": "1"})
        if "told" in times:
            times.setdefault("after", []).append(time.monotonic() - times["told"])
        return Reply(rewrite_of(sentence))

    server = serve(behave)
    ask(
        server,
        tmp_path,
        [f"N {n}" for n in range(40)],
        concurrency=1,
        say=lambda *said: told.append(said),
    )
    assert min(times["after"]) >= 0.99
    assert len(server.bodies) == 41
    waits = [said for said in told if said[0].startswith("waits")]
    assert waits == [(f"waits for 1 s, as {server.url}/chat/completions answers HTTP 429", True)]


def test_a_storm_of_429_loses_nobody_and_an_endless_one_stops(serve, tmp_path):
    server = serve(
        lambda sentence, nth, total: (
            Reply("busy", 429) if total % 5 else Reply(rewrite_of(sentence))
        )
    )
    found = ask(server, tmp_path, [f"N {n}" for n in range(100)], concurrency=8, max_attempts=2)
    assert all(outcome.reason is None for outcome in found.values())
    server.behave = lambda sentence, nth, total: Reply("busy", 429)
    with pytest.raises(UserError, match="nothing but 429 .*: busy. Lower .* run again to continue"):
        ask(server, tmp_path, ["Another."], patience=Patience(0.005, 0.05, busy_seconds=0.2))


def test_an_outage_stops_the_stage_and_rejects_no_row(serve, tmp_path):
    server = serve(
        lambda s, nth, total: Reply(rewrite_of(s)) if total <= 50 else Reply("down", 502)
    )
    sentences = [f"N {n}" for n in range(200)]
    with pytest.raises(UserError, match="failed \\d+ times in a row.*HTTP 502.*run again"):
        ask(server, tmp_path, sentences, concurrency=4, max_attempts=20)
    server.behave = lambda sentence, nth, total: Reply(rewrite_of(sentence))
    found = ask(server, tmp_path, sentences, concurrency=4)
    assert all(outcome.reason is None for outcome in found.values())
    assert set(server.answered.values()) == {1} and len(server.answered) == 200


def test_timeouts_are_tried_again(serve, tmp_path):
    never = threading.Event()
    server = serve(
        lambda s, nth, total: Reply(rewrite_of(s), hold=never if nth == 1 and total > 1 else None)
    )
    found = ask(server, tmp_path, [f"N {n}" for n in range(6)], timeout_seconds=0.5, concurrency=6)
    never.set()
    assert all(outcome.reason is None for outcome in found.values())


def test_the_budget_stops_and_continues_and_is_never_exceeded(serve, tmp_path):
    server = serve(lambda sentence, nth, total: Reply(rewrite_of(sentence)))
    sentences = [f"N {n}" for n in range(50)]
    for most in (20, 35):
        with pytest.raises(UserError, match=f"budget.max_requests is reached: {most} answers"):
            ask(server, tmp_path, sentences, concurrency=8, budget={"max_requests": most})
        assert len(server.bodies) == most
    found = ask(server, tmp_path, sentences, budget={"max_requests": 50})
    assert len(found) == 50 and set(server.answered.values()) == {1}
    prices = {"price_per_million_prompt_tokens": 1.0, "price_per_million_answer_tokens": 1.0}
    with pytest.raises(UserError, match="budget.max_cost is reached"):
        ask(server, tmp_path, ["One more."], budget={"max_cost": 50 * 70 / 1e6} | prices)
    assert len(server.bodies) == 50


SCRIPT = """
import sys
from stages.files import Root
from stages.rewrite.chat import Answer
from stages.rewrite.client import ChatClient
from stages.endpoint.journal import Journal
from stages.rewrite.rewriting import Rewriting
url, storage = sys.argv[1:]
settings = Rewriting(model="m", key_variable=None, base_url=url, concurrency=16)
client = ChatClient(settings, None, Journal(Root(storage), "answers", "me", Answer), print)
found = list(client.run((number, f"N {number}") for number in range(2000)))
print(len({ref for ref, _ in found}), sum(outcome.reason is None for _, outcome in found))
"""


def test_nothing_is_asked_for_on_a_disk_without_room(serve, tmp_path, monkeypatch):
    def full(**_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("stages.endpoint.journal.tempfile.TemporaryFile", full)
    server = serve(lambda sentence, *_: Reply(rewrite_of(sentence)))
    with pytest.raises(UserError, match="the disk is full"):
        ask(server, tmp_path, ["A cat.", "A dog."])
    assert not server.bodies
    assert not [*(tmp_path / "answers").iterdir()]


def held_back(number):
    """A server's behaviour: the first request goes alone; the second is answered when there are so
    many, and the others once they may be. With the events of both."""
    all_sent, may_answer = threading.Event(), threading.Event()

    def behave(sentence, nth, total):
        if total == number:
            all_sent.set()
        return Reply(rewrite_of(sentence), hold={1: None, 2: all_sent}.get(total, may_answer))

    return behave, all_sent, may_answer


@pytest.mark.parametrize(
    "at_fault", ["whoever takes results", "the source", "flushing", "an answer's reader"]
)
def test_answers_in_flight_are_kept_whatever_goes_wrong_elsewhere(
    serve, tmp_path, monkeypatch, at_fault
):
    """As when a shard cannot be stored, or sentences cannot be read."""
    behave, all_sent, may_answer = held_back(9)

    def fail():
        may_answer.set()
        raise StorageError("the disk is full")

    def sentences():
        for number in range(10):  # the last waits until the second is answered
            yield number, f"Number {number} is a cat."
        if at_fault == "the source":
            fail()

    def flush(self, older_than=0.0):
        if at_fault == "flushing" and older_than == 0.01 and all_sent.is_set():
            fail()

    def judge(self, row, answer):
        if at_fault == "an answer's reader" and row.ref:
            may_answer.set()
            raise KeyError("the disk is full")  # nobody's fault but ours
        return row.ref, Outcome("")

    monkeypatch.setattr(Journal, "flush", flush)
    monkeypatch.setattr(ChatClient, "judge", judge)
    monkeypatch.setattr("stages.endpoint.client.SECONDS_IN_SEGMENT", 0.01)
    server = serve(behave)
    settings = settings_of(base_url=server.url, concurrency=8)
    journal = Journal(Root(str(tmp_path)), "answers", "me", Answer)
    client = ChatClient(settings, None, journal, print, QUICK)

    def take():
        for number, _ in client.run(sentences()):
            if at_fault == "whoever takes results" and number:
                fail()

    with pytest.raises((StorageError, KeyError), match="the disk is full"):
        take()
    kept = Journal(Root(str(tmp_path)), "answers", "me", Answer).spent().requests
    assert kept == len(server.answered) >= 9


@pytest.mark.parametrize("answered", ["meanwhile", "afterwards"])
def test_time_in_which_nobody_listens_is_not_counted(serve, tmp_path, answered):
    """Whoever takes the results stands still for longer than a request may take, as with a storage
    that is silent: what is answered meanwhile, or is still under way, is not asked for, and paid,
    again."""
    behave, _, may_answer = held_back(5)
    server = serve(behave)
    settings = settings_of(base_url=server.url, concurrency=4, timeout_seconds=0.4)
    journal = Journal(Root(str(tmp_path)), "answers", "me", Answer)
    taken = 0
    for _ in ChatClient(settings, None, journal, print, QUICK).run(enumerate(map(str, range(5)))):
        taken += 1
        if taken == 2:
            if answered == "meanwhile":
                may_answer.set()
            time.sleep(1.0)  # stands still
            may_answer.set()
    assert taken == 5 and len(server.bodies) == 5
    assert journal.spent().requests == 5


@pytest.fixture
def proxy():
    """Its host and port, and the headers of the tunnels that it was asked for, and refused."""
    found = []

    class Refusing(BaseHTTPRequestHandler):
        def do_CONNECT(self):
            found.append(dict(self.headers))
            self.send_error(407)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}", found
        server.shutdown()


@pytest.mark.parametrize("login", ["http://ann:pass%20word@", "ann:pass%20word@", "http://", ""])
def test_a_proxy_learns_no_key_and_no_message_its_password(proxy, tmp_path, monkeypatch, login):
    """curl takes an address without a scheme too. What a proxy refuses has cost nothing."""
    address, asked = proxy
    monkeypatch.setenv("https_proxy", f"{login}{address}")
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setattr("stages.endpoint.failures.UNREACHED_BEFORE_STOP", 1)
    settings = settings_of(base_url="https://endpoint.invalid/v1")
    journal = Journal(Root(str(tmp_path)), "answers", "me", Answer)
    client = ChatClient(settings, SecretStr("sk-secret"), journal, print, QUICK)
    with pytest.raises(UserError) as caught:
        list(client.run([(0, "A cat.")]))
    said = str(caught.value)
    assert "ClientHttpProxyError" in said and "word" not in said
    assert journal.spent().requests == 0
    basic = f"Basic {base64.b64encode(b'ann:pass word').decode()}" if "ann" in login else None
    assert {one.get("Proxy-Authorization") for one in asked} == {basic}
    assert "sk-secret" not in str(asked)


def test_refusals_are_not_looked_into_once_all_must_end(serve, tmp_path):
    """Each probe is paid for, and waited for."""
    all_sent, may_answer, asked = threading.Event(), threading.Event(), []

    def behave(sentence, nth, total):
        asked.append(sentence)
        if total == 9:
            all_sent.set()
        if total > 2:
            return Reply("no", 400, hold=may_answer)
        return Reply(rewrite_of(sentence), hold=all_sent if total == 2 else None)

    server = serve(behave)
    settings = settings_of(base_url=server.url, concurrency=8)
    journal = Journal(Root(str(tmp_path)), "answers", "me", Answer)
    outcomes = ChatClient(settings, None, journal, print, QUICK).run(
        (number, f"Number {number} is a cat.") for number in range(9)
    )
    for number, _ in outcomes:
        if number:
            may_answer.set()
            break
    outcomes.close()
    assert len(asked) == 9 and "" not in asked


def test_killed_twice_in_the_middle_no_answer_is_paid_twice(serve, tmp_path):
    """Killed when the server holds all further answers and the journal has all that were given."""
    until, held = {"answers": 700}, []

    def behave(sentence, nth, total):
        if len(server.answered) + server.in_flight[-1] <= until["answers"]:
            return Reply(rewrite_of(sentence))
        held.append(sentence)
        return Reply(rewrite_of(sentence), hold=threading.Event())

    server = serve(behave)
    command = [sys.executable, "-c", SCRIPT, server.url, str(tmp_path)]

    def journalled():
        files = (tmp_path / "answers").glob("*.jsonl")
        return sum(file.read_bytes().count(b"\n") for file in files)

    for _ in range(2):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        while len(held) < 16 or journalled() < len(server.answered):
            assert process.poll() is None, process.communicate()
        process.send_signal(signal.SIGKILL)
        process.communicate()
        wait_until(lambda: not server.in_flight_now)  # nobody gets what was held
        answered = dict(server.answered)
        assert 500 < len(answered) < 1500
        until["answers"] += 600
        held.clear()
    until["answers"] = 10**9
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "2000 2000"
    sent_again = {key: count for key, count in server.answered.items() if key in answered}
    assert set(sent_again.values()) == {1}
