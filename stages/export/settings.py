"""Settings of `export`: further variants of the student, and what they must keep. No torch."""

from typing import Literal

from pydantic import Field, field_validator

from stages.settings import Settings

VariantName = Literal["onnx", "onnx-int8", "openvino", "openvino-int8", "bf16"]


class GateSettings(Settings):
    """What a variant must keep of the float32 student to be published; null: anything."""

    cosine: float | None = Field(
        0.99,
        gt=0,
        le=1,
        description="Lowest mean cosine to the float32 student, over sentences of the corpus.",
    )
    lowest_cosine: float | None = Field(
        None, gt=0, le=1, description="Lowest cosine of any one of these sentences."
    )
    points: float | None = Field(
        None,
        ge=0,
        description="Most points (x 100) that may be lost on any figure of the recipe's tests.",
    )


class ExportSettings(Settings):
    """Variants of the exported student, each measured against it before it is published."""

    variants: list[VariantName] = Field(
        min_length=1,
        description="onnx, openvino: graphs for sentence-transformers' backends; -int8: their "
        "weights and activations in 8 bits; bf16: weights of half the size.",
    )
    gate: GateSettings = GateSettings()

    @field_validator("variants")
    @classmethod
    def _differ(cls, variants: list[VariantName]) -> list[VariantName]:
        for name in variants:
            if variants.count(name) > 1:
                raise ValueError(f"the variant '{name}' is there twice")
        return variants
