"""SimCSE's optional masked-language term."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from stages.train.objectives.base import Objective

if TYPE_CHECKING:
    from torch import nn

    from stages.encoder.model import Encoder
    from stages.rows import FactorRows
    from stages.train.student_settings import StudentSettings


class MaskedLanguage(Objective):
    """SimCSE: the pretrained head predicts masked tokens."""

    needs_layers = True

    weight: float = Field(0.1, ge=0, description="lambda: weight of this loss.")
    mask_ratio: float = Field(0.15, gt=0, lt=1, description="Share of tokens to predict.")

    @property
    def masked_share(self) -> float | None:
        return self.mask_ratio

    def build(
        self,
        student: StudentSettings,
        encoder: Encoder,
        teachers: Sequence[tuple[FactorRows, float]],
    ) -> nn.Module:
        from stages.train.auxiliary import MaskedLanguageHead

        return MaskedLanguageHead(student, encoder)
