"""No message shows a secret; credentials in clear text are refused."""

from contextlib import suppress

import pytest

from pipeline.cli import main
from pipeline.recipe.document import Document
from stages.errors import UserError
from stages.files import Root, masked_uri, storage_error
from stages.variables import hide_values
from tests.support.recipes import setting
from tests.support.secrets import SECRET, chat


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.objectives.infonce.temperature=${GATEWAY_TOKEN}"],  # not a number
        ["name=${GATEWAY_TOKEN}!"],  # a pattern
        ["student.template=${GATEWAY_TOKEN}"],  # a check of several settings
        ["sentences.path=/data/${GATEWAY_TOKEN}"],  # no such file
        ["student.model=/data/${GATEWAY_TOKEN}/m"],
        ["storage=nosuch://${GATEWAY_TOKEN}/x"],
        [setting("perturb", chat(base_url="ftp://${GATEWAY_TOKEN}/v1"))],
    ],
)
def test_no_message_shows_what_a_variable_stands_for(load, tmp_path, overrides, capsys):
    with suppress(UserError):  # some are found while planning
        load(*overrides)
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
        load(setting("perturb", chat(**{field: extra})))
    assert SECRET not in str(caught.value)


def test_a_key_in_the_place_of_its_variables_name_is_not_shown(load):
    with pytest.raises(UserError, match="key_variable.*environment variable") as caught:
        load(setting("perturb", chat(key_variable=f"sk-{SECRET}")))
    assert SECRET not in str(caught.value)


def test_what_only_looks_like_a_credential_passes(load):
    extra = {"stop_token_ids": [1], "eos_token": "</s>", "min_tokens": 3, "seed": 1, "user": "me",
             "token": "${A}", "prompt_cache_key": "a", "keys": ["b"], "api_key": None,
             "reasoning_effort": "low", "author": "c", "monkey": "d"}  # fmt: skip
    found = load(setting("perturb", chat(extra=extra)))
    assert found.perturb[0].rewriting.extra == extra


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
    load(setting("storage", uri))
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


def test_an_override_that_is_no_yaml_is_not_repeated(load, tmp_path):
    load()
    with pytest.raises(UserError, match="not valid YAML") as caught:
        Document(str(tmp_path / "recipe.yaml"), [f"a.token=[{SECRET}"])
    assert SECRET not in str(caught.value)


def test_a_password_in_an_address_is_in_no_line_that_is_kept():
    """Whatever fails may name the address that it was given: a proxy's, a store's."""
    said = "407, url='http://ann:secret@proxy:3128/x'"
    assert hide_values(said) == "407, url='http://***@proxy:3128/x'"
