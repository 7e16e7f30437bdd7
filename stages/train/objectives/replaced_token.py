"""DiffCSE's replaced-token detection (Chuang et al., NAACL 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from stages.encoder.config import model_config
from stages.encoder.settings import ModelSettings
from stages.train.objectives.base import Objective

if TYPE_CHECKING:
    from torch import nn

    from stages.encoder.model import Encoder
    from stages.rows import FactorRows
    from stages.train.student_settings import StudentSettings


class ReplacedToken(Objective):
    """DiffCSE: from the vector, a discriminator finds the tokens that a generator replaced."""

    needs_layers = True

    weight: float = Field(0.005, ge=0, description="lambda: weight of this loss.")
    mask_ratio: float = Field(
        0.30, gt=0, lt=1, description="Share of tokens to mask for the generator."
    )
    generator: ModelSettings = Field(
        ModelSettings(model="distilbert-base-uncased"),
        description="Frozen masked-language model that replaces tokens; its vocabulary must be the "
        "student's.",
    )

    @model_validator(mode="after")
    def _generator_is_pretrained(self) -> ReplacedToken:
        if self.generator.recipe_file is not None:
            raise ValueError("it must be a pretrained model: a recipe's student has no head")
        return self

    def identity(self, where: str = "") -> dict[str, Any]:
        found = super().identity(where)
        found["generator"] = found["generator"]["model"]
        return found

    def check(self) -> None:
        model_config(self.generator)

    @property
    def masked_share(self) -> float | None:
        return self.mask_ratio

    def build(
        self,
        student: StudentSettings,
        encoder: Encoder,
        teachers: Sequence[tuple[FactorRows, float]],
    ) -> nn.Module:
        from stages.train.auxiliary import ReplacedTokenDetector

        return ReplacedTokenDetector(student, encoder, self.generator)
