"""Endpoints that refuse or mind a sentence, keys, and a server that nobody here wrote."""

import json
import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from pydantic import SecretStr

from stages.endpoint.credentials import read_key
from stages.endpoint.http import Endpoint
from stages.endpoint.journal import Journal, Spent
from stages.errors import UserError
from stages.files import Root
from stages.rewrite.chat import Answer
from tests.support.chat_client import ask, settings_of
from tests.support.chat_server import Reply, rewrite_of
from tests.support.command import wait_until
from tests.support.models import byte_tokenizer

NO_CREDIT = {"error": {"message": "see your plan", "type": "insufficient_quota"}}


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
        (
            Reply(raw=json.dumps(NO_CREDIT).encode(), status=429),
            "refuses the key in SOME_KEY: HTTP 429 see your plan",
        ),
        (
            Reply("come tomorrow", 429, {"Retry-After": "86400"}),
            "asks to wait for 86,400 s: HTTP 429 come tomorrow",
        ),
        (
            Reply("at night", 503, {"Retry-After": "3600"}),
            "asks to wait for 3,600 s: HTTP 503 at night",
        ),
        (
            Reply("start me with --chat", 500),
            "failed \\d+ times in a row, the last time with: HTTP 500 start me with --chat. Check",
        ),
        (Reply("I'd say it otherwise."), "gave 20 answers and none was a JSON object.*otherwise"),
        (
            Reply("", finish_reason="length"),
            "last one was cut off at rewriting.max_answer_tokens 256, and began: ''. Raise that",
        ),
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


def test_secrets_that_an_endpoint_repeats_are_hidden():
    """Also where its message is cut, and where it repeats what was sent."""
    secret = 'sk-"quoted"\\and-long-enough'
    endpoint = Endpoint(settings_of(), SecretStr(secret), {})
    cut = endpoint.message(json.dumps({"error": {"message": 290 * "x" + secret}}))
    listed = endpoint.message(json.dumps({"detail": [{"input": {"key": secret}}]}))
    torn = endpoint.message(json.dumps({"error": {"message": secret}})[:-1])
    for said in (cut, listed, torn):
        assert "***" in said and not {"sk-", "quoted", "long"} & set(said.replace('"', " ").split())
        assert "sk-" not in said and "and-long" not in said
    assert len(cut) < 300 < len(endpoint.message(400 * "x")) + 1


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


@pytest.mark.parametrize("status", [400, 403])
@pytest.mark.parametrize("trouble", [None, 429, 503])
def test_a_sentence_that_the_endpoint_minds_is_rejected_alone(serve, tmp_path, status, trouble):
    """Also as the first one, and where the endpoint has trouble when it is asked what that means:
    nothing is known then."""
    probes = []

    def behave(sentence, nth, total):
        if not sentence:
            probes.append(total)
            return Reply("later", trouble) if trouble and len(probes) < 3 else Reply("yes")
        return Reply("not that", status) if sentence in ("N 0", "N 30") else Reply(rewrite_of("N"))

    found = ask(serve(behave), tmp_path, [f"N {n}" for n in range(60)], concurrency=4)
    rejected = {text: one.reason for text, one in found.items() if one.reason}
    assert rejected == dict.fromkeys(["N 0", "N 30"], f"refused: HTTP {status}")


def test_a_probe_that_never_comes_through_ends(serve, tmp_path):
    server = serve(lambda sentence, *_: Reply("no", 400) if sentence else Reply("down", 503))
    with pytest.raises(
        UserError, match=r"refuses requests \(HTTP 400 no\), and fails at one .*base"
    ):
        ask(server, tmp_path, ["N 1"])
    assert len(server.bodies) == 5


def test_a_probe_that_fails_while_others_are_answered_is_asked_again(serve, tmp_path):
    """However often; and as late as the endpoint asks for."""
    times = []

    def behave(sentence, nth, total):
        if sentence:
            return Reply("not that", 400) if sentence == "N 7" else Reply(rewrite_of("N"))
        times.append(time.monotonic())
        late = len(times) < 3
        return Reply("down", 503, {"Retry-After": "0.3"}) if late else Reply("yes")

    found = ask(
        serve(behave), tmp_path, [f"N {n}" for n in range(200)], concurrency=2, max_attempts=1
    )
    assert [text for text, one in found.items() if one.reason] == ["N 7"]
    assert np.diff(times).min() > 0.29


def test_probes_are_requests_of_the_stage(serve, tmp_path):
    """They keep to the rate, and cost what they cost."""
    times, probes = [], []

    def behave(sentence, nth, total):
        times.append(time.monotonic())
        if not sentence:
            probes.append(total)
        refused = sentence and int(sentence.split()[1]) % 2
        return Reply("not that", 400) if refused else Reply(rewrite_of("N"))

    server = serve(behave)
    found = ask(server, tmp_path, [f"N {n}" for n in range(60)], requests_per_minute=1200)
    assert sum(one.reason is None for one in found.values()) == 30
    assert 0 < len(probes) <= 30
    spans = [b - a for a, b in zip(times, times[21:], strict=False)]
    assert min(spans) > 0.9  # 20 a second, jitter on arrival aside
    spent = Journal(Root(str(tmp_path)), "answers", "me", Answer).spent()
    paid = 30 + len(probes)
    assert spent == Spent(paid, 50 * paid, 20 * paid)


def test_a_probe_that_waits_for_the_rate_has_its_turn_among_requests(serve, tmp_path):
    """Also while answers take longer than the rate's moments are apart."""
    probes = []

    def behave(sentence, nth, total):
        if not sentence:
            probes.append(total)
        if sentence == "N 3":
            return Reply("no", 400)
        later = threading.Event()
        threading.Timer(0.3, later.set).start()
        return Reply(rewrite_of("N"), hold=later)

    ask(serve(behave), tmp_path, [f"N {n}" for n in range(80)], requests_per_minute=2400)
    assert probes == [probes[0]] and probes[0] < 20


def test_one_probe_tells_about_all_that_were_refused_before_it(serve, tmp_path):
    all_sent, probes = threading.Event(), []

    def behave(sentence, nth, total):
        if not sentence:
            probes.append(total)
            return Reply("yes")
        if total == 17:
            all_sent.set()
        return Reply("no", 400, hold=all_sent) if total > 1 else Reply(rewrite_of(sentence))

    found = ask(serve(behave), tmp_path, [f"N {n}" for n in range(17)], concurrency=16)
    assert sum(one.reason is not None for one in found.values()) == 16
    assert 0 < len(probes) < 6


def test_what_reasoning_models_want_is_sent(serve, tmp_path):
    """OpenAI's refuse max_tokens."""
    server = serve(lambda about, *_: Reply("no", 400) if about == "N 1" else Reply(rewrite_of("N")))
    server.about = lambda body: re.search(r"Sentence: (.*)", body["messages"][0]["content"])[
        1
    ].replace("Yes.", "")
    names = ["N 0", "N 1", "N 2"]
    found = ask(server, tmp_path, names, answer_limit="max_completion_tokens")
    assert found["N 1"].reason and not found["N 2"].reason
    assert {body["max_completion_tokens"] for body in server.bodies} == {256}
    assert not any("max_tokens" in body for body in server.bodies)


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


@pytest.mark.parametrize("count", ["Infinity", "1e400", "-1000000", '"7"', "true", "9" * 30])
def test_what_is_no_count_of_tokens_is_estimated(serve, tmp_path, count):
    answer = {"choices": [{"message": {"content": rewrite_of("N")}}], "usage": "of tokens"}
    usage = f'{{"prompt_tokens": {count}, "completion_tokens": {count}}}'
    raw = json.dumps(answer).replace('"of tokens"', usage).encode()
    server = serve(lambda sentence, nth, total: Reply(raw=raw))
    with pytest.raises(UserError, match="budget.max_tokens is reached"):
        ask(server, tmp_path, [f"N {n}" for n in range(100)], budget={"max_tokens": 2000})
    assert 2 < len(server.bodies) < 20


@pytest.mark.parametrize("status", [200, 400, 500])
def test_an_answer_that_is_nested_too_deeply_is_none(serve, tmp_path, status):
    deep = b'{"choices": ' + b"[" * 100_000
    server = serve(
        lambda sentence, nth, total: (
            Reply(raw=deep, status=status) if sentence == "N 3" else Reply(rewrite_of("N"))
        )
    )
    found = ask(server, tmp_path, [f"N {n}" for n in range(6)], max_attempts=2)
    assert [sentence for sentence, one in found.items() if one.reason] == ["N 3"]


def test_requests_without_an_answer_count_against_the_budget(serve, tmp_path):
    """What was sent may be paid for, whether its answer arrives or not: over all runs."""
    never = threading.Event()

    def behave(sentence, nth, total):
        troubles = {
            1: Reply(hold=never), 2: Reply(drop=True), 3: Reply(raw=b"<html>"),
            4: Reply("the server behind is late", 504),
        }  # fmt: skip
        return troubles.get(int(sentence.split()[1]) % 5 if sentence else 0, Reply(rewrite_of("N")))

    server = serve(behave)
    for _ in range(2):
        with pytest.raises(UserError, match=r"max_requests is reached: .* requests without one"):
            ask(
                server, tmp_path, [f"N {n}" for n in range(60)], timeout_seconds=0.2,
                budget={"max_requests": 12}, concurrency=6, max_attempts=3,
            )  # fmt: skip
    never.set()
    assert len(server.bodies) == 12
    spent = Journal(Root(str(tmp_path)), "answers", "me", Answer).spent()
    assert spent.requests == 12 and spent.requests - spent.unanswered == len(server.answered)


def test_passwords_in_netrc_are_not_used(serve, tmp_path, monkeypatch):
    (tmp_path / "netrc").write_text("default login me password mine\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    server = serve(lambda sentence, nth, total: Reply(rewrite_of(sentence)))
    ask(server, tmp_path, ["N 1"], SecretStr("sk-1"))
    ask(server, tmp_path, ["N 2"])
    assert server.keys == ["Bearer sk-1", ""]


@pytest.mark.parametrize("name", ["max_tokens", "n", "stream", "model"])
def test_extra_fields_cannot_go_round_the_limits(name):
    with pytest.raises(ValueError, match=f"extra must not contain '{name}'"):
        settings_of(extra={name: 4})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine_options": {"max_model_len": 2048}}, "engine_options are vLLM's"),
        ({"engine": "vllm", "answer_limit": "max_completion_tokens"}, "answer_limit is of endpoi"),
        ({"key_variable": "sk-proj-PLANTED"}, "no name of an environment variable"),
        ({"key_variable": ""}, "no name of an environment variable"),
    ],
)
def test_settings_that_would_be_ignored_or_shown(changes, message):
    with pytest.raises(ValueError, match=message):
        settings_of(**changes)


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
    for inside in ("\n", "\r\n", "\x1b", "\x7f"):  # two keys, or what a terminal adds
        monkeypatch.setenv("SOME_KEY", f"sk-1{inside}sk-2")
        with pytest.raises(UserError, match="SOME_KEY has a line break or another") as caught:
            read_key(settings)
        assert "sk-" not in str(caught.value)
    monkeypatch.setenv("SOME_KEY", " sk-1\n")
    assert "sk-1" not in f"{read_key(settings)!r} {read_key(settings)}"
    endpoint = Endpoint(settings, read_key(settings), {"TOKEN": SecretStr("abc")})
    assert endpoint.hidden("key sk-1, abc!") == "key ***, ***!"


def make_chat_model(folder):
    """A random Llama of one layer with a byte-level tokenizer and a chat template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1,
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

    def listens():
        assert process.poll() is None, log.read_text()
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return True
        return False

    wait_until(listens)
    yield f"http://127.0.0.1:{port}/v1", model
    process.terminate()
    process.wait()


def test_a_server_that_nobody_here_wrote(transformers_serve, tmp_path):
    """Random weights say nothing of use, but each answer is paid, kept and accounted for."""
    url, model = transformers_serve
    server = SimpleNamespace(url=url)
    sentences = [f"N {n}" for n in range(8)]
    chosen = dict(model=model, max_answer_tokens=12, max_answers=2, concurrency=4)
    found = ask(server, tmp_path, sentences, **chosen)
    assert {outcome.reason for outcome in found.values()} <= {"truncated", "not_json"}
    spent = Journal(Root(str(tmp_path)), "answers", "me", Answer).spent()
    assert (
        spent.requests == 16 and spent.answer_tokens == 16 * 12 and spent.prompt_tokens > 16 * 300
    )
    assert ask(server, tmp_path, sentences, **chosen) == found
    assert Journal(Root(str(tmp_path)), "answers", "me", Answer).spent() == spent
    with pytest.raises(UserError, match="refuses all requests now: HTTP 400 Server is pinned"):
        ask(server, tmp_path, [f"N {n}" for n in range(20)], **chosen | {"model": "nobody/no"})
