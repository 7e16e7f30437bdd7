"""DenoSent's denoising decoder (Wang et al., AAAI 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from stages.train.objectives.base import Objective

if TYPE_CHECKING:
    from torch import nn

    from stages.encoder.model import Encoder
    from stages.rows import FactorRows
    from stages.train.student_settings import StudentSettings


class Denoising(Objective):
    """DenoSent: from the vector, a decoder restores the tokens behind noisy embeddings."""

    needs_layers = True

    weight: float = Field(1.0, ge=0, description="w_g: weight of this loss.")
    target: Literal["input", "memory"] = Field(
        "input",
        description="Tokens to restore. input: those of view 2, whose noisy embeddings the decoder "
        "reads (released code). memory: those of view 1, whose vector it reads (the paper's text).",
    )
    layers: int = Field(16, ge=1, description="Layers of the decoder.")
    attention_heads: int = Field(1, ge=1, description="Attention heads of a decoder layer.")
    feed_forward: int = Field(2048, ge=1, description="Width of the decoder's feed-forward layers.")
    noise: float = Field(
        0.825, ge=0, lt=1, description="Dropout rate of the embeddings that the decoder reads."
    )
    dropout: float = Field(0.1, ge=0, lt=1, description="Dropout rate inside the decoder.")
    vocabulary_head: Literal["pretrained", "new"] = Field(
        "pretrained",
        description="pretrained: the student's own masked-language head. new: a freshly "
        "initialised one. Either way its vocabulary matrix is the student's word embedding.",
    )

    def build(
        self,
        student: StudentSettings,
        encoder: Encoder,
        teachers: Sequence[tuple[FactorRows, float]],
    ) -> nn.Module:
        from stages.train.auxiliary import Denoiser

        return Denoiser(student, encoder, self)
