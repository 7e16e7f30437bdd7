"""Linear maps to teachers' vectors: dropped after the regression on them, or kept (`aligned`)."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from stages.encoder.dense import Dense
from stages.encoder.model import Encoder
from stages.errors import UserError
from stages.rows import FactorRows
from stages.train.auxiliary import AuxiliaryInput
from stages.train.objectives.vector_regression import VectorRegression, vector_regression

# Sentences from which principal directions are computed: 25 MB of a teacher of width 768
NUM_SAMPLED = 8192


class VectorRegressor(nn.Module):
    """The distances of view 1 to the teachers' vectors, mixed by the teachers' weights.

    Raises:
        UserError: widths differ, and there is to be no projection.
    """

    def __init__(
        self,
        encoder: Encoder,
        teachers: Sequence[tuple[FactorRows, float]],
        chosen: VectorRegression,
    ) -> None:
        super().__init__()
        self._distance = chosen.distance
        total = math.fsum(weight for _, weight in teachers)
        self._weights = [weight / total for _, weight in teachers]
        self.projections = nn.ModuleList()
        for factors, _ in teachers:
            vectors = factors.take(_spread(factors.num_rows))
            width = vectors.shape[1]
            if chosen.projection == "none" and width != encoder.dimension:
                raise UserError(
                    f"train.objectives.vector_regression.projection: none, but the student's "
                    f"vectors have {encoder.dimension} dimensions and a teacher's {width}; set "
                    "projection: learned"
                )
            same = chosen.projection != "learned" and width == encoder.dimension
            self.projections.append(
                nn.Identity() if same else principal_projection(vectors, encoder.dimension)
            )

    def forward(
        self, encoder: Encoder, batch: AuxiliaryInput, vectors_D: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Sum over this worker's sentences, and their number."""
        u_bD = vectors_D.chunk(batch.num_views)[0]
        with torch.autocast(u_bD.device.type, enabled=False):
            parts = [
                weight * vector_regression(projection(u_bD), factors, self._distance).sum()
                for weight, projection, factors in zip(
                    self._weights, self.projections, batch.factors, strict=True
                )
            ]
        return torch.stack(parts).sum(), torch.tensor(len(u_bD), device=u_bD.device)


def align(encoder: Encoder, factors: FactorRows) -> None:
    """Gives the encoder a linear map to a teacher's width, to be kept (LEAF, arXiv 2509.12539).

    It starts at the leading principal directions of the factors; where widths are equal there is
    none.
    """
    vectors = factors.take(_spread(factors.num_rows))
    if vectors.shape[1] != encoder.dimension:
        encoder.dense.append(Dense(principal_projection(vectors, encoder.dimension)))


def principal_projection(vectors: np.ndarray, dimension: int) -> nn.Linear:
    """P (D_t, D_s), whose columns are the leading principal directions of vectors (N, D_t).

    About the origin, as cosines are; columns beyond D_t are 0.
    """
    width = vectors.shape[1]
    _, directions = np.linalg.eigh(vectors.T.astype(np.float64) @ vectors)
    leading = directions[:, ::-1][:, :dimension].copy()
    linear = nn.Linear(dimension, width, bias=False)
    with torch.no_grad():
        linear.weight.zero_()
        linear.weight[:, : leading.shape[1]] = torch.from_numpy(leading)
    return linear


def _spread(num_rows: int) -> np.ndarray:
    """Rows spread evenly over all, NUM_SAMPLED at most."""
    return np.unique(np.linspace(0, num_rows - 1, min(num_rows, NUM_SAMPLED)).astype(np.int64))
