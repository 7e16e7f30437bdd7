"""What a run sends, leaves and publishes: secrets reach the endpoint and nothing else."""

import os

import pytest
import ray
import yaml

from pipeline.recipe.read import load_recipe
from stages.endpoint.credentials import read_variables
from stages.endpoint.journal import Journal, request_key
from stages.errors import UserError
from stages.files import Root
from stages.recipe import Recipe
from stages.rewrite.chat import Answer, payload
from stages.rewrite.client import ChatClient
from stages.rewrite.rewriting import Rewriting
from tests.support import REPOSITORY
from tests.support.chat_server import ChatServer, Reply, rewrite_of
from tests.support.recipes import setting
from tests.support.secrets import EXTRA, SECRET, chat, left_by, process_list


@pytest.fixture
def server():
    def answer(sentence, number, total):
        found.processes.append(process_list())
        return Reply(rewrite_of(sentence))

    found = ChatServer(answer)
    found.processes = []
    yield found
    found.stop()


def client_of(settings, tmp_path):
    journal = Journal(Root(str(tmp_path / "runs")), "answers", "owner", Answer)
    return ChatClient(settings, None, journal, print, variables=read_variables(settings))


def test_a_secret_is_sent_and_nowhere_else(server, tmp_path):
    settings = Rewriting.model_validate(
        {"model": "m", "key_variable": None, "base_url": server.url, "extra": EXTRA}
    )
    list(client_of(settings, tmp_path).run([(0, "A cat."), (1, "What is ${GATEWAY_TOKEN}?")]))
    headers = [body["extra_headers"] for body in server.bodies]
    assert headers == 2 * [{"Authorization": f"Bearer {SECRET}"}]
    assert {body["messages"][0]["content"].splitlines()[-1] for body in server.bodies} == {
        "Sentence: A cat.", "Sentence: What is ${GATEWAY_TOKEN}?"
    }  # fmt: skip
    files = left_by(tmp_path)
    assert files and not [path for path, data in files.items() if SECRET.encode() in data]
    # found again with another value: the answer is that of the model, whatever the account
    body = payload(settings, "A cat.", [])
    found = Journal(Root(str(tmp_path / "runs")), "answers", "owner", Answer).get(request_key(body))
    assert found is not None


def test_an_endpoint_that_repeats_a_secret_is_not_quoted(server, tmp_path):
    server.behave = lambda sentence, number, total: Reply(f"bad {SECRET}", 401)
    settings = Rewriting.model_validate(
        {"model": "m", "key_variable": None, "base_url": server.url, "extra": EXTRA}
    )
    with pytest.raises(UserError, match=r"HTTP 401 bad \*\*\*") as caught:
        list(client_of(settings, tmp_path).run([(0, "A cat.")]))
    assert SECRET not in str(caught.value)


def test_a_secret_that_is_not_set_is_asked_for_when_it_is_needed(load, monkeypatch):
    monkeypatch.delenv("GATEWAY_TOKEN")
    settings = load().perturb[0].rewriting  # rewrites that are there need none
    with pytest.raises(UserError, match="GATEWAY_TOKEN is not set"):
        read_variables(settings)
    monkeypatch.setenv("GATEWAY_TOKEN", SECRET)
    (variable,) = read_variables(settings).values()
    assert variable.get_secret_value() == SECRET and SECRET not in repr(variable)


def test_a_card_shows_methods_and_nothing_of_this_machine(load, tmp_path, teacher_folder):
    card = load("name=mine").summary()
    raw = yaml.safe_load(card)
    assert raw["name"] == "mine"
    assert raw["sentences"]["path"] == "sentences.txt"
    assert raw["teachers"][0]["model"] == teacher_folder.name
    assert set(raw["train"]["objectives"]) == {"infonce", "consistency", "listnet"}
    assert raw["train"]["learning_rate"] == 1e-3 and raw["train"]["max_steps"] == 12
    assert raw["perturb"][0]["rewriting"]["model"] == "m"
    assert raw["evaluate"]["sts"][0] == {"name": "made-up", "path": "sts.tsv"} | {
        key: value
        for key, value in raw["evaluate"]["sts"][0].items()
        if key not in ("name", "path")
    }
    for text in (str(tmp_path), str(teacher_folder.parent), "://", "storage", "base_url", "extra",
                 "${", "/tmp", SECRET, "GATEWAY_TOKEN", "key_variable", "num_workers"):  # fmt: skip
        assert text not in card, text


def test_public_names_of_models_stay(tmp_path):
    text = REPOSITORY / "recipes" / "quickstart.yaml"
    raw = yaml.safe_load(load_recipe(str(text)).summary())
    whole = load_recipe(str(text))
    assert raw["student"]["model"] == whole.student.model
    base = Recipe.model_validate(
        whole.model_dump() | {"student": {"model": "recipe:/a/b/simcse.yaml"}}
    )
    assert yaml.safe_load(base.summary())["student"]["model"] == "recipe:simcse.yaml"


def test_nothing_that_a_run_leaves_holds_a_secret(
    load, server, tmp_path, student_folder, sentray, monkeypatch
):
    monkeypatch.setenv("MODEL_FOLDER", str(student_folder))
    recipe = load(
        setting("perturb", chat(base_url=server.url, extra=EXTRA)),
        "student.model=${MODEL_FOLDER}", "teachers=[]", "train.objectives={infonce: {}}",
        "evaluate.speed=false",
    )  # fmt: skip
    sentray("run", "recipe.yaml")
    assert {body["extra_headers"]["Authorization"] for body in server.bodies} == {
        f"Bearer {SECRET}"
    }
    assert b"ray::" in server.processes[-1]
    assert SECRET.encode() not in b"".join(server.processes)
    sentray("plan", "recipe.yaml")
    sentray("show", "tiny", "--storage", recipe.storage)
    assert "student after" in sentray.said and SECRET not in sentray.said
    files = left_by(recipe.storage)
    names = {path.name for path in files}
    assert {"recipe.yaml", "run.json", "report.html", "manifest.json", "README.md"} <= names
    of_ray = left_by(ray._private.worker._global_node.get_session_dir_path())
    assert any(path.suffix == ".out" for path in of_ray)  # its workers' logs
    everywhere = files | of_ray | left_by(os.environ["XDG_CACHE_HOME"])
    assert not [path for path, data in everywhere.items() if SECRET.encode() in data]
    cards = [data for path, data in files.items() if path.name == "README.md"]
    folders = [str(tmp_path), str(student_folder.parent)]
    assert not [one for one in folders if any(one.encode() in card for card in cards)]
    saved = [data for path, data in files.items() if path.name in ("recipe.yaml", "report.html")]
    assert all(b"${GATEWAY_TOKEN}" in data and b"${MODEL_FOLDER}" in data for data in saved)
