"""The chat client against a real HTTP server on loopback: nothing lost, nothing paid twice."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.errors import UserError
from stages.files import Root
from stages.perturb.chat import Answer, Outcome, payload, read_answer
from stages.perturb.client import ChatClient, Patience
from stages.perturb.endpoint import Secret, read_key
from stages.perturb.journal import Journal, Spent, request_key
from stages.perturb.limits import Limits, Pacer
from stages.perturb.settings import Rewriting
from tests.chat_server import ChatServer, Reply, rewrite_of

QUICK = Patience(first_seconds=0.005, most_seconds=0.05, busy_seconds=20.0)


def settings_of(**changes):
    chosen = {"model": "m", "key_variable": None} | changes
    return Rewriting.model_validate(chosen)


# --- reading answers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "rewrite", "negative"),
    [
        ('{"sentence1": "A.", "sentence2": "B."}', "A.", "B."),
        ('```json\n{"sentence1": "A.", "sentence2": "B."}\n```', "A.", "B."),
        ('Sure! Here it is:\n{"sentence1": "A.", "sentence2": "B."}\nAnything else?', "A.", "B."),
        ('{"sentence1": "A.", "sentence2": "B.",}', "A.", "B."),
        ("{'sentence1': 'A isn\\'t.', 'sentence2': \"B's.\"}", "A isn't.", "B's."),
        ("{“sentence1”: “A.”, “sentence2”: “B.”}", "A.", "B."),
        ('{"Sentence 1": "A.", "SENTENCE_2": "B."}', "A.", "B."),
        ('[{"sentence1": "A.", "sentence2": "B."}]', "A.", "B."),
        ('{"thought": "hm"} {"sentence1": "A.", "sentence2": "B."}', "A.", "B."),
        ('{"sentence1": "A {very} odd one.", "sentence2": "B}."}', "A {very} odd one.", "B}."),
        ('{"sentence1": "A\nline.", "sentence2": "B."}', "A\nline.", "B."),
        ('{"sentence1": "A.", "sentence2": "B and then', "A.", None),
        ('{"sentence1": " A. ", "sentence2": ""}', "A.", None),
        ('{"sentence1": "A.", "sentence2": null}', "A.", None),
        ('{"sentence1": "A."}', "A.", None),
        ('{"sentence1": "Gr\\u00fc\\u00dfe.", "sentence2": "B."}', "Grüße.", "B."),
        ('{{"sentence1": "A.", "sentence2": "B."}}', "A.", "B."),  # as the prompt shows it
    ],
)
def test_answers_are_read_in_spite_of_common_deviations(answer, rewrite, negative):
    found = read_answer(settings_of(), Answer(answer, "stop", 1, 1))
    assert found == Outcome(rewrite, negative)


@pytest.mark.parametrize(
    ("answer", "finish", "reason"),
    [
        ("", "stop", "empty_answer"),
        (" \n", "stop", "empty_answer"),
        ("I cannot do that.", "stop", "not_json"),
        ('{"sentence1": ', "length", "truncated"),
        ('{"sentence1": "A and then', "length", "truncated"),
        ('{"sentence1": "A and then', "stop", "not_json"),
        ('{"paraphrase": "A.", "sentence2": "B."}', "stop", "missing_field"),
        ('{"sentence1": ["A."], "sentence2": "B."}', "stop", "missing_field"),
        ('{"sentence1": "  ", "sentence2": "B."}', "stop", "missing_field"),
        ("{__import__('os').getcwd(): 1}", "stop", "not_json"),
        ("{" * 5000, "stop", "not_json"),
        ('{"sentence1": ' + "9" * 5000 + "}", "stop", "not_json"),
        ("{{'a': 1}}", "stop", "missing_field"),
    ],
)
def test_what_cannot_be_read_has_a_reason_and_is_kept(answer, finish, reason):
    found = read_answer(settings_of(), Answer(answer, finish, 1, 1))
    assert found == Outcome(answer if answer.strip() else "", reason=reason)


@given(st.text(max_size=60))
def test_no_answer_breaks_the_reader(text):
    read_answer(settings_of(), Answer(text, "stop", 0, 0))


@given(st.text(min_size=1, max_size=40).filter(str.strip))
def test_any_text_comes_through_strict_json(text):
    answer = json.dumps({"sentence1": text, "sentence2": text})
    found = read_answer(settings_of(), Answer(f"Well: {answer}", "stop", 0, 0))
    assert found == Outcome(text.strip(), text.strip())


def test_a_second_try_is_another_request():
    first = payload(settings_of(), "A cat.", [])
    second = payload(settings_of(), "A cat.", [("no", "not_json")])
    assert first["messages"][0]["content"].endswith("Sentence: A cat.")
    assert [one["role"] for one in second["messages"]] == ["user", "assistant", "user"]
    assert request_key(first) != request_key(second)
    empty = payload(settings_of(), "A cat.", [("", "empty_answer")])
    assert [one["role"] for one in empty["messages"]] == ["user", "user"]


# --- limits, budget, journal --------------------------------------------------------------------


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


def test_the_journal_finds_answers_of_others_and_skips_torn_lines(tmp_path):
    root = Root(str(tmp_path))
    mine, theirs = Journal(root, "answers", "me"), Journal(root, "answers", "them")
    keys = [request_key({"n": number}) for number in range(5)]
    answers = [Answer(f"“{number}”\n", "stop", number, 1) for number in range(5)]
    for journal, number in ((mine, 0), (theirs, 1), (mine, 2), (theirs, 3)):
        journal.add(keys[number], answers[number])
    assert mine.get(keys[0]) == answers[0] and mine.get(keys[1]) is None
    files = sorted((tmp_path / "answers").iterdir())
    with files[0].open("ab") as file:
        file.write(b'{"key": "00", "owner": "me", "ans')
    again = Journal(root, "answers", "me")
    assert [again.get(key) for key in keys] == [*answers[:4], None]
    assert again.spent() == Spent(2, 2, 2)
    assert Journal(root, "answers", "new").spent() == Spent()


# --- the client ---------------------------------------------------------------------------------


@pytest.fixture
def serve():
    servers = []

    def start(behave):
        servers.append(ChatServer(behave))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def ask(server, tmp_path, sentences, key=None, patience=QUICK, **settings):
    """Outcomes by sentence; the rows' refs are their numbers."""
    chosen = settings_of(base_url=server.url, **{"timeout_seconds": 20.0} | settings)
    journal = Journal(Root(str(tmp_path)), "answers", "me")
    client = ChatClient(chosen, key, journal, lambda line: None, patience)
    found = dict(client.run(enumerate(sentences)))
    assert len(found) == len(sentences)
    return {sentences[number]: outcome for number, outcome in found.items()}


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


def test_a_row_that_waits_holds_no_slot(serve, tmp_path):
    """With one slot and a row that fails first, the others are answered before it comes back."""
    order = []

    def behave(sentence, nth, total):
        order.append(sentence)
        return Reply("oops", 500) if sentence == "N 1" and nth == 1 else Reply(rewrite_of(sentence))

    server = serve(behave)
    slow = Patience(first_seconds=0.2, most_seconds=0.2)
    ask(server, tmp_path, ["N 0", "N 1", "N 2", "N 3"], concurrency=1, patience=slow)
    assert order[:2] == ["N 0", "N 1"] and sorted(order[2:]) == ["N 1", "N 2", "N 3"]
    assert order[2] != "N 1" or order[3] != "N 1"


def test_requests_keep_to_the_rate_as_the_server_sees_it(serve, tmp_path):
    server = serve(lambda sentence, nth, total: Reply(rewrite_of(sentence)))
    ask(server, tmp_path, [f"N {n}" for n in range(60)], requests_per_minute=1200)
    # 1,200 a minute are 20 a second: any 21 in a row take a second, jitter on arrival aside
    spans = [b - a for a, b in zip(server.arrivals, server.arrivals[21:], strict=False)]
    assert min(spans) > 0.9


def test_retry_after_holds_everybody(serve, tmp_path):
    times = {}

    def behave(sentence, nth, total):
        if total == 10:
            times["told"] = time.monotonic()
            return Reply("slow down", 429, {"Retry-After": "1"})
        if "told" in times:
            times.setdefault("after", []).append(time.monotonic() - times["told"])
        return Reply(rewrite_of(sentence))

    server = serve(behave)
    ask(server, tmp_path, [f"N {n}" for n in range(40)], concurrency=1)
    assert min(times["after"]) >= 0.99
    assert len(server.bodies) == 41


def test_a_storm_of_429_loses_nobody_and_an_endless_one_stops(serve, tmp_path):
    server = serve(
        lambda sentence, nth, total: (
            Reply("busy", 429) if total % 5 else Reply(rewrite_of(sentence))
        )
    )
    found = ask(server, tmp_path, [f"N {n}" for n in range(100)], concurrency=8, max_attempts=2)
    assert all(outcome.reason is None for outcome in found.values())
    server.behave = lambda sentence, nth, total: Reply("busy", 429)
    with pytest.raises(UserError, match="nothing but 429 .* run again to continue"):
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


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (Reply("no such key sk-very-secret", 401), "refuses the key in SOME_KEY: HTTP 401"),
        (Reply("who are you", 403), "refuses the key in SOME_KEY: HTTP 403"),
        (
            Reply("model m does not exist", 404),
            "HTTP 404 model m does not .*model 'm'",
        ),
        (Reply("moved", 307, {"Location": "http://127.0.0.1:9/"}), "HTTP 307 .*base_url"),
        (Reply("bad request", 400), "refuses all requests now: HTTP 400 bad request"),
        (Reply("pay first", 402), "refuses the key in SOME_KEY: HTTP 402 pay first"),
        (Reply("down", 500), "failed \\d+ times in a row, the last time with: HTTP 500"),
        (Reply("I'd say it otherwise."), "gave 20 answers and none was a JSON object.*otherwise"),
        (Reply(raw=b"hello"), "its answer is not a chat completion"),
    ],
)
def test_an_endpoint_that_cannot_be_used_is_one_message(
    serve, tmp_path, monkeypatch, reply, expected
):
    monkeypatch.setenv("SOME_KEY", "sk-very-secret")
    server = serve(lambda sentence, nth, total: reply)
    settings = settings_of(key_variable="SOME_KEY")
    with pytest.raises(UserError, match=expected) as caught:
        ask(server, tmp_path, [f"N {n}" for n in range(300)], read_key(settings),
            key_variable="SOME_KEY", concurrency=4, max_answers=1)  # fmt: skip
    assert "sk-very-secret" not in str(caught.value)
    assert set(server.keys) == {"Bearer sk-very-secret"}
    for file in (tmp_path / "answers").glob("*"):
        assert b"sk-very-secret" not in file.read_bytes()
    if reply.status in (401, 403, 404, 307):
        assert len(server.bodies) == 1


@pytest.mark.parametrize("status", [400, 402, 422])
def test_an_account_that_is_used_up_rejects_no_sentence(serve, tmp_path, status):
    sentences = [f"N {n}" for n in range(100)]
    server = serve(
        lambda sentence, nth, total: (
            Reply(rewrite_of(sentence)) if total <= 20 else Reply("no credits", status)
        )
    )
    with pytest.raises(UserError, match=f"HTTP {status} no credits"):
        ask(server, tmp_path, sentences, concurrency=8)
    server.behave = lambda sentence, nth, total: Reply(rewrite_of(sentence))
    found = ask(server, tmp_path, sentences, concurrency=8)
    assert {outcome.reason for outcome in found.values()} == {None}
    assert set(server.answered.values()) == {1}


def test_a_sentence_that_the_endpoint_minds_is_rejected_alone(serve, tmp_path):
    server = serve(
        lambda sentence, nth, total: (
            Reply("not that", 400) if sentence == "N 30" else Reply(rewrite_of(sentence))
        )
    )
    found = ask(server, tmp_path, [f"N {n}" for n in range(60)], concurrency=4)
    rejected = {text: one.reason for text, one in found.items() if one.reason}
    assert rejected == {"N 30": "refused: HTTP 400"}


def test_a_key_that_is_a_common_word_changes_no_answer(serve, tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_KEY", "none")
    text = json.dumps({"sentence1": "There is none here.", "sentence2": "1"})
    server = serve(lambda sentence, nth, total: Reply(text))
    key = read_key(settings_of(key_variable="SOME_KEY"))
    (found,) = ask(server, tmp_path, ["N 1"], key, key_variable="SOME_KEY").values()
    assert found.text == "There is none here."


def test_answers_that_count_no_tokens_still_fill_the_budget(serve, tmp_path):
    answer = {"choices": [{"message": {"content": rewrite_of("N")}, "finish_reason": "stop"}]}
    server = serve(lambda sentence, nth, total: Reply(raw=json.dumps(answer).encode()))
    with pytest.raises(UserError, match="budget.max_tokens is reached"):
        ask(server, tmp_path, [f"N {n}" for n in range(100)], budget={"max_tokens": 2000})
    assert 2 < len(server.bodies) < 20


def test_passwords_in_netrc_are_not_used(serve, tmp_path, monkeypatch):
    (tmp_path / "netrc").write_text("default login me password mine\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    server = serve(lambda sentence, nth, total: Reply(rewrite_of(sentence)))
    ask(server, tmp_path, ["N 1"], Secret("sk-1"))
    ask(server, tmp_path, ["N 2"])
    assert server.keys == ["Bearer sk-1", ""]


@pytest.mark.parametrize("name", ["max_tokens", "n", "stream", "model"])
def test_extra_fields_cannot_go_round_the_limits(name):
    with pytest.raises(ValueError, match=f"extra must not contain '{name}'"):
        settings_of(extra={name: 4})


def test_an_endpoint_that_nobody_serves(serve, tmp_path):
    server = serve(lambda sentence, nth, total: Reply())
    server.stop()
    with pytest.raises(UserError, match="failed \\d+ times in a row.*Connect call failed"):
        ask(server, tmp_path, ["N 1"])


def test_keys_come_from_the_environment_and_are_not_shown(monkeypatch):
    assert read_key(settings_of()) is None
    settings = settings_of(key_variable="SOME_KEY")
    monkeypatch.delenv("SOME_KEY", raising=False)
    with pytest.raises(UserError, match="variable SOME_KEY is not set"):
        read_key(settings)
    monkeypatch.setenv("SOME_KEY", "  ")
    with pytest.raises(UserError, match="variable SOME_KEY is empty"):
        read_key(settings)
    monkeypatch.setenv("SOME_KEY", "sk-1")
    assert "sk-1" not in f"{read_key(settings)!r} {read_key(settings)}"
    assert Secret("sk-1").hide_in("key sk-1!") == "key ***!"


SCRIPT = """
import sys
from stages.files import Root
from stages.perturb.client import ChatClient
from stages.perturb.journal import Journal
from stages.perturb.settings import Rewriting
url, storage = sys.argv[1:]
settings = Rewriting(model="m", key_variable=None, base_url=url, concurrency=16)
client = ChatClient(settings, None, Journal(Root(storage), "answers", "me"), print)
found = list(client.run((number, f"N {number}") for number in range(2000)))
print(len({ref for ref, _ in found}), sum(outcome.reason is None for _, outcome in found))
"""


@pytest.mark.slow
def test_killed_twice_in_the_middle_no_answer_is_paid_twice(serve, tmp_path):
    """Killed when the server holds all further answers and the journal has all that were given."""
    until = {"answers": 700}
    release = threading.Event()
    server = serve(
        lambda sentence, nth, total: Reply(
            rewrite_of(sentence),
            hold=release
            if len(server.answered) + server.in_flight[-1] > until["answers"]
            else None,
        )
    )
    command = [sys.executable, "-c", SCRIPT, server.url, str(tmp_path)]

    def journalled():
        files = (tmp_path / "answers").glob("*.jsonl")
        return sum(file.read_bytes().count(b"\n") for file in files)

    for _ in range(2):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        while server.in_flight[-1:] != [16] or journalled() < len(server.answered):
            assert process.poll() is None, process.communicate()
        process.send_signal(signal.SIGKILL)
        process.communicate()
        answered = dict(server.answered)
        assert 500 < len(answered) < 1500
        until["answers"] += 600
        server.in_flight.append(0)
        release.set()  # who waits for these answers is dead
        release = threading.Event()
    until["answers"] = 10**9
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "2000 2000"
    sent_again = {key: count for key, count in server.answered.items() if key in answered}
    assert set(sent_again.values()) == {1}


def make_chat_model(folder):
    """A random Llama of one layer with a byte-level tokenizer and a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<s>", "</s>", *letters])}
    rust = Tokenizer(models.BPE(vocabulary, []))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=rust, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, bos_token_id=0, eos_token_id=1,
        pad_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def transformers_serve(tmp_path_factory):
    """`transformers serve` with a tiny random chat model: its address and the model's name."""
    model = make_chat_model(tmp_path_factory.mktemp("chat") / "model")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [f"{Path(sys.executable).parent}/transformers", "serve", model]
    log = tmp_path_factory.mktemp("chat") / "log.txt"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)], stdout=out, stderr=out
        )
    while True:
        assert process.poll() is None, log.read_text()
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            break
        os.sched_yield()
    yield f"http://127.0.0.1:{port}/v1", model
    process.terminate()
    process.wait()


@pytest.mark.slow
def test_a_server_that_nobody_here_wrote(transformers_serve, tmp_path):
    """Random weights say nothing of use, but each answer is paid, kept and accounted for."""
    url, model = transformers_serve
    server = SimpleNamespace(url=url)
    sentences = [f"N {n}" for n in range(8)]
    chosen = dict(model=model, max_answer_tokens=12, max_answers=2, concurrency=4)
    found = ask(server, tmp_path, sentences, **chosen)
    assert {outcome.reason for outcome in found.values()} <= {"truncated", "not_json"}
    spent = Journal(Root(str(tmp_path)), "answers", "me").spent()
    assert (
        spent.requests == 16 and spent.answer_tokens == 16 * 12 and spent.prompt_tokens > 16 * 300
    )
    assert ask(server, tmp_path, sentences, **chosen) == found
    assert Journal(Root(str(tmp_path)), "answers", "me").spent() == spent
    with pytest.raises(UserError, match="refuses all requests now: HTTP 400 Server is pinned"):
        ask(server, tmp_path, [f"N {n}" for n in range(20)], **chosen | {"model": "nobody/no"})
