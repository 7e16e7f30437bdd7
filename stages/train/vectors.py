"""Linear maps to teachers' vectors: dropped after the regression on them, or kept (`aligned`)."""

import math
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stages.encoder.dense import Dense
from stages.encoder.model import Encoder
from stages.errors import UserError
from stages.principal import principal_directions
from stages.rows import FactorRows
from stages.train.auxiliary import AuxiliaryInput
from stages.train.objectives.vector_regression import VectorRegression, vector_regression

# Sentences from which principal directions are computed: 25 MB of a teacher of width 768
NUM_SAMPLED = 8192


class VectorRegressor(nn.Module):
    """The distances of view 1 to the teachers' vectors, mixed by the teachers' weights.

    With projection auto the student's coordinates are those of the first teacher of its width: its
    projection is the identity. Two such teachers have spaces of their own, which have no middle
    (docs/log.md), so all others are reached by learned maps, which start at the least-squares map
    from the first one's vectors.

    Args:
        widths: leading coordinates that count; the mean over these is the loss (Matryoshka,
            Kusupati et al. 2022). A prefix goes through the leading columns of the same projection.
        turned: whether the encoder was turned to a teacher's principal directions
            (`turn_to_principal`), so that projections begin by turning it back.

    Raises:
        UserError: widths differ, and there is to be no projection.
    """

    def __init__(
        self,
        encoder: Encoder,
        teachers: Sequence[tuple[FactorRows, float]],
        chosen: VectorRegression,
        widths: Sequence[int],
        turned: bool = False,
    ) -> None:
        super().__init__()
        self._distance = chosen.distance
        self._widths = tuple(dict.fromkeys(widths))
        self.projections = nn.ModuleList()
        shares = []
        home = None
        if chosen.projection == "auto":
            home = _home(encoder, [factors for factors, _ in teachers])
        back_DD = _turned_back(encoder) if turned and home is not None else None
        for factors, weight in teachers:
            width = factors.dimension
            if chosen.projection == "none" and width != encoder.dimension:
                raise UserError(
                    f"train.objectives.vector_regression.projection: none, but the student's "
                    f"vectors have {encoder.dimension} dimensions and a teacher's {width}; set "
                    "projection: learned"
                )
            # a mean over coordinates would make a wide teacher's distance the smaller one
            shares.append(weight * (width if self._distance == "mse" else 1))
            if chosen.projection == "none":
                self.projections.append(nn.Identity())
            elif home is None:
                self.projections.append(principal_projection(_sampled(factors), encoder.dimension))
            elif factors is home:
                self.projections.append(nn.Identity() if back_DD is None else _linear(back_DD))
            else:
                start = least_squares(_sampled(home), _sampled(factors))
                self.projections.append(_linear(start if back_DD is None else start @ back_DD))
        total = math.fsum(shares)
        self._weights = [share / total for share in shares]

    def forward(
        self, encoder: Encoder, batch: AuxiliaryInput, vectors_D: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Sum over this worker's sentences, and their number."""
        u_bD = vectors_D.chunk(batch.num_views)[0]
        with torch.autocast(u_bD.device.type, enabled=False):
            prefixes = [F.pad(u_bD[:, :w], (0, u_bD.shape[1] - w)) for w in self._widths]
            parts = [
                weight * vector_regression(projection(prefix_bD), factors, self._distance).sum()
                for weight, projection, factors in zip(
                    self._weights, self.projections, batch.factors, strict=True
                )
                for prefix_bD in prefixes
            ]
        total = torch.stack(parts).sum() / len(prefixes)
        return total, torch.tensor(len(u_bD), device=u_bD.device)


def align(encoder: Encoder, factors: FactorRows) -> None:
    """Gives the encoder a linear map to a teacher's width, to be kept (LEAF, arXiv 2509.12539).

    It starts at the leading principal directions of the factors; where widths are equal there is
    none.
    """
    if factors.dimension != encoder.dimension:
        encoder.dense.append(Dense(principal_projection(_sampled(factors), encoder.dimension)))


def turn_to_principal(encoder: Encoder, teachers: Sequence[FactorRows]) -> None:
    """Turns the encoder so that its leading coordinates are the leading principal directions.

    For an encoder that begins in the space of a teacher of its width; of any other nothing is
    known. Cut vectors then begin as the teacher's PCA, not as some of its coordinates.
    """
    home = _home(encoder, teachers)
    if home is not None:
        back = principal_projection(_sampled(home), encoder.dimension)
        encoder.dense.append(Dense(_linear(back.weight.detach().T)))


def _home(encoder: Encoder, teachers: Sequence[FactorRows]) -> FactorRows | None:
    """The first teacher of the encoder's width."""
    return next((one for one in teachers if one.dimension == encoder.dimension), None)


def _turned_back(encoder: Encoder) -> Tensor:
    """The inverse (D, D) of what `turn_to_principal` did."""
    return cast(Dense, [*encoder.dense][-1]).linear.weight.detach().T


def _linear(weight: Tensor) -> nn.Linear:
    """A linear map that starts at these weights (D_out, D_in)."""
    found = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    # rows one after the other, as moments are that a checkpoint holds: or sums round otherwise
    found.weight = nn.Parameter(weight.clone(memory_format=torch.contiguous_format))
    return found


def least_squares(from_ND: np.ndarray, to_NE: np.ndarray) -> Tensor:
    """W (E, D) that brings rows W f nearest to those of the other vectors."""
    return torch.from_numpy(np.linalg.lstsq(from_ND, to_NE, rcond=None)[0].T)


def principal_projection(vectors: np.ndarray, dimension: int) -> nn.Linear:
    """P (D_t, D_s), whose columns are the leading principal directions of vectors (N, D_t).

    About the origin, as cosines are; columns beyond D_t are 0.
    """
    width = vectors.shape[1]
    leading = principal_directions(vectors, dimension)
    linear = nn.Linear(dimension, width, bias=False)
    with torch.no_grad():
        linear.weight.zero_()
        linear.weight[:, : leading.shape[1]] = torch.from_numpy(leading)
    return linear


def _sampled(factors: FactorRows) -> np.ndarray:
    """Vectors (n, D) of rows spread evenly over all, NUM_SAMPLED at most."""
    number = min(factors.num_rows, NUM_SAMPLED)
    rows = np.linspace(0, factors.num_rows - 1, number)
    return factors.take(np.unique(rows.astype(np.int64)))
