"""Rewrites through the command line: pairs and chat models, killed and continued."""

import signal
import threading
from pathlib import Path

import pytest

from stages.rewrite import rewriting as rewriting_stage
from stages.rewrite import vllm
from tests.support.chat_server import ChatServer, Reply, rewrite_of
from tests.support.command import made, wait_until
from tests.support.models import make_sentences
from tests.support.recipes import setting
from tests.support.rewrites import perturbed, sentences_of


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
        setting("perturb", [{"name": "mine", "pairs": pairs}]),
        "train.objectives={infonce: {}, listnet: {}}",
        "evaluate.speed=false",
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
    recipe = tiny_recipe(setting("perturb", [{"name": "mine", "pairs": {"path": str(file)}}]))
    error = sentray("run", sentray.recipe_file(recipe), code=2)
    assert "perturb[0].pairs" in error and "'Who?'" in error and "Traceback" not in error


@pytest.fixture
def chat_server():
    server = ChatServer(lambda sentence, nth, total: Reply(rewrite_of(sentence)))
    yield server
    server.stop()


def chat(server, **settings):
    rewriting = {"model": "m", "base_url": server.url, "key_variable": "SENTRAY_CHAT_KEY"}
    return {"name": "chat", "rewriting": rewriting | settings}


@pytest.mark.thorough
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
        setting("perturb", [chat(chat_server, concurrency=8)]), "evaluate.speed=false",
        "train.objectives={infonce: {hard_negatives: true}, listnet: {}}",
    )  # fmt: skip
    file = sentray.recipe_file(recipe)
    root = Path(recipe["storage"])
    sentray("run", file, "--only", "sentences")
    process = sentray.start("run", file, "--only", "perturb")

    def journalled():
        return sum(one.read_bytes().count(b"\n") for one in root.glob("answers/*.jsonl"))

    def all_slots_are_held():
        return chat_server.in_flight[-1:] == [8] and journalled() >= len(chat_server.answered)

    sentray.wait(process, all_slots_are_held)
    assert len(chat_server.answered) == 120
    process.send_signal(signal.SIGKILL)
    process.communicate()
    # the cluster ends the task of a driver that is gone
    wait_until(lambda: not chat_server.in_flight_now)
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
    sentray, tiny_recipe, inputs_made, tmp_path, monkeypatch
):
    """vLLM itself needs a GPU: a stand-in takes its rows and gives what it would give."""
    rewriting = {"model": "m", "engine": "vllm", "key_variable": None}
    recipe = tiny_recipe(setting("perturb", [{"name": "chat", "rewriting": rewriting}]))
    file = sentray.recipe_file(recipe)
    asked = tmp_path / "asked"
    asked.mkdir()

    def stand_in(settings):
        request = vllm.Request(settings)

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

    monkeypatch.setattr(rewriting_stage, "find_spec", lambda name: name)  # as if it were installed
    with monkeypatch.context() as patch:
        patch.setattr(vllm, "processor", stand_in)
        said = sentray("run", file, "--only", "perturb")
        assert said.count("vLLM failed at a sentence: too long") == 1
        _, stats = perturbed(recipe["storage"], "chat")
        assert stats["rewrites"] == 298
        assert stats["rejected"] == {"failed: vLLM": 2}
        assert len(list(asked.iterdir())) == 300
        # made again: only what was never answered is asked
        for one in asked.iterdir():
            one.unlink()
        sentray("run", file, "--only", "perturb", "--force", "perturb")
        assert len(list(asked.iterdir())) == 2
    error = sentray(
        "run", file, "--set", "perturb.0.rewriting.temperature=0.5", "--only", "perturb", code=2
    )
    assert "needs GPUs and this cluster has none" in error
