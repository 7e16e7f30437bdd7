"""An encoder under test, without a run around it."""

from pathlib import Path
from types import SimpleNamespace

from stages.encoder.model import load_for_inference
from stages.encoder.modules import normalizes
from stages.encoder.settings import EncoderSettings
from stages.evaluate.base import Tested

SILENT = SimpleNamespace(say=lambda *_, **__: None)  # a test's `work`


def encoder_of(folder: Path) -> Tested:
    """Of a sentence-transformers folder."""
    settings = EncoderSettings(model=str(folder), pooling="auto", max_length=32, device="cpu")
    encoder = load_for_inference(settings)
    returned = None if normalizes(folder) else encoder.encode
    return Tested(encoder.encode_unit, encoder, pooled=encoder.encode, returned=returned)
