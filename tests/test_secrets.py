"""What ${VARIABLES} stand for, credentials and this machine's folders stay where they are."""

import json
import pickle
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from pipeline.cli import main
from pipeline.document import Document
from pipeline.graph import build_graph
from pipeline.history import start_record
from pipeline.plan import artifact_folders, make_plan, plan_text
from pipeline.recipe import Recipe, dump_recipe, load_recipe, public_recipe
from stages.errors import UserError
from stages.files import Root, masked_uri, storage_error
from stages.perturb.chat import payload
from stages.perturb.client import ChatClient
from stages.perturb.endpoint import Secret, read_variables
from stages.perturb.journal import Journal, request_key
from stages.perturb.settings import Rewriting
from tests.chat_server import ChatServer, Reply, rewrite_of
from tests.conftest import make_model

SECRET = "s3cr3t-Gateway-Value"
EXTRA = {"user": "u", "extra_headers": {"Authorization": "Bearer ${GATEWAY_TOKEN}"}}


@pytest.fixture(autouse=True)
def _variables(monkeypatch):
    monkeypatch.setenv("GATEWAY_TOKEN", SECRET)


def chat(**changes):
    return [{"name": "chat", "rewriting": {"model": "m", "key_variable": None} | changes}]


@pytest.fixture
def load(tmp_path, tiny_recipe, monkeypatch):
    """Loads a recipe whose sentences and test set are named through ${FOLDER}."""
    monkeypatch.setenv("FOLDER", str(tmp_path))

    def read(**changes):
        whole = {"sentences__path": "${FOLDER}/sentences.txt", "perturb": chat(extra=EXTRA),
                 "evaluate__sts__0__path": "${FOLDER}/sts.tsv"} | changes  # fmt: skip
        file = tmp_path / "recipe.yaml"
        file.write_text(yaml.safe_dump(tiny_recipe(**whole)))
        return load_recipe(str(file))

    return read


def left_by(folder):
    """Every file below a folder, whatever it is, by its path."""
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


# --- recipes ------------------------------------------------------------------------------------


def test_a_saved_recipe_names_its_variables_and_is_the_same_recipe(load, tmp_path):
    recipe = load()
    assert recipe.sentences.path == str(tmp_path / "sentences.txt")
    text = dump_recipe(recipe)
    raw = yaml.safe_load(text)
    assert raw["sentences"]["path"] == "${FOLDER}/sentences.txt"
    assert raw["evaluate"]["sts"][0]["path"] == "${FOLDER}/sts.tsv"
    assert raw["perturb"][0]["rewriting"]["extra"] == EXTRA
    assert raw["train"]["dev"]["sts"][0]["path"] == str(tmp_path / "sts.tsv")  # written like that
    assert SECRET not in text
    again = tmp_path / "again.yaml"
    again.write_text(text)
    assert load_recipe(str(again)) == recipe


def test_copies_of_a_recipe_keep_its_variables_and_their_own_changes(load, monkeypatch):
    monkeypatch.setenv("WHO", "tiny")
    recipe = load(name="${WHO}")
    there = pickle.loads(pickle.dumps(recipe))
    assert dump_recipe(there) == dump_recipe(recipe)
    renamed = yaml.safe_load(dump_recipe(recipe.model_copy(update={"name": "tiny-best"})))
    assert renamed["name"] == "tiny-best"
    assert renamed["sentences"]["path"] == "${FOLDER}/sentences.txt"


def test_a_search_keeps_variables_in_its_recipes_and_its_own_file(load, tmp_path, student_folder):
    from tune.load import Search

    load()
    file = tmp_path / "search.yaml"
    space = {"student.model": {"grid": ["${FOLDER}/a", str(student_folder)]}}
    make_model(tmp_path / "a", seed=7)
    space["train.learning_rate"] = {"grid": [0.1, 0.2]}
    file.write_text(yaml.safe_dump({"recipe": "recipe.yaml", "search": {"space": space}}))
    search = Search(str(file))
    values = {"train.learning_rate": 0.1, "student.model": "${FOLDER}/a"}
    best = search.recipe_of(values, 3)
    assert best.student.model == str(tmp_path / "a")
    raw = yaml.safe_load(dump_recipe(best))
    assert raw["sentences"]["path"] == "${FOLDER}/sentences.txt"
    assert raw["student"]["model"] == "${FOLDER}/a"
    assert search.plain_settings()["space"]["student.model"]["grid"][0] == "${FOLDER}/a"


def test_the_value_of_a_secret_is_no_identity_and_its_name_is(load, monkeypatch):
    first = build_graph(load())["perturb:chat"]
    monkeypatch.setenv("GATEWAY_TOKEN", "another")
    assert build_graph(load())["perturb:chat"].fingerprint == first.fingerprint
    other = {"extra_headers": {"Authorization": "Bearer ${OTHER}"}}
    assert build_graph(load(perturb=chat(extra=other)))["perturb:chat"].fingerprint != (
        first.fingerprint
    )
    assert SECRET not in json.dumps(first.settings)


def test_other_variables_count_by_value_and_are_saved_by_name(load, tmp_path, monkeypatch):
    literal = build_graph(load(train__dev=None, evaluate__sts__0__name="Planted"))
    monkeypatch.setenv("TITLE", "Planted")
    recipe = load(train__dev=None, evaluate__sts__0__name="${TITLE}")
    nodes = build_graph(recipe)
    prints = {name: node.fingerprint for name, node in nodes.items()}
    assert prints == {name: node.fingerprint for name, node in literal.items()}
    root = Root(recipe.storage)
    start_record(root, recipe, list(nodes.values()), artifact_folders(recipe))
    files = left_by(recipe.storage)
    assert files and not [path for path, data in files.items() if b"Planted" in data]
    # a value that changes is told without showing either
    monkeypatch.setenv("TITLE", "Other")
    text = plan_text(recipe, make_plan(load(train__dev=None, evaluate__sts__0__name="${TITLE}")))
    assert "Planted" not in text and "Other" not in text


def test_recipes_that_it_builds_on_are_saved_alike(load, tmp_path, tiny_recipe):
    base = tiny_recipe(name="base", teachers=[], train__objectives={"infonce": {}})
    base["sentences"]["path"] = "${FOLDER}/sentences.txt"
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    teacher = {"name": "b", "model": "recipe:base.yaml", "max_length": 32}
    recipe = load(storage="${FOLDER}/runs", teachers=[teacher])
    nodes = build_graph(recipe)
    found = nodes["base/train"].recipe
    assert found.storage == recipe.storage == str(tmp_path / "runs")
    raw = yaml.safe_load(dump_recipe(found))
    assert raw["storage"] == "${FOLDER}/runs"
    assert raw["sentences"]["path"] == "${FOLDER}/sentences.txt"


@pytest.mark.parametrize("name", ["wiki-minilm", "wiki-ranks", "wiki-simcse", "wiki-denosent"])
def test_shipped_recipes_keep_their_variables(name, monkeypatch):
    monkeypatch.setenv("SENTRAY_DATA", "/nowhere")
    file = Path(__file__).parent.parent / "recipes" / f"{name}.yaml"
    written = file.read_text().count("${SENTRAY_DATA}")
    saved = dump_recipe(load_recipe(str(file)))
    assert saved.count("${SENTRAY_DATA}") == written > 0
    assert "/nowhere" not in saved


# --- messages -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"train__objectives__infonce__temperature": "${GATEWAY_TOKEN}"},  # not a number
        {"name": "${GATEWAY_TOKEN}!"},  # a pattern
        {"student__template": "${GATEWAY_TOKEN}"},  # a check of several settings
        {"sentences__path": "/data/${GATEWAY_TOKEN}"},  # no such file
        {"student__model": "/data/${GATEWAY_TOKEN}/m"},
        {"storage": "nosuch://${GATEWAY_TOKEN}/x"},
        {"perturb": chat(base_url="ftp://${GATEWAY_TOKEN}/v1")},
    ],
)
def test_no_message_shows_what_a_variable_stands_for(load, tmp_path, changes, capsys):
    with suppress(UserError):  # some are found while planning
        load(**changes)
    assert main(["plan", str(tmp_path / "recipe.yaml")]) == 2
    said = "".join(capsys.readouterr())
    assert SECRET not in said and len(said) > 30


@pytest.mark.parametrize(
    "extra",
    [
        {"api_key": SECRET},
        {"Authorization": SECRET},
        {"x": {"headers": {"X-Api-Key": SECRET}}},
        {"authToken": SECRET},
        {"password": SECRET},
        {"client_secret": SECRET},
        {"list": [{"token": SECRET}]},
        {"secrets": {"secret": {"value": [SECRET]}}},
        {"header": f"Bearer {SECRET}"},
    ],
)
@pytest.mark.parametrize("field", ["extra", "engine_options"])
def test_a_credential_in_clear_text_is_refused(load, extra, field):
    with pytest.raises(
        UserError, match=rf"{field}\..*environment variable.*\$\{{NAME\}}"
    ) as caught:
        load(perturb=chat(**{field: extra}))
    assert SECRET not in str(caught.value)


def test_what_only_looks_like_a_credential_passes(load):
    extra = {"stop_token_ids": [1], "eos_token": "</s>", "min_tokens": 3, "seed": 1, "user": "me",
             "token": "${A}", "prompt_cache_key": "a", "keys": ["b"], "api_key": None,
             "reasoning_effort": "low", "author": "c", "monkey": "d"}  # fmt: skip
    assert load(perturb=chat(extra=extra)).perturb[0].rewriting.extra == extra


@pytest.mark.parametrize(
    "uri",
    [
        "s3://KEY:PLAN/TED@bucket",
        "s3://KEY:PLAN/TED@bucket/runs",
        "s3://KEY:PLANTED@bucket",
        "s3://KEY:1/TED@bucket",
        "s3://PLANTED@bucket",
        "gs://KEY:PL@AN/PLANTED@bucket/x",
        "s3://bucket/x?secret_key=PLANTED&region=r",
    ],
)
def test_credentials_in_an_address_are_refused_and_masked(uri, load, tmp_path, capsys):
    with pytest.raises(UserError, match="credentials do not belong") as caught:
        Root(uri)
    load(storage=uri)
    assert main(["plan", str(tmp_path / "recipe.yaml")]) == 2
    assert main(["show", "x", "--storage", uri]) == 2
    said = [str(caught.value), *capsys.readouterr(), str(storage_error(uri, OSError(5, "x")))]
    assert not [text for text in said if "PLAN" in text or "TED" in text]
    assert "bucket" in said[0] and "***" in said[0]


@pytest.mark.parametrize("uri", [
    "s3://bucket/x", "s3://bucket/me@host/x", "runs", "/data/a:b@c",
    "s3://bucket/x?scheme=http&endpoint_override=127.0.0.1:80&region=us-east-1",
])  # fmt: skip
def test_addresses_without_credentials_stay_as_they_are(uri):
    assert masked_uri(uri) == uri


# --- the endpoint -------------------------------------------------------------------------------


@pytest.fixture
def server():
    found = ChatServer(lambda sentence, number, total: Reply(rewrite_of(sentence)))
    yield found
    found.stop()


def client_of(settings, tmp_path):
    journal = Journal(Root(str(tmp_path / "runs")), "answers", "owner")
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
    found = Journal(Root(str(tmp_path / "runs")), "answers", "owner").get(request_key(body))
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
    assert SECRET not in repr(Secret(SECRET))


# --- the model card -----------------------------------------------------------------------------


def test_a_card_shows_methods_and_nothing_of_this_machine(load, tmp_path, teacher_folder):
    card = public_recipe(load(name="mine"))
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
    text = Path(__file__).parent.parent / "recipes" / "quickstart.yaml"
    raw = yaml.safe_load(public_recipe(load_recipe(str(text))))
    whole = load_recipe(str(text))
    assert raw["student"]["model"] == whole.student.model
    base = Recipe.model_validate(
        whole.model_dump() | {"student": {"model": "recipe:/a/b/simcse.yaml"}}
    )
    assert yaml.safe_load(public_recipe(base))["student"]["model"] == "recipe:simcse.yaml"


# --- a whole run --------------------------------------------------------------------------------


@pytest.mark.slow
def test_nothing_that_a_run_leaves_holds_a_secret(
    load, server, tmp_path, student_folder, ray_cluster, monkeypatch
):
    monkeypatch.setenv("MODEL_FOLDER", str(student_folder))
    recipe = load(
        perturb=chat(base_url=server.url, extra=EXTRA), student__model="${MODEL_FOLDER}",
        teachers=[], train__objectives={"infonce": {}}, evaluate__speed=False,
    )  # fmt: skip
    command = [sys.executable, "-m", "pipeline.cli"]
    done = subprocess.run(
        [*command, "run", "recipe.yaml", "--address", ray_cluster],
        cwd=tmp_path, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert {body["extra_headers"]["Authorization"] for body in server.bodies} == {
        f"Bearer {SECRET}"
    }
    said = done.stdout + done.stderr
    for what in ("plan", "show"):
        more = ["recipe.yaml"] if what == "plan" else ["tiny", "--storage", recipe.storage]
        shown = subprocess.run([*command, what, *more], cwd=tmp_path, capture_output=True)
        assert shown.returncode == 0
        said += shown.stdout.decode() + shown.stderr.decode()
    assert SECRET not in said
    files = left_by(recipe.storage)
    names = {path.name for path in files}
    assert {"recipe.yaml", "run.json", "report.html", "manifest.json", "README.md"} <= names
    assert not [path for path, data in files.items() if SECRET.encode() in data]
    cards = [data for path, data in files.items() if path.name == "README.md"]
    folders = [str(tmp_path), str(student_folder.parent)]
    assert not [one for one in folders if any(one.encode() in card for card in cards)]
    saved = [data for path, data in files.items() if path.name in ("recipe.yaml", "report.html")]
    assert all(b"${GATEWAY_TOKEN}" in data and b"${MODEL_FOLDER}" in data for data in saved)


def test_an_override_that_is_no_yaml_is_not_repeated(load, tmp_path):
    load()
    with pytest.raises(UserError, match="not valid YAML") as caught:
        Document(str(tmp_path / "recipe.yaml"), [f"a.token=[{SECRET}"])
    assert SECRET not in str(caught.value)
