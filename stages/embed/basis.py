"""The basis that a teacher's vectors are reduced to (`factor_width`), and its error.

It is learned from a sample, before the other sentences get their vectors: whoever makes those
reduces them as it goes, and vectors of full width are never stored.

Shapes: m sampled sentences, D dimensions of the teacher, k of the basis.
Memory, beside the teacher's: 1.1 GiB where D is 4,096 (8,192 rows to learn from, 4,096 held out);
the fit then takes about a minute of one core. A sentence of the corpus takes 16 bytes while the
sample is drawn.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from stages.contract import Artifact, Fingerprinted, Resources, Stage, Work
from stages.errors import UserError
from stages.principal import (
    band_error,
    fit_and_held_out,
    principal_directions,
    random_order,
    similarity_error,
)
from stages.rows import npy_bytes, unit_rows

FIT_ROWS = 8192
HELD_OUT_ROWS = 4096  # eight million pairs: a few hundred near ones among sentences of Wikipedia
SEED = 42
NEAR = 0.5  # cosine from which two sentences are said to be near


class VectorSource(Protocol):
    """A stage that gives sentences their vectors, as far as a sample of them needs it."""

    def identity(self, inputs: Mapping[str, Fingerprinted]) -> dict[str, Any]: ...
    def resources(self) -> Resources: ...
    def check(self) -> None: ...

    def width(self) -> int | None:
        """D, where it is known before there is a vector."""

    def sampled(
        self, work: Work, rows: np.ndarray, has_width: Callable[[int], None]
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Unit vectors (m, D) of sentence rows, fp16 or float32, and figures for the manifest.

        Args:
            has_width: told D as soon as it is known; raises where it is no good.
        """


@dataclass(frozen=True)
class Basis(Stage):
    """`basis.npy` (D, k) float32, orthonormal, and how far reduced cosines are off.

    source: what gives the teacher's vectors; the basis reads the same inputs. name: the teacher's.
    where: its place in the recipe.
    """

    source: VectorSource
    factor_width: int
    name: str
    where: str

    kind = "basis"
    version = 1

    def identity(self, inputs: Mapping[str, Fingerprinted]) -> dict[str, Any]:
        return self.source.identity(inputs) | {"factor_width": self.factor_width}

    def resources(self) -> Resources:
        return replace(self.source.resources(), cpus=1)

    def check(self) -> None:
        self.source.check()
        width = self.source.width()
        if width is not None:
            self._check_width(width)

    def check_rows(self, num_rows: int) -> None:
        sample_rows(num_rows, self.factor_width, self.where)

    def make(self, work: Work, loaded: Any) -> None:
        num_rows = work.input("sentences").num_rows
        fit, held_out = sample_rows(num_rows, self.factor_width, self.where)
        work.say(f"{len(fit) + len(held_out):,} sampled sentences")
        rows = np.concatenate([fit, held_out])
        vectors, stats = self.source.sampled(work, rows, self._check_width)
        units = unit_rows(vectors)
        basis, figures = fitted_basis(units[: len(fit)], units[len(fit) :], self.factor_width)
        work.say(in_words(figures), important=True)
        with tempfile.TemporaryDirectory() as local:
            (Path(local) / "basis.npy").write_bytes(npy_bytes(basis))
            work.publish(stats | figures, Path(local))

    def _check_width(self, width: int) -> None:
        if self.factor_width >= width:
            raise UserError(
                f"{self.where}.factor_width is {self.factor_width:,}, but the vectors of teacher "
                f"'{self.name}' have {width:,} dimensions: nothing would be saved. Lower it, or "
                "leave it out"
            )

    def report(self, artifact: Artifact) -> dict[str, str | list[dict[str, Any]]]:
        return {f"Factors of {self.name}": f"Its vectors were reduced: {in_words(artifact.stats)}."}

    @classmethod
    def sample(
        cls, artifact: Artifact, open_input: Callable[[str], Artifact], num_rows: int
    ) -> list[str]:
        return [f"  {in_words(artifact.stats)}"]


def sample_rows(num_rows: int, factor_width: int, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows that a basis is learned from, and others that its error is measured on.

    A pure function of `num_rows`.

    Raises:
        UserError: fewer sentences than the basis has dimensions, or none to measure the error on.
    """
    fit, held_out = fit_and_held_out(random_order(num_rows, SEED, 0), FIT_ROWS, HELD_OUT_ROWS)
    if len(held_out) < 2:
        raise UserError(
            f"{where}.factor_width: with {num_rows:,} sentences no two are left to measure the "
            "error on; leave it out, or give more text"
        )
    if factor_width >= len(fit):
        raise UserError(
            f"{where}.factor_width is {factor_width:,}, but only {len(fit):,} sentences can be "
            "sampled to learn the dimensions from; lower it, leave it out, or give more text"
        )
    return fit, held_out


def fitted_basis(
    fit_mD: np.ndarray, held_out_nD: np.ndarray, width: int
) -> tuple[np.ndarray, dict[str, Any]]:
    """The basis (D, k) float32 of unit vectors, and its figures on held-out ones.

    Returns:
        `dimensions` (D), `factor_width` (k), `variance_kept`: the mean squared length of reduced
        vectors, `error` of their products against cosines (see `similarity_error`), `near_pairs`
        and `near_rmse`: those of pairs with a cosine of NEAR or more.
    """
    basis = principal_directions(fit_mD, width).astype(np.float32)
    factors = reduced(held_out_nD, basis).astype(np.float32)
    error = similarity_error(held_out_nD @ held_out_nD.T, factors)
    near_pairs, near_rmse = band_error(error, NEAR)
    return basis, {
        "dimensions": len(basis),
        "factor_width": width,
        "fit_rows": len(fit_mD),
        "held_out_rows": len(held_out_nD),
        "variance_kept": float((factors**2).sum(axis=1).mean()),
        "near_pairs": near_pairs,
        "near_rmse": near_rmse,
        "error": error,
    }


def reduced(units_ND: np.ndarray, basis_Dk: np.ndarray | None) -> np.ndarray:
    """Factors (N, k) fp16 of unit vectors; the vectors themselves (N, D) without a basis.

    Not scaled back to length 1: over all pairs that is further from the cosines (docs/log.md).
    """
    if basis_Dk is not None:
        units_ND = units_ND.astype(np.float32) @ basis_Dk
    return units_ND.astype(np.float16)


def basis_in(work: Work, name: str) -> np.ndarray | None:
    """The basis (D, k) in an input; None where there is none to be read (`name` is "")."""
    return np.load(work.input(name).file_path("basis.npy")) if name else None


def in_words(figures: Mapping[str, Any]) -> str:
    """One line about a basis."""
    error, held_out = figures["error"], figures["held_out_rows"]
    pairs, near = held_out * (held_out - 1) // 2, figures["near_pairs"]
    line = (
        f"{figures['factor_width']:,} of {figures['dimensions']:,} dimensions keep "
        f"{figures['variance_kept']:.2%} of the variance; cosines of {pairs:,} held-out pairs "
        f"(spread {error['spread']:.3f}): rmse {error['rmse']:.4f}, max {error['max']:.3f}; "
    )
    if not near:
        return line + f"no pair has a cosine of {NEAR} or more"
    return line + f"rmse {figures['near_rmse']:.4f} on the {near:,} with a cosine of {NEAR} or more"
