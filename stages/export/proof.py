"""What a variant keeps of the float32 student: cosines, figures of the tests, speed and size."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stages.contract import Figure
from stages.export.settings import GateSettings

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Proof:
    """Measured side by side with the float32 student in plain sentence-transformers.

    cosine, lowest_cosine: mean and worst, over `num_compared` sentences; nan where a vector is not
        finite. figures: of all tests; none in that case, as tests take finite vectors alone.
    lost: points (x 100) by the figure's name; below 0: gained.
    times_as_fast: median, lowest and highest of paired ratios. megabytes: of the weights' files.
    """

    cosine: float
    lowest_cosine: float
    num_compared: int
    figures: list[Figure]
    lost: dict[str, float]
    times_as_fast: tuple[float, float, float]
    sentences_per_second: float
    threads: int
    megabytes: float

    def row(self) -> list[Figure]:
        """For the table."""
        return [
            Figure("MB", self.megabytes, "lower", decimals=1),
            *self.figures,
            Figure("cosine", self.cosine, decimals=4),
            Figure("lowest cosine", self.lowest_cosine, decimals=4),
            Figure("x as fast", self.times_as_fast[0], interval=self.times_as_fast[1:]),
        ]

    def told(self) -> str:
        """In one line."""
        median, low, high = self.times_as_fast
        worst = max(self.lost, key=lambda name: _order(self.lost[name]), default="")
        lost = f"at most {self.lost[worst]:.2f} points lost ({worst}); " if worst else ""
        return (
            f"cosine to the float32 student {self.cosine:.4f}, at worst {self.lowest_cosine:.4f} "
            f"({self.num_compared:,} sentences); {lost}{median:.2f} times as fast in "
            f"sentence-transformers ({low:.2f} to {high:.2f}; {self.sentences_per_second:,.0f} "
            f"sentences/s, {self.threads} CPU thread(s)); {self.megabytes:.1f} MB"
        )


def refusal(gate: GateSettings, proof: Proof) -> str:
    """What of a gate is not met, setting by setting; "" where all is. nan meets no gate, not even
    one without limits."""
    is_finite = proof.cosine == proof.cosine
    found = [] if is_finite else ["some of its vectors are not finite numbers"]
    for key in ("cosine", "lowest_cosine"):
        least, value = getattr(gate, key), getattr(proof, key)
        if least is not None and not value >= least:
            digits = 4 if round(value, 4) < least else 9
            found.append(f"{key} {value:.{digits}f} is under export.gate.{key} {least:g}")
    if gate.points is not None:
        if not proof.lost and is_finite:
            found.append("no test of the recipe has points to lose (export.gate.points)")
        found += [
            f"{name} loses {points:.2f} points, over export.gate.points {gate.points:g}"
            for name, points in proof.lost.items()
            if not points <= gate.points
        ]
    return "; ".join(found)


def cosines(vectors_ND: "np.ndarray", others_ND: "np.ndarray") -> tuple[float, float]:
    """Mean and lowest cosine of unit rows; nan where a row is not finite."""
    import numpy as np

    cosines_N = np.einsum("nd,nd->n", vectors_ND, others_ND)
    return float(cosines_N.mean()), float(cosines_N.min())


def points_lost(before: Sequence[Figure], after: Sequence[Figure]) -> dict[str, float]:
    """Of figures in percent, by name; the same figures on both sides."""
    found: dict[str, float] = {}
    for was, now in zip(before, after, strict=True):
        if was.percent and was.better != "neither":
            lost = was.value - now.value
            lost = lost if was.better == "higher" else -lost
            # two tests may call their figures alike: the worse one counts
            found[was.name] = max(found.get(was.name, lost), lost, key=_order)
    return found


def _order(points: float) -> float:
    return points if points == points else float("inf")  # nan is the worst
