"""Students of model types that name their sizes in their own way."""

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from pipeline.plan.plan import make_plan
from pipeline.store.artifacts import ArtifactStore
from stages.encoder.model import load_encoder, load_for_inference
from stages.encoder.settings import EncoderSettings
from stages.encoder.source import EncoderSource
from stages.encoder.tokenizer import load_tokenizer
from stages.errors import UserError
from stages.export.folder import export_student
from stages.recipe import Recipe
from stages.train.engine import cpu_copy
from stages.train.student import save_encoder
from tests.support.here import make_here
from tests.support.models import make_model, make_sentences
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
