"""A model computed by sentence-transformers itself, where our own encoder does not know a module.

It cannot be trained here.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stages.encoder.config import described_in
from stages.encoder.cpu import cast_weights
from stages.encoder.files import model_folder
from stages.encoder.hub import hub_folder
from stages.encoder.modules import read_pipeline
from stages.encoder.settings import EncoderSettings
from stages.encoder.tokenizer import readable_errors
from stages.errors import UserError
from stages.kinds import Kind, Kinds, rows_of_kinds
from stages.rows import unit_rows

# Of a model on the hub: weights as pickles, and for others than torch
UNWANTED = ["*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt", "*.h5", "*.msgpack", "*.ot", "*.onnx",
            "onnx/*", "openvino/*"]  # fmt: skip


def pipeline_folder(settings: EncoderSettings) -> Path:
    """The model's folder, or the hub's files without pickles, which would be read where a module
    has nothing else."""
    return model_folder(settings.model) or hub_folder(
        settings.model, settings.commit, unwanted=UNWANTED
    )


class PipelineEncoder:
    """Texts to vectors, as `Encoder` gives them.

    Args:
        settings: as `resolved` gives them.

    Raises:
        UserError: no such model, or code of its own that is not trusted.
    """

    def __init__(self, settings: EncoderSettings, device: torch.device, dtype: torch.dtype) -> None:
        from sentence_transformers import SentenceTransformer

        folder = pipeline_folder(settings)
        with readable_errors(settings.model):
            self._model = SentenceTransformer(
                str(folder),
                trust_remote_code=settings.trust_remote_code,
                device=str(device),
                model_kwargs={"use_safetensors": True},
            )
        cast_weights(self._model, dtype)
        with suppress(AttributeError):  # some have no such setting
            self._model.max_seq_length = settings.max_length
        self.settings = settings
        self.device = device
        self.num_parameters = sum(p.numel() for p in self._model.parameters())
        config = getattr(getattr(self._model[0], "auto_model", None), "config", None)
        self.num_layers = int(getattr(config, "num_hidden_layers", None) or 0)
        self.dimension = self.encode(["a"]).shape[1]  # a module may say another one
        unknown = read_pipeline(described_in(settings)).unknown
        self.arithmetic = "computed by sentence-transformers"
        if unknown and self.num_layers:  # others have nothing that we could make faster
            self.arithmetic = (
                "WARNING: computed by sentence-transformers, not by our own faster encoder, as it "
                f"has {unknown}"
            )

    def encode(
        self,
        texts: Sequence[str],
        kinds: Kinds = None,
        count: Callable[[int, int], None] | None = None,
    ) -> np.ndarray:
        """Vectors (N, D) float32 of `texts`, in order. `count` is told nothing."""
        groups = rows_of_kinds(kinds, len(texts))
        if len(groups) < 2:
            return self._encode_kind(texts, next(iter(groups), None))
        found = {k: self._encode_kind([texts[i] for i in rows], k) for k, rows in groups.items()}
        out = np.empty((len(texts), next(iter(found.values())).shape[1]), dtype=np.float32)
        for kind, rows in groups.items():
            out[rows] = found[kind]
        return out

    def _encode_kind(self, texts: Sequence[str], kind: Kind | None) -> np.ndarray:
        settings = self.settings
        model: Any = self._model  # whose overloads know no further arguments
        # by kind, as a model may send them different ways (Router), unless it is told the way
        way = "encode" if kind is None or "task" in settings.encode_arguments else f"encode_{kind}"
        options = {
            "prompt": self._prompt(kind),
            "batch_size": max(1, settings.batch_tokens(self.device.type) // settings.max_length),
            "show_progress_bar": False,
        }
        try:
            found = getattr(model, way)(list(texts), **options, **settings.encode_arguments)
        except (TypeError, ValueError) as error:
            if not settings.encode_arguments:
                raise
            raise UserError(
                f"model '{settings.model}': encode with {settings.encode_arguments} fails ({error})"
            ) from error
        return np.asarray(found, dtype=np.float32)

    def _prompt(self, kind: Kind | None) -> str:
        prompt = self.settings.prompts.get(kind) if kind else None
        return (self.settings.prompt or "") if prompt is None else prompt

    def encode_unit(self, texts: Sequence[str], kinds: Kinds = None) -> np.ndarray:
        """`encode`, with rows scaled to length 1."""
        return unit_rows(self.encode(texts, kinds))
