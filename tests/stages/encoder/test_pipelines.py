"""Teachers as sentence-transformers has them: all modules and prompts, by our encoder or by it."""

import json
import shutil
from functools import partial
from io import BytesIO

import numpy as np
import pytest
from torch import nn

from stages.embed.embedder import Embedder
from stages.encoder.config import resolved
from stages.encoder.dense import Dense
from stages.encoder.model import Encoder, load_encoder, load_for_inference
from stages.encoder.pipeline import PipelineEncoder
from stages.encoder.settings import EncoderSettings, describe_model
from stages.encoder.source import EncoderSource
from stages.encoder.tokenizer import load_tokenizer
from stages.errors import UserError
from stages.export.folder import export_student
from stages.ranks.similarity import load_student
from stages.rows import unit_rows
from stages.train.engine import cpu_copy
from stages.train.student import save_encoder
from stages.train.student_settings import StudentSettings, check_widths
from tests.support.hub import put_on_hub
from tests.support.models import make_model, make_sentences
from tests.support.pipelines import (
    dense,
    make_decoder,
    make_pipeline,
    make_router,
    normalize,
    pooling,
)

MAX_LENGTH = 10
TEXTS = make_sentences(30)
PROMPTS = {"query": "the old man sees ", "document": ""}


def expected(folder, **options):
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu")
    model.max_seq_length = MAX_LENGTH
    return unit_rows(model.encode(TEXTS, **options))


def settings_of(folder, **options):
    return EncoderSettings(
        model=str(folder), max_length=MAX_LENGTH, tokens_per_batch=64, device="cpu", **options
    )


OURS = {
    "mean": [pooling("mean"), normalize],
    "cls": [pooling("cls")],
    "last": [pooling("lasttoken")],
    "Dense, tanh": [pooling("cls"), dense(16), normalize],
    "Dense, plain": [pooling("mean"), dense(48, bias=False, activation_function=nn.Identity())],
    "two Dense": [
        pooling("mean"), dense(48, activation_function=nn.Identity()), dense(8, 48), normalize,
    ],
}  # fmt: skip
THEIRS = {
    "max": [pooling("max")],
    "weighted mean": [pooling("weightedmean"), normalize],
    "scaled mean": [pooling("mean_sqrt_len_tokens")],
    "two poolings": [pooling(("cls", "mean")), dense(16, 64)],
    "normalised before Dense": [pooling("mean"), normalize, dense(16)],
    "another activation": [pooling("mean"), dense(16, activation_function=nn.ReLU())],
    "residual": [pooling("mean"), dense(16, use_residual=True)],
    "to other features": [pooling("mean"), dense(16, module_output_name="other")],
    "prompt left out": [pooling("mean", include_prompt=False)],
}


@pytest.mark.parametrize("modules", OURS.values(), ids=OURS)
def test_our_encoder_computes_the_usual_modules(tmp_path, modules):
    folder = make_pipeline(tmp_path, *modules)
    encoder = load_for_inference(settings_of(folder))
    assert isinstance(encoder, Encoder)
    np.testing.assert_allclose(encoder.encode_unit(TEXTS), expected(folder), atol=1e-5)


@pytest.mark.parametrize("modules", THEIRS.values(), ids=THEIRS)
def test_sentence_transformers_computes_all_others(tmp_path, modules):
    """Loudly, as that is slower; the prompt matters to one of them."""
    folder = make_pipeline(tmp_path, *modules, prompts=PROMPTS, default_prompt_name="query")
    encoder = load_for_inference(settings_of(folder))
    assert isinstance(encoder, PipelineEncoder)
    assert encoder.arithmetic.startswith("WARNING: computed by sentence-transformers")
    assert encoder.num_layers == 2 and encoder.num_parameters > 10_000
    found = encoder.encode_unit(TEXTS)
    np.testing.assert_allclose(found, expected(folder), atol=1e-5)
    assert found.shape[1] == encoder.dimension
    assert not np.allclose(found, expected(folder, prompt=""), atol=1e-3)


def make_chatty(folder):
    """A decoder whose tokenizer has a chat template, through which every text is read."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(make_decoder(folder))
    tokenizer.chat_template = (
        "{% for one in messages %}the man says : {{ one['content'] if one['content'] is string "
        "else one['content'][0]['text'] }}{% endfor %}"
    )
    tokenizer.save_pretrained(folder)
    return folder


def test_a_chat_template(tmp_path):
    """A model that was saved before there were modalities reads texts as they are."""
    folder = make_pipeline(tmp_path, pooling("lasttoken"), model=make_chatty)
    encoder = load_for_inference(settings_of(folder))
    assert "has a chat template" in encoder.arithmetic
    # what was made when that was not looked at is another artifact
    assert "a chat template" in EncoderSource(settings_of(folder)).identity({})["encoder.computed"]
    np.testing.assert_allclose(encoder.encode_unit(TEXTS), expected(folder), atol=1e-5)
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 12}')
    plain = load_for_inference(settings_of(folder))
    assert isinstance(plain, Encoder)
    np.testing.assert_allclose(plain.encode_unit(TEXTS), expected(folder), atol=1e-5)
    assert np.abs(plain.encode_unit(TEXTS) - encoder.encode_unit(TEXTS)).max() > 1e-3


@pytest.mark.parametrize(
    "option",
    [
        {"processing_kwargs": {"text": {"add_special_tokens": False}}},
        {"config_args": {"num_hidden_layers": 1}},
        {"tokenizer_args": {"truncation_side": "left"}},
    ],
    ids=lambda option: next(iter(option)),
)
def test_options_of_the_transformer_module(tmp_path, option):
    folder = make_pipeline(tmp_path, pooling("mean"))
    file = folder / "sentence_bert_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | option))
    encoder = load_for_inference(settings_of(folder))
    assert f"has {next(iter(option))}" in encoder.arithmetic
    assert "encoder.computed" in EncoderSource(settings_of(folder)).identity({})
    np.testing.assert_allclose(encoder.encode_unit(TEXTS), expected(folder), atol=1e-5)


@pytest.mark.parametrize("is_static", [False, True])
def test_vectors_that_a_models_own_files_cut(tmp_path, is_static):
    from sentence_transformers import SentenceTransformer, models
    from transformers import AutoTokenizer

    folder = make_pipeline(tmp_path, pooling("mean"))
    if is_static:
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "bare").backend_tokenizer
        table = models.StaticEmbedding(tokenizer, embedding_dim=24)
        SentenceTransformer(modules=[table], device="cpu").save(str(folder := tmp_path / "static"))
    file = folder / "config_sentence_transformers.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"truncate_dim": 16}))
    settings = settings_of(folder)
    assert EncoderSource(settings).width() is None
    encoder = load_for_inference(settings)
    assert encoder.dimension == 16
    model = SentenceTransformer(str(folder), device="cpu")
    if not is_static:
        model.max_seq_length = MAX_LENGTH
    theirs = unit_rows(model.encode(TEXTS))
    np.testing.assert_allclose(encoder.encode_unit(TEXTS), theirs, atol=1e-5)


def test_what_sentence_transformers_computed_before_is_found_again(tmp_path):
    """An option that is looked at now changes nothing where it computed the whole already."""
    folder = make_pipeline(tmp_path, pooling("max"))
    before = EncoderSource(settings_of(folder)).identity({}).keys()
    file = folder / "config_sentence_transformers.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"truncate_dim": 16}))
    assert EncoderSource(settings_of(folder)).identity({}).keys() == before
    (tmp_path / "bare" / "chat_template.jinja").write_text("{{ messages }}")  # nobody reads it
    plain = EncoderSource(settings_of(tmp_path / "bare", pooling="mean"))
    there = plain.identity({})
    (tmp_path / "bare" / "chat_template.jinja").unlink()
    assert plain.identity({}) == there


def test_a_decoder_with_left_padding_and_its_last_token(tmp_path):
    """Qwen3-Embedding's way, with a prompt whose end joins the sentence."""
    prompts = {"query": "the cat:"}
    folder = make_pipeline(
        tmp_path, pooling("lasttoken"), normalize, model=make_decoder, prompts=prompts
    )
    encoder = load_for_inference(settings_of(folder, prompt_name="query"))
    assert isinstance(encoder, Encoder)
    np.testing.assert_allclose(
        encoder.encode_unit(TEXTS), expected(folder, prompt_name="query"), atol=1e-5
    )
    few = load_encoder(settings_of(folder, layers=[1], pooling="last"))
    assert few.encode(TEXTS).shape == (30, 32)


def test_a_static_table(tmp_path):
    from sentence_transformers import SentenceTransformer, models
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(make_model(tmp_path / "bare"))
    table = models.StaticEmbedding(tokenizer.backend_tokenizer, embedding_dim=24)
    SentenceTransformer(modules=[table], device="cpu").save(str(tmp_path / "static"))
    settings = settings_of(tmp_path / "static")
    EncoderSource(settings).check()
    embed = Embedder(settings)
    found = np.load(BytesIO(embed(TEXTS)["factors.npy"]))
    theirs = SentenceTransformer(str(tmp_path / "static"), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(found, unit_rows(theirs), atol=1e-3)
    assert found.dtype == np.float16


@pytest.mark.parametrize(
    ("options", "theirs"),
    [
        ({}, {}),
        ({"prompt_name": "document"}, {"prompt_name": "document"}),
        ({"prompt": ""}, {"prompt": ""}),
        ({"prompt": "a red house: "}, {"prompt": "a red house: "}),
        ({"prompt_name": "query", "pooling": "mean"}, {"prompt_name": "query"}),
    ],
)
def test_prompts_by_name_and_text(tmp_path, options, theirs):
    folder = make_pipeline(tmp_path, pooling("mean"), prompts=PROMPTS, default_prompt_name="query")
    found = load_for_inference(settings_of(folder, **options)).encode_unit(TEXTS)
    np.testing.assert_allclose(found, expected(folder, **theirs), atol=1e-5)


def test_arguments_reach_encode(tmp_path):
    folder = make_router(tmp_path)
    for task in ("query", "document"):
        encoder = load_for_inference(settings_of(folder, encode_arguments={"task": task}))
        np.testing.assert_allclose(
            encoder.encode_unit(TEXTS), expected(folder, task=task), atol=1e-5
        )
    nonsense = settings_of(folder, encode_arguments={"nonsense": 1})
    with pytest.raises(UserError, match="encode with {'nonsense': 1} fails"):
        load_for_inference(nonsense).encode(TEXTS)


def test_arguments_are_for_sentence_transformers_whatever_we_know(tmp_path):
    settings = settings_of(
        make_pipeline(tmp_path, pooling("mean")), encode_arguments={"task": "query"}
    )
    assert resolved(settings).pooling == "pipeline"
    with pytest.raises(ValueError, match="encode_arguments: truncate_dim is not free"):
        settings_of("any", encode_arguments={"truncate_dim": 4})


def test_the_weights_of_every_module_are_part_of_the_fingerprint(tmp_path):
    folder = make_pipeline(tmp_path, pooling("mean"), dense(16))
    named = describe_model(settings_of(folder))["files"]
    assert {"2_Dense/model.safetensors", "2_Dense/config.json", "modules.json"} <= named.keys()
    (folder / "2_Dense").rename(folder / "map")
    change_modules(folder, 2, path="map")
    assert "map/model.safetensors" in describe_model(settings_of(folder))["files"]
    named = describe_model(settings_of(folder))["files"]
    (folder / "model.bf16.safetensors").write_bytes(b"a variant, which nobody reads here")
    assert describe_model(settings_of(folder))["files"] == named
    router = describe_model(settings_of(make_router(tmp_path / "router")))["files"]
    assert sum(name.endswith("model.safetensors") for name in router) == 2


def test_a_default_prompt_is_part_of_the_identity(tmp_path):
    """The same files once gave other vectors: the prompt was left out."""
    folder = make_pipeline(tmp_path, pooling("mean"), prompts=PROMPTS, default_prompt_name="query")
    assert EncoderSource(settings_of(folder)).identity({})["encoder.prompt"] == PROMPTS["query"]
    for options in ({"prompt": ""}, {"pooling": "mean"}, {"layers": 0}):
        found = EncoderSource(settings_of(folder, **options)).identity({})
        assert not found.get("encoder.prompt")


def change_modules(folder, place, **values):
    modules = json.loads((folder / "modules.json").read_text())
    modules[place] |= values
    (folder / "modules.json").write_text(json.dumps(modules))


def change(folder, file, **values):
    config = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
    (folder / file).write_text(json.dumps(config | values))


def pickled_dense(folder):
    (folder / "2_Dense" / "model.safetensors").rename(folder / "2_Dense" / "pytorch_model.bin")


def other_width(folder):
    change(folder, "2_Dense/config.json", out_features=17)


def own_code(folder):
    change_modules(folder, -1, type="custom.Dense16")


def own_transformer(folder):
    change_modules(folder, 0, type="custom_st.Transformer")


def pickle_elsewhere(folder):
    (folder / "2_Dense").rename(folder / "map")
    change_modules(folder, 2, path="map")
    (folder / "map" / "model.safetensors").rename(folder / "map" / "pytorch_model.bin")


def no_json(folder):
    (folder / "modules.json").write_text("[{")


def no_path(folder):
    (folder / "modules.json").write_text('[{"idx": 0, "type": "a.Transformer"}]')


def no_list(folder):
    (folder / "modules.json").write_text('{"a": 1}')


def no_object(folder):
    (folder / "config.json").write_text("[]")


def no_dense_config(folder):
    (folder / "2_Dense" / "config.json").unlink()


def own_template(folder):
    (folder / "sentray.json").write_text('{"pooling": "mean", "template": "a {sentence}"}')


def nothing_of_pooling(folder):
    (folder / "sentray.json").write_text('{"template": null}')


def no_pipeline(folder):
    (folder / "modules.json").unlink()


@pytest.mark.parametrize(
    ("damage", "options", "message"),
    [
        (None, {"prompt_name": "quarry"}, "it has no prompt 'quarry'; it has: document, query"),
        (None, {"prompt": " ".join(["cat"] * 9)}, "takes 9 tokens, which leaves none of max_len"),
        (None, {"pooling": "pipeline", "layers": [0]}, "pooling: pipeline .* `layers` has no eff"),
        (None, {"pooling": "pipeline", "layers": 0}, "whole of it, so `layers` has no effect"),
        (None, {"pooling": "pipeline", "template": "a {sentence}"}, "`template` has no effect"),
        (pickled_dense, {}, r"only there as a pickle \(2_Dense/pytorch_model.bin\)"),
        (other_width, {}, "2_Dense: the weights are not those of its config.json"),
        (pickle_elsewhere, {}, r"only there as a pickle \(map/pytorch_model.bin\)"),
        (own_code, {}, "custom.Dense16 is Python code .* set trust_remote_code"),
        (own_transformer, {}, "custom_st.Transformer is Python code"),
        (no_json, {}, "modules.json: not readable as JSON"),
        (no_path, {}, "modules.json: not readable, as it holds no list of modules"),
        (no_list, {}, "modules.json: not readable, as it holds no list of modules"),
        (no_object, {}, "config.json: not readable, as it holds no JSON object"),
        (no_dense_config, {}, "2_Dense: no config.json of a Dense module"),
        (own_template, {"prompt": "b "}, "leave prompt out here"),
        (nothing_of_pooling, {}, "does not say how to pool"),
        (no_pipeline, {"pooling": "pipeline"}, "it has no modules.json"),
    ],
)
def test_what_cannot_be_used_is_said(tmp_path, damage, options, message):
    folder = make_pipeline(tmp_path, pooling("mean"), dense(16), prompts=PROMPTS)
    if damage:
        damage(folder)
    with pytest.raises(UserError, match=message):
        load_for_inference(settings_of(folder, **options))


def test_what_goes_wrong_in_hours_is_said_at_once(tmp_path):
    """Before any torch: prompts and modules are looked at by `check`."""
    folder = make_pipeline(tmp_path, pooling("max"), prompts=PROMPTS)
    with pytest.raises(UserError, match="no prompt"):
        EncoderSource(settings_of(folder, prompt_name="x")).check()
    with pytest.raises(UserError, match="`layers` has no effect"):
        EncoderSource(settings_of(folder, layers=1)).check()
    assert resolved(settings_of(folder)).pooling == "pipeline"
    shutil.rmtree(folder / "1_Pooling")
    with pytest.raises(UserError, match="does not say how to pool"):
        EncoderSource(settings_of(folder)).check()


@pytest.mark.parametrize(
    ("modules", "options"),
    [
        ([pooling("cls"), dense(16), dense(8, 16, activation_function=nn.Identity())], {}),
        ([pooling("mean"), dense(16)], dict(pooling="mask", template='"{sentence}" {mask}')),
        ([pooling("lasttoken")], dict(final_period="promptbert")),
    ],
    ids=["Dense", "mask", "last"],
)
def test_what_is_trained_is_exported_with_all_its_modules(tmp_path, modules, options):
    """Through the training's folder into sentence-transformers' and back."""
    folder = make_pipeline(tmp_path, *modules, prompts=PROMPTS, default_prompt_name="query")
    start = load_encoder(settings_of(folder, **options))
    if options.get("pooling"):  # replaces the pipeline, Dense included; here is a new one
        start.dense.append(Dense(nn.Linear(32, 48)))
    save_encoder(start, cpu_copy(start), tmp_path / "trained")
    ours = settings_of(tmp_path / "trained")
    tokenizer = load_tokenizer(ours)
    export_student(tmp_path / "trained", tokenizer, MAX_LENGTH, "card", tmp_path / "student")
    before = start.encode_unit(TEXTS)
    for model in (tmp_path / "trained", tmp_path / "student"):
        encoder = load_for_inference(settings_of(model))
        assert isinstance(encoder, Encoder)
        np.testing.assert_allclose(encoder.encode_unit(TEXTS), before, atol=1e-5)
    np.testing.assert_allclose(expected(tmp_path / "student"), before, atol=1e-5)


class StaticTraining:
    def output_config(self):
        return {"num_hidden_layers": 0}


def test_a_recipes_table_has_no_positions_and_no_layers():
    settings = settings_of("recipe:x.yaml").model_copy(update={"max_length": 5000})
    EncoderSource(settings, StaticTraining()).check()
    with pytest.raises(UserError, match="no layers to keep or to train"):
        EncoderSource(settings_of("recipe:x.yaml", layers=2), StaticTraining()).check()


def test_what_cannot_be_trained_is_said(tmp_path):
    folder = make_pipeline(tmp_path, pooling("mean"), dense(16, activation_function=nn.ReLU()))
    student = StudentSettings(model=str(folder))
    with pytest.raises(UserError, match="Dense module with .*ReLU, which cannot be trained here"):
        EncoderSource(student).check()
    EncoderSource(student.model_copy(update={"pooling": "mean"})).check()
    with pytest.raises(UserError, match="student.dimensions: 64 is more than the 32"):
        check_widths([8, 64], 32)
    with pytest.raises(ValueError, match="'pipeline' cannot be trained"):
        StudentSettings(model=str(folder), pooling="pipeline")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty cache of the Hugging Face hub; returns what puts a folder there under an id."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))

    return partial(put_on_hub, tmp_path / "hub")


@pytest.mark.parametrize("way", ["mean", "max"])
def test_a_model_of_the_hub_is_read_from_its_cache(tmp_path, hub, way):
    """Pooling, Dense and prompt by its own files, computed by us or by sentence-transformers."""
    folder = make_pipeline(
        tmp_path, pooling(way), dense(16), prompts=PROMPTS, default_prompt_name="query"
    )
    hub("tiny/whole", folder)
    encoder = load_for_inference(settings_of("tiny/whole"))
    assert isinstance(encoder, {"mean": Encoder, "max": PipelineEncoder}[way])
    np.testing.assert_allclose(encoder.encode_unit(TEXTS), expected(folder), atol=1e-5)


@pytest.mark.parametrize("most", [24, 10**6])
def test_as_many_tokens_are_read_as_sentence_transformers_reads(tmp_path, hub, most):
    """Which has it in one file or another, or no bound but the model's 64 positions."""
    from sentence_transformers import SentenceTransformer

    older = make_pipeline(tmp_path / "older", pooling("mean"))
    (older / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": min(most, 64)}))
    model = SentenceTransformer(str(older), device="cpu")
    model.max_seq_length = most
    model.save(str(tmp_path / "newer"))
    hub("tiny/newer", tmp_path / "newer")
    for name in (older, tmp_path / "newer", "tiny/newer"):
        assert load_student(name).encoder.settings.max_length == min(most, 64)


def test_a_model_that_is_not_in_the_cache_is_said_to_be_missing(tmp_path, hub):
    with pytest.raises(UserError, match="'tiny/none': not in the Hugging Face cache"):
        EncoderSource(settings_of("tiny/none")).check()
    (tmp_path / "empty").mkdir()
    hub("tiny/empty", tmp_path / "empty")
    with pytest.raises(UserError, match="'tiny/empty': not in the .*no model in its folder"):
        EncoderSource(settings_of("tiny/empty")).check()
