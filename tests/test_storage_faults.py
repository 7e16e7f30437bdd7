"""A storage that stumbles: an S3 server on loopback behind a proxy that fails as real ones do."""

import io
import os
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipeline.store.artifacts import ArtifactStore
from pipeline.store.manifest import shard_line
from stages import files
from stages.endpoint.journal import Journal, Spent, request_key
from stages.errors import StorageError, StorageSilent
from stages.files import Root
from stages.patience import KNOWN, VARIABLE, Patience, Silent, is_transient
from stages.recipe import Recipe
from stages.rewrite.chat import Answer
from tests.pipeline.store.test_artifacts import publish
from tests.support.faulty import faulty_proxy
from tests.support.here import make_here
from tests.support.recipes import setting

# Arrow's client makes a request for some six seconds by itself
OUTAGE = 9.0


@pytest.fixture
def faulty(bucket):
    files._patience_of.cache_clear()
    with faulty_proxy(bucket) as proxy:
        yield proxy


def outage(proxy, seconds, fault):
    """Every request fails from now on, for so long."""
    end = time.monotonic() + seconds
    proxy.fault = lambda number, method, path: fault if time.monotonic() < end else None


def downloaded(root, name):
    file = io.BytesIO()
    root.download(name, file)
    return file.getvalue()


@pytest.mark.parametrize("fault", ["slow_down", "drop"])
def test_an_outage_is_ridden_out_by_every_kind_of_request(faulty, capfd, fault):
    root = Root(faulty.root.format(f"outage-{fault}"))
    for name in ("read", "gone", "large"):
        root.write(f"x/{name}", b"abc" * (1 << 20) if name == "large" else name.encode())
    outage(faulty, OUTAGE, fault)
    asked = {
        "exists": lambda: root.exists("x/read"),
        "read": lambda: root.read("x/read"),
        "now": lambda: root.read_now("x/read"),
        "list": lambda: root.list("x")[:1],
        "sizes": lambda: root.sizes("x")["read"],
        "age": lambda: root.age("x/read") < 600,
        "write": lambda: root.write("y/new", b"new"),
        "create": lambda: root.create("y/mine", b"mine"),
        "delete": lambda: root.delete("x/gone"),
        "download": lambda: len(downloaded(root, "x/large")),
    }
    with ThreadPoolExecutor(len(asked)) as pool:
        found = {name: pool.submit(request) for name, request in asked.items()}
        answers = {name: future.result() for name, future in found.items()}
    assert answers == {
        "exists": True, "read": b"read", "now": b"read", "list": ["gone"], "sizes": 4,
        "age": True, "write": None, "create": True, "delete": None, "download": 3 << 20,
    } or answers["list"] == ["large"]  # listed after the deletion  # fmt: skip
    assert root.read("y/new") == b"new" and root.read("y/mine") == b"mine"
    assert not root.exists("x/gone")
    told = capfd.readouterr().err
    address = faulty.root.format(f"outage-{fault}").partition("?")[0]
    assert f"storage {address} does not answer (" in told and "trying for up to 300 s" in told
    assert "answers again, after" in told


def test_requests_that_fail_now_and_then_lose_nothing(faulty):
    """Three in ten fail: 503, 500, no answer, half an answer."""
    draws = random.Random(1)
    faults = ["slow_down", "error", "drop", "cut"]
    faulty.fault = lambda number, method, path: (
        draws.choice(faults) if draws.random() < 0.3 else None
    )
    store = ArtifactStore(faulty.root.format("now-and-then"))
    data = {number: random.Random(number).randbytes(300_000) for number in range(6)}
    for number, content in data.items():
        store.put_shard("embed/x-1", number, {"a.npy": content}, 3)
    publish(store, "embed/x-1")
    artifact = ArtifactStore(faulty.root.format("now-and-then")).open("embed/x-1")
    found = [path.read_bytes() for path in artifact.shard_paths("a.npy")]
    assert found == list(data.values())
    assert artifact.num_rows == 18
    assert sum(faulty.counts.get(fault, 0) for fault in faults) > 10


def test_a_ledger_of_many_shards_takes_few_requests(faulty):
    store, folder = ArtifactStore(faulty.root.format("ledger")), "embed/x-00000001"
    records = [store.put_shard(folder, n, {"a.npy": b"%d" % n}, n + 1) for n in range(40)]
    store.put_segment(folder, map(shard_line, records[:36]))

    def requests(ask):
        before = sum(faulty.counts.values())
        return ask(folder), sum(faulty.counts.values()) - before

    listed, num_requests = requests(store.recorded_shards)
    assert listed == set(range(40)) and num_requests <= 2
    found, num_requests = requests(store.finished_shards)
    assert found == dict(enumerate(records)) and num_requests <= 2 + 1 + 4
    store.root.delete(f"{folder}/{records[7].files['a.npy'].path}")
    assert found.keys() - store.finished_shards(folder).keys() == {7}
    store.begin_again(folder)
    assert store.finished_shards(folder) == {}


@pytest.mark.parametrize("longer", [1000, -1])
def test_a_manifest_that_is_replaced_meanwhile_is_one_of_the_two(faulty, bucket, longer):
    """As of an artifact that is made again: Arrow asks for its size, and then for as many bytes of
    what took its place."""
    folder, direct = "embed/x-00000001", Root(bucket.format(f"replaced{longer}"))
    store = ArtifactStore(faulty.root.format(f"replaced{longer}"))
    store.put_shard(folder, 0, {"a.npy": b"a"}, 3)
    publish(store, folder)
    name = f"{folder}/manifest.json"
    texts = [direct.read(name), direct.read(name) + b" " * 1000][:: 1 if longer > 0 else -1]
    direct.write(name, texts[0])

    def replaced(number, method, path):
        if method == "GET" and "manifest.json" in path:
            direct.write(name, texts[1])

    faulty.fault = replaced
    assert store.manifest(folder).num_rows == 3


def test_patience_has_an_end(faulty, monkeypatch):
    root = Root(faulty.root.format("end"))
    root.write("a", b"1")
    monkeypatch.setenv(VARIABLE, "0")
    faulty.fault = lambda number, method, path: "slow_down"
    with pytest.raises(StorageSilent, match="cannot be read or written .*SLOW_?DOWN|503"):
        root.read("a")


@pytest.mark.thorough
@pytest.mark.parametrize(("failures", "code", "again"), [(2, 2, False), (1, 0, True)])
def test_a_store_that_is_silent_beyond_patience_costs_a_restart(
    faulty, sentray, tiny_recipe, monkeypatch, failures, code, again
):
    """From the third factors on, longer than it may; or until the run begins again, and keeps the
    first two, although it makes all that is there once more."""
    monkeypatch.setenv(VARIABLE, "0")
    recipe = tiny_recipe("train.max_failures=1", "sentences.rows_per_shard=50")
    recipe["storage"] = faulty.root.format(f"silent-{failures}-{again}")
    file = sentray.recipe_file(recipe)
    make_here(Recipe.model_validate(recipe), "embed:t" if again else "sentences")
    silent, healed, records = threading.Event(), threading.Event(), []

    def fault(number, method, path):
        if method == "PUT" and "/embed/" in path and not silent.is_set():
            records.extend(re.findall(r"shards/\d+\.json", path))
            if "factors" in path and len(records) == 2 and not healed.is_set():
                silent.set()
        return "error" if silent.is_set() else None

    faulty.fault = fault
    process = sentray.start("run", file, "--only", "embed", *["--force", "embed"] * again)
    for line in process.stdout:
        if "Begins again with what is lacking (1 of 1)" in line and failures == 1:
            healed.set()
            silent.clear()
    assert process.wait() == code, process.stderr.read()
    assert silent.is_set() == (code == 2)
    assert len(records) == len(set(records)) == (6 if code == 0 else 2)
    silent.clear()
    healed.set()
    out = sentray("plan", file)
    assert ("= embed:t" in out) == (code == 0)


def test_leases_are_not_given_up_for_an_outage(faulty, monkeypatch):
    """It is no store that cannot have them, so two runs would not be told apart from then on."""
    root = Root(faulty.root.format("leases"))
    root.write("a", b"1")
    monkeypatch.setenv(VARIABLE, "0")
    faulty.fault = lambda number, method, path: "drop" if method == "PUT" else None
    monkeypatch.setattr("stages.object_store.RETRIES", {"max_retries": 0})
    with pytest.raises(StorageError):
        root.create("lease", b"1")


@pytest.mark.parametrize(
    ("text", "transient"),
    [
        (
            "When reading information for key: AWS Error UNKNOWN (HTTP status 503) "
            "during HeadObject operation: No response body.",
            True,
        ),
        ("AWS Error SLOW_DOWN during PutObject operation: Please reduce your request rate.", True),
        ("AWS Error NETWORK_CONNECTION during ListObjectsV2 operation: curlCode: 52", True),
        ("curlCode: 28, Timeout was reached", True),
        ("Generic S3 error: Error after 10 retries in 180s: error sending request", True),
        ("AWS Error ACCESS_DENIED during HeadObject operation: No response body.", False),
        ("AWS Error NO_SUCH_BUCKET during PutObject operation", False),
        ("AWS Error UNKNOWN (HTTP status 404) during HeadObject", False),
        ("curlCode: 6, Couldn't resolve host name", False),
        ("[Errno 28] No space left on device", False),
    ],
)
def test_what_may_pass(text, transient):
    assert is_transient(OSError(text)) is transient


def test_a_missing_file_is_an_answer():
    asked = []

    def request():
        asked.append(1)
        raise FileNotFoundError("curlCode: 7")

    with pytest.raises(FileNotFoundError):
        Patience("x").ask(request)
    assert len(asked) == 1


def test_a_worker_has_patience_from_its_first_request_on(monkeypatch, sentray):
    """It is there since its driver has had answers."""
    import ray

    inherited = ray.get(ray.remote(num_cpus=0)(lambda: dict(os.environ)).remote())
    assert inherited[KNOWN] == "1"
    monkeypatch.setattr("stages.patience.FIRST_SECONDS", 0.0)
    monkeypatch.setattr("stages.patience.LEAST_PAUSE", 0.01)

    def answer():
        answers = iter([OSError("HTTP status 503"), OSError("HTTP status 503")])

        def request():
            for error in answers:
                raise error
            return "here"

        return Patience("x").ask(request)

    with pytest.raises(Silent):
        answer()
    monkeypatch.setenv(KNOWN, "1")
    assert answer() == "here"


@pytest.mark.thorough
@pytest.mark.parametrize("node", ["embed:t", "evaluate:t:made-up"])
def test_what_only_workers_meet_is_said_by_the_run(faulty, sentray, tiny_recipe, node):
    """Shards are stored by Ray Data's actors, other artifacts by Ray tasks: nobody reads the stderr
    of either."""
    kind = node.partition(":")[0]
    storage = faulty.root.format(f"workers-{kind}")
    file = sentray.recipe_file(tiny_recipe(setting("storage", storage)))
    sentray("run", file, "--only", "sentences")
    began = []

    def fault(number, method, path):
        if method not in ("PUT", "POST") or f"/bucket/workers-{kind}/{kind}/" not in path:
            return None
        began.append(time.monotonic())
        return "slow_down" if began[-1] - began[0] < OUTAGE else None

    faulty.fault = fault
    told = sentray("run", file, "--only", node)
    line = f"{re.escape(node)} +storage {re.escape(storage.partition('?')[0])}"
    assert re.search(f"{line} does not answer .*SLOW_?DOWN", told, re.IGNORECASE)
    assert re.search(f"{line} answers again, after ", told)
    assert " does not answer " in sentray("status", "tiny", "--log", "--storage", storage)


def test_a_journal_of_many_segments_is_read_while_storage_stumbles(faulty):
    """A segment is a second of answers: two requests each, one by one, would be minutes."""
    root = Root(faulty.root.format("journal"))
    journal = Journal(root, "answers", "me", Answer)
    for number in range(70):
        journal.add([(request_key({"n": number}), Answer(str(number), "stop", 1, 1))])
        journal.flush()
    journal.charge(Spent(1, 5, 7, unanswered=1))
    journal.flush()
    outage(faulty, OUTAGE, "slow_down")
    again = Journal(root, "answers", "me", Answer)
    assert again.get(request_key({"n": 69})).text == "69"
    assert again.spent() == Spent(71, 75, 77, unanswered=1)
    before = sum(faulty.counts.values())
    Journal(root, "answers", "me", Answer)
    assert sum(faulty.counts.values()) - before <= 1 + 71
