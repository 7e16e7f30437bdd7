"""Students of model types that name their sizes in their own way."""

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from stages.encoder.model import load_encoder
from stages.encoder.settings import EncoderSettings
from stages.encoder.source import EncoderSource
from stages.encoder.tokenizer import load_tokenizer
from stages.errors import UserError
from stages.export.folder import export_student
from stages.train.engine import cpu_copy
from stages.train.student import save_encoder
from tests.support.models import make_model, make_sentences


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
