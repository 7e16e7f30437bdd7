"""Students of model types that name their sizes in their own way."""

import json

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer

from pipeline.plan.graph import build_graph
from pipeline.plan.plan import make_plan
from pipeline.run.runner import check_nodes
from pipeline.store.artifacts import ArtifactStore
from stages.encoder.model import load_encoder, load_for_inference
from stages.encoder.settings import EncoderSettings
from stages.encoder.source import EncoderSource
from stages.encoder.tokenizer import load_tokenizer, save_tokenizer
from stages.errors import UserError
from stages.export.card import model_card
from stages.export.folder import REBUILT, export_student
from stages.export.running import load_folder
from stages.recipe import Recipe
from stages.train.engine import cpu_copy
from stages.train.student import save_encoder
from tests.support.here import make_here
from tests.support.models import byte_tokenizer, make_model, make_sentences
from tests.support.pipelines import make_decoder
from tests.support.recipes import tiny


def test_a_distilbert_is_cut_saved_and_exported(tmp_path):
    """Its config.json has `dim` and `n_layers`."""
    model = make_model(tmp_path / "model", kind="DistilBert", layers=3, width=32)
    settings = EncoderSettings(
        model=str(model), pooling="mean", layers=2, max_length=24, device="cpu"
    )
    source = EncoderSource(settings)
    source.check()
    assert source.width() == 32
    with pytest.raises(UserError, match="has only 3"):
        EncoderSource(settings.model_copy(update={"layers": 4})).check()
    encoder = load_encoder(settings)
    save_encoder(encoder, cpu_copy(encoder), tmp_path / "trained")
    tokenizer = load_tokenizer(EncoderSettings(model=str(tmp_path / "trained"), max_length=24))
    export_student(tmp_path / "trained", tokenizer, 24, "card", tmp_path / "student")
    student = SentenceTransformer(str(tmp_path / "student"), device="cpu")
    texts = make_sentences(20)
    np.testing.assert_allclose(student.encode(texts), encoder.encode_unit(texts), atol=1e-5)
    assert student.get_sentence_embedding_dimension() == 32


def test_mask_pooling_of_a_tokenizer_whose_ids_have_gaps(tmp_path):
    model = make_model(tmp_path / "model", vocab_size=80)
    file = model / "tokenizer.json"
    rust = json.loads(file.read_text())
    old = rust["model"]["vocab"]["[MASK]"]
    rust["model"]["vocab"]["[MASK]"] = 79
    for one in rust["added_tokens"]:
        one["id"] = 79 if one["id"] == old else one["id"]
    file.write_text(json.dumps(rust))
    settings = EncoderSettings(
        model=str(model), pooling="mask", template="a {sentence} is {mask} .", max_length=24,
        device="cpu",
    )  # fmt: skip
    encoder = load_encoder(settings)
    save_encoder(encoder, cpu_copy(encoder), tmp_path / "trained")
    export_student(tmp_path / "trained", encoder.tokenizer, 24, "card", tmp_path / "student")
    student = SentenceTransformer(str(tmp_path / "student"), device="cpu")
    texts = make_sentences(20)
    np.testing.assert_allclose(student.encode(texts), encoder.encode_unit(texts), atol=1e-5)


def test_a_decoder_that_pools_its_last_token_is_trained_and_exported(tmp_path, teacher_folder):
    """It is causal and padded on the left; sentence-transformers and ONNX see the same vectors."""
    model = make_decoder(tmp_path / "model")
    raw = tiny(tmp_path, teacher_folder, model)
    raw["student"] |= {"pooling": "last", "layers": 1}
    raw["train"]["objectives"] = {"listnet": {}}
    raw["evaluate"]["speed"] = False
    recipe = Recipe.model_validate(raw)
    make_here(recipe)
    plan = make_plan(recipe)
    folder = ArtifactStore(recipe.storage).open(plan.folders["export"]).folder_path("model")
    student = SentenceTransformer(str(folder), device="cpu")
    texts = [*make_sentences(20), "short"]
    ours = load_for_inference(EncoderSettings(model=str(folder), max_length=48, device="cpu"))
    found = student.encode(texts)
    np.testing.assert_allclose(found, ours.encode_unit(texts), atol=1e-5)
    np.testing.assert_allclose(found[-1], student.encode(texts[-1]), atol=1e-5)  # without padding
    assert student.tokenizer.padding_side == "left"
    before = load_for_inference(
        EncoderSettings(model=str(model), layers=1, pooling="last", max_length=48, device="cpu")
    )
    assert np.abs(found - before.encode_unit(texts)).max() > 0.01


def exported(settings, folder):
    """An encoder as if it had been trained, and the folder of it."""
    encoder = load_encoder(settings)
    save_encoder(encoder, cpu_copy(encoder), folder / "trained")
    trained = settings.model_copy(update={"model": str(folder / "trained"), "layers": None})
    export_student(folder / "trained", load_tokenizer(trained), 24, "card", folder / "student")
    return encoder, folder / "student"


def make_gpt2(folder, beyond):
    """Absolute positions, no padding token, and a tokenizer that pads on the left.

    beyond: whether its first special token has no row among the embeddings.
    """
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = None
    rows = len(tokenizer)
    if beyond:
        tokenizer.add_special_tokens({"bos_token": "<start>"})
    tokenizer.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.save_pretrained(folder)
    sizes = dict(n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=1)
    GPT2Model(GPT2Config(vocab_size=rows, **sizes)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("beyond", [False, True])
def test_a_decoder_without_a_padding_token_can_be_used(tmp_path, beyond):
    """sentence-transformers pads with nothing else, and gives no positions where padding ends."""
    model = make_gpt2(tmp_path / "model", beyond)
    about = json.loads((model / "tokenizer_config.json").read_text())
    assert about.get("pad_token") is None and about["padding_side"] == "left"
    settings = EncoderSettings(model=str(model), pooling="last", max_length=24, device="cpu")
    encoder, folder = exported(settings, tmp_path)
    trained = json.loads((tmp_path / "trained/tokenizer_config.json").read_text())
    assert trained.get("pad_token") is None  # a token that becomes special reads texts otherwise
    student = SentenceTransformer(str(folder), device="cpu")
    texts = [*make_sentences(20), "short"]
    np.testing.assert_allclose(student.encode(texts), encoder.encode_unit(texts), atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_long_text_is_cut_where_the_tokenizer_cuts_it(tmp_path, side):
    model = make_model(tmp_path / "model")
    AutoTokenizer.from_pretrained(model, truncation_side=side).save_pretrained(model)
    settings = EncoderSettings(model=str(model), pooling="mean", max_length=24, device="cpu")
    encoder, folder = exported(settings, tmp_path)
    student = SentenceTransformer(str(folder), device="cpu")
    texts = [" ".join(make_sentences(6, seed)) for seed in range(3)]
    np.testing.assert_allclose(student.encode(texts), encoder.encode_unit(texts), atol=1e-5)


def test_no_truncation_is_left_in_the_tokenizers_file(tmp_path):
    """That of the training's own sets, for whoever reads the file alone."""
    model = make_model(tmp_path / "model")
    settings = EncoderSettings(model=str(model), pooling="mean", max_length=24, device="cpu")
    encoder = load_encoder(settings)
    encoder.encode(make_sentences(3))
    assert encoder.tokenizer.pretrained.backend_tokenizer.truncation
    save_tokenizer(encoder.tokenizer.pretrained, tmp_path / "saved")
    saved = json.loads((tmp_path / "saved/tokenizer.json").read_text())
    assert saved["truncation"] is None and saved["padding"] is None


def test_a_prompt_stands_before_an_empty_text_too(tmp_path):
    model = make_model(tmp_path / "model")
    settings = EncoderSettings(
        model=str(model), pooling="mean", max_length=24, device="cpu", prompt="the cat: "
    )
    encoder, folder = exported(settings, tmp_path)
    student = SentenceTransformer(str(folder), device="cpu")
    texts = ["", "a dog"]
    for way in (student.encode, student.encode_query, student.encode_document):
        np.testing.assert_allclose(way(texts), encoder.encode_unit(texts), atol=1e-5)


OWN = """
from transformers import BertConfig, BertModel

class OwnConfig(BertConfig):
    model_type = "own"

class OwnModel(BertModel):
    config_class = OwnConfig
"""


def test_a_model_with_code_of_its_own_is_exported_and_loaded(tmp_path):
    model = make_model(tmp_path / "model")
    (model / "own.py").write_text(OWN)
    config = json.loads((model / "config.json").read_text())
    auto = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
    config |= {"model_type": "own", "auto_map": auto, "architectures": ["OwnModel"]}
    (model / "config.json").write_text(json.dumps(config))
    settings = EncoderSettings(
        model=str(model), pooling="mean", max_length=24, device="cpu", trust_remote_code=True
    )
    encoder, folder = exported(settings, tmp_path)
    texts = make_sentences(5)
    found = load_folder(folder, trust_remote_code=True).encode(texts)
    np.testing.assert_allclose(found, encoder.encode_unit(texts), atol=1e-5)
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_folder(folder)


@pytest.mark.parametrize("trusts", [True, False])
def test_variants_and_card_trust_what_the_recipe_trusts(tmp_path, teacher_folder, trusts):
    raw = tiny(tmp_path, teacher_folder, make_model(tmp_path / "model"))
    raw["student"]["trust_remote_code"] = trusts
    raw["export"] = {"variants": ["bf16"]}
    graph = make_plan(Recipe.model_validate(raw)).graph
    assert graph["export"].stage.student.settings.trust_remote_code is trusts
    assert graph["export:bf16"].stage.trust_remote_code is trusts
    data = {"kept": 3, "read": 4, "rejected": {}}
    card = model_card("tiny", "name: tiny", data, False, trusts=trusts)
    assert ("trust_remote_code=True" in card) is trusts


def make_qwen2(folder):
    """A Qwen2 of bytes; transformers builds its tokenizer anew whenever it is loaded."""
    from transformers import Qwen2Config, Qwen2Model

    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=32, max_position_embeddings=96, pad_token_id=1,
    )  # fmt: skip
    Qwen2Model(config).save_pretrained(folder)
    return folder


LOST = [
    ({"template": "Text: {sentence}\nOne word:"}, "student.template"),
    ({"final_period": "promptbert"}, "student.final_period"),
]


@pytest.mark.parametrize(("around", "where"), LOST)
def test_what_transformers_drops_of_a_tokenizer_is_refused(tmp_path, around, where, teacher_folder):
    """Before anything is made; and where that is not known beforehand, at the export."""
    model = make_qwen2(tmp_path / "model")
    raw = tiny(tmp_path, teacher_folder, model)
    raw["student"] |= {"pooling": "last", **around}
    export = build_graph(Recipe.model_validate(raw)).nodes["export"]
    with pytest.raises(UserError, match=f"{where}: .* of a qwen2"):
        check_nodes([export])
    settings = EncoderSettings(
        model=str(model), pooling="last", max_length=64, device="cpu", **around
    )
    with pytest.raises(UserError, match="Qwen2Tokenizer. does not read .*final_period: keep"):
        exported(settings, tmp_path)


def test_a_template_that_such_a_tokenizer_keeps_is_exported(tmp_path, teacher_folder):
    model = make_qwen2(tmp_path / "model")
    around = {"pooling": "last", "template": 'This sentence : "{sentence}" means:'}
    raw = tiny(tmp_path, teacher_folder, model)
    raw["student"] |= around
    check_nodes([build_graph(Recipe.model_validate(raw)).nodes["export"]])
    settings = EncoderSettings(model=str(model), max_length=64, device="cpu", **around)
    encoder, folder = exported(settings, tmp_path)
    texts = ["A cat sleeps", "two men"]
    student = SentenceTransformer(str(folder), device="cpu")
    np.testing.assert_allclose(student.encode(texts), encoder.encode_unit(texts), atol=1e-5)


def test_the_model_types_are_known_whose_tokenizers_transformers_builds_anew():
    from transformers.models.auto import tokenization_auto as auto

    listed = getattr(auto, "MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS", set())
    classes = {kind: auto.TOKENIZER_MAPPING_NAMES.get(kind) for kind in listed}
    assert {kind for kind, name in classes.items() if name != "TokenizersBackend"} <= REBUILT
