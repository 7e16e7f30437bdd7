"""Rewrites through the command line: pairs, back-translation and chat, killed and continued."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from stages.errors import UserError
from tests.chat_server import ChatServer, Reply, rewrite_of
from tests.conftest import Sentray, made, make_sentences
from tests.marian import make_pair

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def marian(tmp_path_factory):
    """Translation models that have learned when to stop, and little else."""
    return make_pair(tmp_path_factory.mktemp("marian"), train_steps=150)


def translation(marian, **settings):
    there, back = marian
    settings = {"num_beams": 1, "rows_per_unit": 8} | settings
    return {
        "name": "pivot",
        "backtranslation": {"to_pivot": {"model": str(there)}, "from_pivot": {"model": str(back)}}
        | settings,
        "filters": {"min_growth": 0.0, "max_growth": 1000.0, "max_repeats": 1000, "script": None},
    }


def perturbed(storage, name):
    """All rewrites and rejects of one entry, with shard numbers, and the manifest's figures."""
    (folder,) = Path(storage).glob(f"perturb/{name}-*")
    tables = {}
    for kind in ("rewrites", "rejects"):
        tables[kind] = [
            row | {"shard": int(file.name.split(".")[0])}
            for file in sorted(folder.glob(f"shards/*.{kind}.*.parquet"))
            for row in pq.read_table(file).to_pylist()
        ]
    return tables, json.loads((folder / "manifest.json").read_text())["stats"]


def sentences_of(storage):
    return {
        (int(file.name.split(".")[0]), place): text
        for file in Path(storage).glob("sentences/*/shards/*.parquet")
        for place, text in enumerate(pq.read_table(file).column("text").to_pylist())
    }


def test_pairs_reach_the_student_and_are_shown_beside_their_sentences(
    sentray, tiny_recipe, tmp_path
):
    sentences = make_sentences(300)
    file = tmp_path / "pairs.tsv"
    rows = [f"{text}\t{text[:-1]} and so on it goes.\tNo." for text in sentences[::2]]
    rows += [f"{sentences[1]}\t{sentences[1]}\tNo.", "Nobody said this.\tThis was said.\tNo."]
    file.write_text("\n".join(["sentence1\tsentence2\tcontrary", *rows]) + "\n")
    pairs = {"path": str(file), "unknown": "reject", "negative_column": "contrary"}
    recipe = tiny_recipe(
        perturb=[{"name": "mine", "pairs": pairs}],
        train__objectives={"infonce": {}, "listnet": {}},
        evaluate__speed=False,
    )
    out = sentray("run", sentray.recipe_file(recipe))
    assert "150 rewrites of 150 sentences" in out
    tables, stats = perturbed(recipe["storage"], "mine")
    assert stats["rewrites"] == 150
    assert stats["rejected"] == {"unchanged": 1, "no_rewrite": 149, "negative_too_short": 150}
    texts = sentences_of(recipe["storage"])
    assert len({(row["shard"], row["row"]) for rows in tables.values() for row in rows}) == 300
    for row in tables["rewrites"]:
        assert row["text"].startswith(texts[row["shard"], row["row"]][:-1])
    (artifact,) = Path(recipe["storage"]).glob("perturb/*")
    shown = sentray("show", f"perturb/{artifact.name}", "--rows", "2")
    lines = shown.splitlines()
    first = next(number for number, line in enumerate(lines) if "-> " in line)
    assert lines[first].strip()[3:].startswith(lines[first - 1].strip()[:-1])
    assert "unknown_sentence  |  Nobody said this. -> This was said." in shown
    # another entry beside it leaves the first one's artifact alone
    before = made(recipe["storage"])
    other = {"name": "too", "pairs": pairs, "filters": {"min_growth": 0.0}}
    two = recipe | {"perturb": [*recipe["perturb"], other]}
    plan = sentray("plan", sentray.recipe_file(two))
    assert "= perturb:mine" in plan and "+ perturb:too" in plan
    assert made(recipe["storage"]) == before


def test_a_pair_file_of_other_sentences_is_one_message(sentray, tiny_recipe, tmp_path):
    file = tmp_path / "pairs.tsv"
    file.write_text("sentence1\tsentence2\nWho?\tWhat?\n")
    recipe = tiny_recipe(perturb=[{"name": "mine", "pairs": {"path": str(file)}}])
    error = sentray("run", sentray.recipe_file(recipe), code=2)
    assert "perturb[0].pairs" in error and "'Who?'" in error and "Traceback" not in error


def test_a_killed_translation_loses_no_finished_unit(sentray, tiny_recipe, marian, tmp_path):
    """Killed in each pass; units that were there stay as they are, and the result is the same."""
    recipe = tiny_recipe(perturb=[translation(marian)], sentences__rows_per_shard=150)
    file = sentray.recipe_file(recipe)
    root = Path(recipe["storage"])
    sentray("run", file, "--only", "sentences")
    seen = {}
    for folder in ("pivot", "back"):
        process = sentray.start("run", file, "--only", "translate")
        while len(list(root.glob(f"work/translate/*/{folder}/*/*.json"))) < 3:
            assert process.poll() is None, process.stderr.read()
            os.sched_yield()
        process.send_signal(signal.SIGKILL)
        process.communicate()
        sentray.wait_for_idle()
        units = {f: f.stat().st_mtime_ns for f in root.glob("work/translate/*/*/*/*.json")}
        assert seen.items() <= units.items()
        seen = units
    assert any("back" in str(unit) for unit in seen)
    for name in ("translate", "perturb"):
        sentray("run", file, "--only", name)
    tables, _ = perturbed(recipe["storage"], "pivot")
    assert not list(root.glob("work/translate/*"))
    named = {(row["shard"], row["row"]) for rows in tables.values() for row in rows}
    assert named == set(sentences_of(recipe["storage"]))

    undisturbed = tiny_recipe(
        perturb=[translation(marian)], sentences__rows_per_shard=150,
        storage=str(tmp_path / "undisturbed"),
    )  # fmt: skip
    for name in ("sentences", "translate", "perturb"):
        sentray("run", sentray.recipe_file(undisturbed), "--only", name)
    assert perturbed(undisturbed["storage"], "pivot")[0] == tables
    # another filter translates nothing again
    plan = sentray("plan", file, "--set", "perturb.0.filters.max_similarity=0.5")
    assert "= translate:pivot" in plan and "+ perturb:pivot" in plan


@pytest.fixture
def chat_server():
    server = ChatServer(lambda sentence, nth, total: Reply(rewrite_of(sentence)))
    yield server
    server.stop()


def chat(server, **settings):
    rewriting = {"model": "m", "base_url": server.url, "key_variable": "SENTRAY_CHAT_KEY"}
    return {"name": "chat", "rewriting": rewriting | settings}


def test_a_chat_model_is_paid_once_through_kills_budgets_and_recipes(
    sentray, tiny_recipe, chat_server, monkeypatch
):
    """The key is in the driver's environment only, and nowhere on disk afterwards."""
    monkeypatch.setenv("SENTRAY_CHAT_KEY", "sk-very-secret")
    release = threading.Event()

    def behave(sentence, nth, total):
        return Reply(rewrite_of(sentence), hold=release if total > 120 else None)

    chat_server.behave = behave
    recipe = tiny_recipe(
        perturb=[chat(chat_server, concurrency=8)], evaluate__speed=False,
        train__objectives={"infonce": {"hard_negatives": True}, "listnet": {}},
    )  # fmt: skip
    file = sentray.recipe_file(recipe)
    root = Path(recipe["storage"])
    sentray("run", file, "--only", "sentences")
    process = sentray.start("run", file, "--only", "perturb")

    def journalled():
        return sum(one.read_bytes().count(b"\n") for one in root.glob("answers/*.jsonl"))

    while chat_server.in_flight[-1:] != [8] or journalled() < len(chat_server.answered):
        assert process.poll() is None, process.stderr.read()
        os.sched_yield()
    assert len(chat_server.answered) == 120
    process.send_signal(signal.SIGKILL)
    process.communicate()
    while chat_server.in_flight_now:  # the cluster ends the task of a driver that is gone
        os.sched_yield()
    release.set()

    error = sentray("run", file, "--only", "perturb", "--set",
                    "perturb.0.rewriting.budget={max_requests: 200}", code=2)  # fmt: skip
    assert "budget.max_requests is reached: 200 answers" in error and "Traceback" not in error
    assert len(chat_server.answered) == 200
    out = sentray("run", file)
    assert "300 rewrites of 300 sentences" in out and "student after" in out
    # another recipe of this storage, with other filters
    chat_server.behave = lambda sentence, nth, total: Reply("no", 500)
    other = recipe | {"name": "other"}
    other["perturb"] = [recipe["perturb"][0] | {"filters": {"max_growth": 10.0}}]
    file = sentray.recipe_file(other)
    assert "+ perturb:chat" in sentray("plan", file)
    sentray("run", file, "--only", "perturb")
    assert set(chat_server.answered.values()) == {1} and len(chat_server.answered) == 300
    # two lists of rewrites that ask the same pay once, although they are made side by side
    chat_server.behave = lambda sentence, nth, total: Reply(rewrite_of(sentence))
    asked = len(chat_server.bodies)
    both = [chat(chat_server, temperature=0.5) | {"name": name, "filters": {"max_growth": growth}}
            for name, growth in (("a", 9.0), ("b", 8.0))]  # fmt: skip
    sentray("run", sentray.recipe_file(other | {"perturb": both}), "--only", "perturb")
    assert len(chat_server.bodies) == asked + 300
    # what is there needs no key
    monkeypatch.delenv("SENTRAY_CHAT_KEY")
    sentray("run", sentray.recipe_file(recipe), "--force", "train", "--only", "train")
    assert set(chat_server.keys) == {"Bearer sk-very-secret"}
    for place in root.rglob("*"):
        assert place.is_dir() or b"sk-very-secret" not in place.read_bytes(), place
    artifact = sorted(root.glob("perturb/chat-*"))[0]
    shown = sentray("show", f"perturb/{artifact.name}", "--rows", "1")
    assert "-> In other words, " in shown and "!= Never that " in shown


def test_a_model_on_the_clusters_gpus_shares_journal_and_filters(
    tiny_recipe, ray_cluster, tmp_path, monkeypatch
):
    """vLLM itself needs a GPU: a stand-in takes its rows and gives what it would give."""
    import ray

    import pipeline.offline as offline
    from pipeline.graph import build_graph
    from pipeline.job import Job
    from pipeline.perturbation import make_offline_rewriting
    from pipeline.recipe import Recipe
    from pipeline.work import make_sentences as make_corpus

    rewriting = {"model": "m", "engine": "vllm", "key_variable": None}
    recipe = Recipe.model_validate(tiny_recipe(perturb=[{"name": "chat", "rewriting": rewriting}]))
    nodes = build_graph(recipe)
    asked = tmp_path / "asked"
    asked.mkdir()

    def stand_in(settings):
        request = offline._Request(settings)

        def answer(row):
            full = request(row)
            assert full["messages"][0]["content"].endswith(row["sentence"])
            assert full["sampling_params"] == {"temperature": 1.0, "max_tokens": 256}
            number = f"{row['shard']}-{row['place']}"
            (asked / number).touch(exist_ok=False)  # nobody is asked twice
            if row["place"] == 3:
                return row | {"generated_text": "", "__inference_error__": "too long"}
            return row | {"generated_text": rewrite_of(row["sentence"]), "num_input_tokens": 9,
                          "num_generated_tokens": 5, "__inference_error__": ""}  # fmt: skip

        return lambda rows: rows.map(answer)

    monkeypatch.setattr(offline, "processor", stand_in)
    folders = {name: f"{nodes[name].kind}/x-{nodes[name].fingerprint[:8]}" for name in nodes}
    ray.init(address=ray_cluster, log_to_driver=False)
    try:
        for name, make in (("sentences", make_corpus), ("perturb:chat", make_offline_rewriting)):
            node = nodes[name]
            inputs = {own: folders[there] for own, there in node.inputs.items()}
            make(Job(node, folders[name], inputs, 0.0), lambda text, important=False: None)
        _, stats = perturbed(recipe.storage, "x")
        assert stats["rewrites"] == 295
        assert stats["rejected"] == {"failed: too long": 5}
        assert len(list(asked.iterdir())) == 300
        # made again: only what was never answered is asked
        for file in asked.iterdir():
            file.unlink()
        node = nodes["perturb:chat"]
        job = Job(node, "perturb/again-0", {"sentences": folders["sentences"]}, 0.0)
        make_offline_rewriting(job, lambda text, important=False: None)
        assert len(list(asked.iterdir())) == 5
    finally:
        ray.shutdown()
    monkeypatch.undo()
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2})
    with pytest.raises(UserError, match="needs GPUs and this cluster has none"):
        offline.processor(recipe.perturb[0].rewriting)


@pytest.mark.parametrize("cores", [1, 2])
def test_perturbing_beside_teachers_on_one_small_machine_ends(tiny_recipe, marian, tmp_path, cores):
    """Two back-translations (two passes each), a teacher and tokens ask for all cores at once."""
    recipe = tiny_recipe(
        perturb=[translation(marian), translation(marian, no_repeat_ngram=3) | {"name": "second"}],
        sentences__rows_per_shard=50, evaluate__speed=False, train__max_steps=4,
        train__checkpoint_every_steps=100,
    )  # fmt: skip
    here = Sentray(tmp_path, None)
    environment = os.environ | {"RAY_OVERRIDE_RESOURCES": json.dumps({"CPU": cores})}
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.cli", "run", here.recipe_file(recipe)],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "student after" in done.stdout
