"""What an objective is. A new one takes one file and one line in `Objectives`, or a plug-in.

Shapes: B sentences of the *global* batch, b of one worker, D dimensions, L tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from stages.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stages.encoder.model import Encoder
    from stages.rows import FactorRows
    from stages.train.student_settings import StudentSettings


@dataclass(frozen=True)
class View:
    """A further view of every sentence that an objective asks for.

    load: returns what turns sentences into the view's texts; called once in each process.
    identity: what decides the result beside the sentence, as plain data; imports nothing heavy.
    """

    name: str
    load: Callable[[], Callable[[Sequence[str]], list[str]]]
    identity: Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Scores:
    """What the objectives see of a global batch; u, v are the student's vectors of views 1 and 2.

    C: cosines C_ij = cos(u_i, v_j) (B, B). T: the teachers' mixed similarities (B, B), None when no
    objective needs them. own: by further view n, cos(u_i, n_i) (B,). across: cos(u_i, n_j) (B, B).
    """

    C: "Tensor"
    T: "Tensor | None" = None
    own: "Mapping[str, Tensor]" = field(default_factory=dict)
    across: "Mapping[str, Tensor]" = field(default_factory=dict)

    @property
    def teacher(self) -> "Tensor":
        """T, for objectives that declare `needs_teacher`."""
        assert self.T is not None
        return self.T


class Objective(Settings):
    """A loss and its settings. It imports without torch; formulas use tensors' own methods.

    needs_teacher: `Scores.T` must be there. views: further views that it reads in `Scores`.
    needs_second: reads a second view of each sentence, as all do that read `Scores`; where none
    does, or where nothing would tell the two apart, a batch has only the first.
    contrastive: part of what RankEncoder's maximum (Eq. 5) is taken with. needs_layers: its module
    reads states of the student's layers, which a static table has not.
    """

    needs_teacher: ClassVar[bool] = False
    needs_second: ClassVar[bool] = True
    contrastive: ClassVar[bool] = False
    needs_layers: ClassVar[bool] = False
    views: ClassVar[tuple[View, ...]] = ()

    weight: float = Field(1.0, ge=0, description="Weight of this loss in the sum.")

    @property
    def needs_negatives(self) -> bool:
        """Whether `Scores.across["negative"]`, the rewrites' hard negatives, must be there."""
        return False

    @property
    def replaces_contrastive(self) -> bool:
        """Whether it counts only where it is larger than the contrastive part, and replaces it."""
        return False

    @property
    def masked_share(self) -> float | None:
        """Share of tokens masked in the copy of the batch that its module gets; None for none."""
        return None

    def check(self) -> None:
        """Looks at models that it needs, before anything is made; no torch."""

    def value(self, scores: Scores) -> "Tensor":
        """The loss, a mean over rows i, in the dtype of C (float32 even under autocast)."""
        raise NotImplementedError

    def build(
        self,
        student: "StudentSettings",
        encoder: "Encoder",
        teachers: "Sequence[tuple[FactorRows, float]]",
    ) -> "nn.Module | None":
        """A module that exists while training and computes the loss from tokens or teachers'
        vectors instead of `value`: see stages/train/auxiliary.py. None for objectives of scores.

        Args:
            teachers: factors and weight of each, for objectives that declare `needs_teacher`.
        """
        return None
