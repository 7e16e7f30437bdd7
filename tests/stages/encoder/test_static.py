"""Students without layers: where their tables begin, what they compute, and how they are saved."""

import io
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Dense as ItsDense
from sentence_transformers.models import Normalize
from torch import nn

from stages.encoder.dense import Dense
from stages.encoder.model import load_encoder, load_for_inference
from stages.encoder.pipeline import PipelineEncoder
from stages.encoder.settings import EncoderSettings
from stages.encoder.source import EncoderSource
from stages.encoder.static import SMOOTHING, StaticEncoder
from stages.errors import UserError
from stages.tokens.stage import tokenizer_identity
from stages.tokens.tokeniser import Tokeniser
from stages.train.engine import cpu_copy
from stages.train.student import save_encoder
from stages.train.student_settings import StudentSettings
from tests.support.models import make_model, make_sentences
from tests.support.pipelines import make_pipeline, pooling


def test_its_tokens_are_not_those_of_a_student_with_layers(student_folder):
    """Which reads what its model's own files put around a sentence."""
    found = [
        tokenizer_identity(
            EncoderSource(StudentSettings(model=str(student_folder), layers=layers, dropout=0.0)),
            {},
        )
        for layers in (0, 1, 2)
    ]
    assert found[0] != found[1] == found[2]


@pytest.fixture
def static(student_folder):
    return load_encoder(
        EncoderSettings(
            model=str(student_folder), pooling="cls", layers=0, max_length=12, device="cpu"
        )
    )


def test_a_table_begins_with_each_token_alone_weighed_by_its_rank(static, student_folder):
    """Slow twin: one token at a time through transformers itself."""
    whole = load_encoder(
        EncoderSettings(model=str(student_folder), pooling="cls", max_length=12, device="cpu")
    )
    table = static.backbone.embedding.weight.detach()
    count = len(table)
    zipf = np.array([1 / (i + 2) for i in range(count)])
    zipf /= zipf.sum()
    rows = []
    for token in range(count):
        with torch.no_grad():
            states = whole.backbone(input_ids=torch.tensor([[2, token, 3]])).last_hidden_state
        rows.append(states[0, 0].numpy() * SMOOTHING / (SMOOTHING + zipf[token]))
    expected = np.array(rows) / np.linalg.norm(rows, axis=1).mean()
    np.testing.assert_allclose(table, expected, atol=1e-5)
    assert static.num_layers == 0 and static.num_parameters == table.numel()


def test_a_sentence_is_the_mean_of_its_own_tokens(static):
    texts = make_sentences(30)
    table = static.backbone.embedding.weight.detach().numpy()
    vectors = static.encode(texts)
    rust = static.tokenizer.pretrained.backend_tokenizer
    rust.no_truncation()
    for text, vector in zip(texts, vectors, strict=True):
        ids = rust.encode(text, add_special_tokens=False).ids[:10]  # room beside [CLS] and [SEP]
        np.testing.assert_allclose(vector, table[ids].mean(0), atol=1e-6)


def test_it_is_saved_as_a_static_embedding_with_its_map_inside(static, tmp_path):
    """It then reads all of a text, whatever training read."""
    static.dense.append(Dense(nn.Linear(32, 20, bias=False)))
    short = [" ".join(text.split()[:6]) for text in make_sentences(20)]
    expected = static.encode(short)
    save_encoder(static, cpu_copy(static), tmp_path / "saved")
    settings = EncoderSettings(model=str(tmp_path / "saved"), max_length=12, device="cpu")
    again = load_for_inference(settings)
    assert isinstance(again, PipelineEncoder) and again.num_layers == 0
    assert "WARNING" not in again.arithmetic
    np.testing.assert_allclose(again.encode(short), expected, atol=1e-5)
    theirs = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    (found,) = theirs.encode(["cat " * 50 + "dog " * 50])
    np.testing.assert_allclose(found, static.encode(["cat", "dog"]).mean(0), atol=1e-5)


@pytest.mark.parametrize("normalizes", [False, True])
def test_a_saved_table_is_computed_as_sentence_transformers_does(
    static, tmp_path, monkeypatch, normalizes
):
    """Whole windows and a last one, all of a text, its prompt, and texts without a token."""
    monkeypatch.setattr("stages.encoder.static.TEXTS_AT_ONCE", 7)
    save_encoder(static, cpu_copy(static), tmp_path / "saved")
    theirs = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    if normalizes:
        theirs.append(Normalize())
        theirs.save(str(tmp_path / "saved"))
    texts = [*make_sentences(23), "cat " * 50, "", " "]
    for prompt in ("", "the old man "):
        ours = load_for_inference(
            EncoderSettings(model=str(tmp_path / "saved"), prompt=prompt, device="cpu")
        )
        assert type(ours) is StaticEncoder
        expected = theirs.encode(texts, prompt=prompt)
        np.testing.assert_allclose(ours.encode(texts), expected, atol=1e-6)
        lengths = np.linalg.norm(expected[:23], axis=1)
        assert np.allclose(lengths, 1, atol=1e-5) == normalizes


def test_a_saved_table_with_another_versions_tokenizer_is_said(static, tmp_path):
    save_encoder(static, cpu_copy(static), tmp_path / "saved")
    (tmp_path / "saved" / "tokenizer.json").write_text('{"model": {"type": "Newer"}}')
    with pytest.raises(UserError, match="saved': cannot be loaded"):
        load_for_inference(EncoderSettings(model=str(tmp_path / "saved"), device="cpu"))


@pytest.mark.parametrize("what", ["a map behind it", "Model2Vec's names"])
def test_other_tables_are_sentence_transformers_own(static, tmp_path, what):
    save_encoder(static, cpu_copy(static), tmp_path / "saved")
    if what == "a map behind it":
        model = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
        model.append(ItsDense(32, 8))
        model.save(str(tmp_path / "saved"))
    else:
        file = tmp_path / "saved" / "model.safetensors"
        save_file({"embeddings": load_file(file)["embedding.weight"]}, file)
    again = load_for_inference(EncoderSettings(model=str(tmp_path / "saved"), device="cpu"))
    assert type(again) is PipelineEncoder
    assert again.encode(["cat"]).shape == (1, 8 if "map" in what else 32)


def test_a_text_without_tokens_is_no_reason_to_stop(static):
    assert static.encode([" ", ""]).tolist() == [[0.0] * 32] * 2


def test_what_its_model_puts_around_a_sentence_is_left_out(tmp_path):
    """The whole model has a prompt by default; only its table begins with that."""
    prompts = {"query": "the old man sees "}
    folder = make_pipeline(tmp_path, pooling("mean"), prompts=prompts, default_prompt_name="query")
    options = dict(model=str(folder), max_length=12, device="cpu")
    table = load_encoder(EncoderSettings(**options, layers=0))
    assert table.tokenizer.lead == "" and table.settings.prompt is None
    save_encoder(table, cpu_copy(table), tmp_path / "saved")
    theirs = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    np.testing.assert_allclose(theirs.encode(["cat dog"]), table.encode(["cat dog"]), atol=1e-5)


def test_ids_may_have_gaps(tmp_path):
    """Some tokenizers number their last tokens past their own count."""
    folder = make_model(tmp_path / "model", vocab_size=60)
    rust = json.loads((folder / "tokenizer.json").read_text())
    rust["model"]["vocab"]["near"] = 59
    (folder / "tokenizer.json").write_text(json.dumps(rust))
    table = load_encoder(
        EncoderSettings(model=str(folder), pooling="mean", layers=0, max_length=12, device="cpu")
    )
    assert np.isfinite(table.encode(["near"])).all()


def test_ids_beyond_16_bits_though_there_are_few(tmp_path):
    folder = make_model(tmp_path / "model", vocab_size=70_000)
    rust = json.loads((folder / "tokenizer.json").read_text())
    rust["model"]["vocab"]["near"] = 69_999
    (folder / "tokenizer.json").write_text(json.dumps(rust))
    settings = EncoderSettings(model=str(folder), pooling="mean", max_length=12, device="cpu")
    ids = np.load(io.BytesIO(Tokeniser([settings])(["near"])["ids.npy"]))
    assert ids.max() == 69_999


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(template="a {sentence}"), "leave template out"),
        (dict(prompt="query: "), "leave prompt out"),
        (dict(final_period="sncse"), "leave final_period out"),
        (dict(freeze_embeddings=True), "nothing but embeddings"),
        (dict(freeze_layers=1), "nothing but embeddings"),
        (dict(dropout=0.1), "has no dropout"),
        (dict(layers=-1), "give how many, such as 3"),
    ],
)
def test_a_table_has_no_place_for_context(options, message):
    with pytest.raises(ValueError, match=message):
        StudentSettings(**({"model": "any", "layers": 0} | options))
