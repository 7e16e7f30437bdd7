"""Regression on teachers' vectors: what sentence-transformers' distillation and LEAF minimise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from stages.train.objectives.base import Objective
from stages.train.objectives.scores import row_cosines, unit

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stages.encoder.model import Encoder
    from stages.rows import FactorRows
    from stages.train.student_settings import StudentSettings


class VectorRegression(Objective):
    """The student's vector of a sentence approaches its teachers' vectors.

    The one objective that looks at a sentence alone: without others, a batch has one view.
    """

    needs_teacher: ClassVar[bool] = True
    needs_second: ClassVar[bool] = False

    weight: float = Field(1.0, ge=0, description="Weight of this loss.")
    distance: Literal["cosine", "mse"] = Field(
        "cosine",
        description="cosine: 1 - cos(P u, f). mse: mean squared difference of the coordinates of "
        "P u / |P u| and f, which is 2 / width times the cosine form (where factor_width made f "
        "shorter than 1, times its length too, and a constant). Of several teachers the squared "
        "differences are mixed by their weights, and so are the widths.",
    )
    projection: Literal["auto", "learned", "none"] = Field(
        "auto",
        description="P, a linear map to the teacher's width, dropped after training. learned: "
        "starts at the leading principal directions of the teacher's vectors. none: the identity. "
        "auto: learned where widths differ or student.dimensions cut vectors, and for all but one "
        "of several teachers of the student's width; not for a student that keeps its map "
        "(student.aligned).",
    )

    def build(
        self,
        student: StudentSettings,
        encoder: Encoder,
        teachers: Sequence[tuple[FactorRows, float]],
    ) -> nn.Module:
        from stages.train.vectors import VectorRegressor

        widths = (encoder.dimension, *student.dimensions)
        return VectorRegressor(encoder, teachers, self, widths, student.is_cut)


def vector_regression(u_bD: Tensor, f_bD: Tensor, distance: Literal["cosine", "mse"]) -> Tensor:
    """(b,): 1 - cos(u_i, f_i), or the mean over coordinates of (u_i / |u_i| - f_i)^2.

    Args:
        u_bD: the student's vectors, projected to the teacher's width. f_bD: the teacher's.
    """
    if distance == "cosine":
        return 1 - row_cosines(u_bD, f_bD)
    return ((unit(u_bD) - f_bD) ** 2).mean(-1)
