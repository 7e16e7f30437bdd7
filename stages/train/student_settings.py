"""Settings of the student. Imports no torch."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from stages.encoder.settings import LONGEST, EncoderSettings
from stages.errors import UserError
from stages.settings import added
from stages.vocabulary.settings import VocabularySettings


class StudentSettings(EncoderSettings):
    trained = True

    max_length: int = Field(
        32, ge=3, le=LONGEST, description="Most tokens of a training sentence; the template counts."
    )
    precision: Literal["float32", "bfloat16", "float16"] = Field(
        "float32",
        description="float32, as tests read a student; training has train.precision.",
    )
    second_template: str | None = Field(
        None,
        description="Template of the second view and of soft negatives; null: the same as "
        "`template`.",
    )
    template_denoising: bool = Field(
        False,
        description="While training, subtract the vector of the template alone, at the sentence's "
        "positions (PromptBERT).",
    )
    head: Literal["tanh", "linear", "batchnorm", "none"] = Field(
        "tanh",
        description="Layer between pooling and loss while training; it is dropped afterwards. "
        "tanh: tanh(Wx + b) as in SimCSE. linear: Wx + b as in DenoSent. batchnorm: DiffCSE's two "
        "layers with batch norm.",
    )
    dropout: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="Dropout rate everywhere in the encoder; null: the model's own.",
    )
    freeze_embeddings: bool = added(
        False,
        description="Keep the word embeddings as they are: faster, and as good where they are the "
        "teacher's own.",
    )
    freeze_layers: int = added(
        0,
        ge=0,
        description="Keep that many of the first layers as they are, and what is no layer "
        "(embeddings): faster still. For a student whose first layers are its teacher's own.",
    )

    aligned: bool = added(
        False,
        description="Keep the linear map to the teacher's width: the student's vectors are then in "
        "the teacher's space, so that what the teacher has embedded is searched with the student "
        "(LEAF). For one teacher and the objective vector_regression.",
    )

    dimensions: list[Annotated[int, Field(ge=1)]] = added(
        [],
        description="Further widths (Matryoshka): that many leading coordinates are trained to be "
        "good vectors too, so that vectors may be cut. The whole width is always trained, and may "
        "be named among them.",
    )

    vocabulary: VocabularySettings | None = added(
        None,
        description="Keep only the tokens that the recipe's texts use, and their embeddings: "
        "{min_count: 1}. null: the whole vocabulary.",
    )

    @model_validator(mode="after")
    def _templates_go_together(self) -> "StudentSettings":
        if self.template is None and (self.second_template or self.template_denoising):
            raise ValueError("second_template and template_denoising need a template")
        if self.second_template is not None:
            EncoderSettings(
                model=self.model, pooling=self.pooling, template=self.second_template,
                max_length=self.max_length,
            )  # fmt: skip
        if self.template_denoising and self.pooling != "mask":
            raise ValueError("template_denoising needs pooling: mask")
        return self

    @model_validator(mode="after")
    def _makes_sense(self) -> "StudentSettings":
        if len(set(self.dimensions)) < len(self.dimensions):
            raise ValueError(f"dimensions {self.dimensions} names a width twice")
        for name in ("aligned", "dimensions"):
            if getattr(self, name) and self.head != "none":
                raise ValueError(
                    f"{name} is about the student's own vectors, and head: {self.head} is between "
                    "them and the loss; set head: none"
                )
        if self.aligned and self.template_denoising:
            raise ValueError(
                "aligned: with template_denoising other vectors are trained than are used; leave "
                "one of them out"
            )
        if self.precision != "float32":
            raise ValueError(
                f"precision: {self.precision} is no student's: in training it is train.precision, "
                "and tests read it in float32; leave it out"
            )
        if self.pooling == "first-last":
            raise ValueError(
                "pooling: first-last is no student's, as sentence-transformers could not load it; "
                "set mean"
            )
        if self.is_static and self.dropout:
            raise ValueError("layers: 0 has no dropout; leave it out")
        if self.is_static and (self.freeze_embeddings or self.freeze_layers):
            raise ValueError(
                "layers: 0 has nothing but embeddings, so freeze_embeddings and freeze_layers must "
                "be off"
            )
        return self

    @property
    def is_cut(self) -> bool:
        """Whether its vectors may be cut, and so have coordinates of their own (see `aligned`)."""
        return bool(self.dimensions) and not self.aligned

    @property
    def views_differ(self) -> bool:
        """Whether dropout or a template of its own tells the second view from the first."""
        drops = self.dropout != 0 and not self.is_static
        return drops or self.second_template not in (None, self.template)

    def view_settings(self) -> list[EncoderSettings]:
        """The encoder of view 1 and that of view 2 (and soft negatives): templates may differ."""
        first = self.encoder()
        second = self.second_template or self.template
        return [first, first.model_copy(update={"template": second})]


def check_widths(widths: list[int], dimension: int) -> None:
    """Compares widths that vectors may be cut to with their own.

    Raises:
        UserError: one that is more.
    """
    if max(widths, default=0) > dimension:
        raise UserError(
            f"student.dimensions: {max(widths)} is more than the {dimension} of the student's "
            "vectors; name widths up to that"
        )


def check_frozen(settings: StudentSettings, num_layers: int | None) -> None:
    """Compares the layers that stay as they are with all of the student's, where that is known.

    Raises:
        UserError: none is left to train.
    """
    if num_layers is not None and settings.freeze_layers >= max(1, num_layers):
        raise UserError(
            f"student.freeze_layers is {settings.freeze_layers}, but the student has {num_layers} "
            "layers, so none would be trained; lower it"
        )
