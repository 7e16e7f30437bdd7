"""The corpus of rank vectors: its sample, its vectors, and the basis that compresses them.

Shapes: n corpus sentences, D dimensions of the encoder, k of the basis, T rows of a tile.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from stages.errors import UserError
from stages.principal import fit_and_held_out, random_order, similarity_error
from stages.ranks.positions import (
    position_dtype,
    rank_factor,
    rank_positions,
    scaled,
    tile_rows,
)
from stages.ranks.settings import RanksSettings
from stages.rows import npy_bytes, unit_rows

# Rank vectors that the basis is fitted on, and others that its error is measured on: 4,096 x 10,000
# positions are 82 MB. Where either would take more than 2 GiB (4,096 above 131,072 corpus
# sentences), fewer are taken.
FIT_ROWS = 4096
HELD_OUT_ROWS = 1000
SAMPLE_BYTES = 2 << 30
COLUMN_BLOCK = 8192


@dataclass(frozen=True)
class Sample:
    """Row numbers: the corpus, the rows a basis is fitted on, and those its error is measured on.

    Fit and held-out rows never overlap; either may contain corpus sentences where text is short.
    """

    corpus: np.ndarray
    fit: np.ndarray
    held_out: np.ndarray


def sample_rows(num_rows: int, settings: RanksSettings) -> Sample:
    """A pure function of (num_rows, corpus_size, seed); nothing to fit without `dimensions`.

    Raises:
        UserError: fewer sentences than the corpus needs, or than the basis has dimensions.
    """
    n, k = settings.corpus_size, settings.dimensions
    if n > num_rows:
        raise UserError(
            f"ranks.corpus_size is {n:,}, but there are only {num_rows:,} sentences; "
            "lower it or give more text"
        )
    order = random_order(num_rows, settings.seed, n)
    if k is None:
        return Sample(order[:n], order[:0], order[:0])
    room = SAMPLE_BYTES // (n * np.dtype(position_dtype(n)).itemsize)
    fit, held_out = fit_and_held_out(order, min(FIT_ROWS, room), min(HELD_OUT_ROWS, room))
    if len(held_out) < 2:
        raise UserError(
            f"ranks.dimensions: with {num_rows:,} sentences and a corpus of {n:,} no two are left "
            "to measure the error of compression on; leave it out for exact ranks"
        )
    if k >= len(fit):
        raise UserError(
            f"ranks.dimensions is {k:,}, but only {len(fit):,} rank vectors can be sampled to fit "
            "them on; lower ranks.dimensions, or give more text"
        )
    return Sample(order[:n], fit, held_out)


def check_corpus(vectors_nD: np.ndarray, model: str) -> int:
    """Number of corpus vectors that equal another one.

    Raises:
        UserError: all are equal, so that no sentence can rank them.
    """
    num_distinct = len(np.unique(vectors_nD, axis=0))
    if num_distinct < 2:
        raise UserError(
            f"ranks: model '{model}' gives the same vector for all {len(vectors_nD):,} corpus "
            "sentences, so there is nothing to rank; choose another base encoder"
        )
    return len(vectors_nD) - num_distinct


def tiled_similarities(
    vectors: np.ndarray, corpus_nD: np.ndarray, use: Callable[[slice, np.ndarray], None]
) -> None:
    """Calls `use(rows, cosines (T, n) float32)` tile by tile, about 128 MiB at a time.

    Args:
        corpus_nD: unit rows, float32; scaled once by whoever holds the corpus.

    Raises:
        UserError: the vectors have another dimension than the corpus vectors.
    """
    if vectors.shape[1] != corpus_nD.shape[1]:
        raise UserError(
            f"the encoder gives vectors of {vectors.shape[1]} dimensions, but the corpus vectors "
            f"have {corpus_nD.shape[1]}: they were made by another encoder. Make them again."
        )
    step = tile_rows(len(corpus_nD))
    for start in range(0, len(vectors), step):
        rows = slice(start, min(start + step, len(vectors)))
        use(rows, unit_rows(vectors[rows]) @ corpus_nD.T)


def tiled_positions(
    vectors: np.ndarray, corpus_nD: np.ndarray, use: Callable[[slice, np.ndarray], None]
) -> None:
    """Calls `use(rows, rank positions (T, n))` tile by tile; ties in corpus order.

    Raises:
        UserError: a row is equally similar to the whole corpus (zero variance).
    """

    def rank(rows: slice, scores_Tn: np.ndarray) -> None:
        flat = np.flatnonzero(scores_Tn.max(1) == scores_Tn.min(1))
        if len(flat):
            raise UserError(
                f"ranks: sentence {rows.start + flat[0]} of this shard is equally similar to every "
                "corpus sentence (zero variance), so it has no rank vector; the base encoder's "
                "vectors are degenerate, choose another one"
            )
        use(rows, rank_positions(scores_Tn))

    tiled_similarities(vectors, corpus_nD, rank)


def positions_of(vectors: np.ndarray, corpus_nD: np.ndarray) -> np.ndarray:
    """All rank positions (N, n); raises like `tiled_positions`."""
    out = np.empty((len(vectors), len(corpus_nD)), dtype=position_dtype(len(corpus_nD)))
    tiled_positions(vectors, corpus_nD, out.__setitem__)
    return out


def compressed_factors(
    vectors: np.ndarray, corpus_nD: np.ndarray, basis_nk: np.ndarray
) -> np.ndarray:
    """Rank factors (N, k) float32 = U V of the exact factors U (N, n), never held whole."""
    out = np.empty((len(vectors), basis_nk.shape[1]), dtype=np.float32)

    def project(rows: slice, positions_Tn: np.ndarray) -> None:
        out[rows] = rank_factor(positions_Tn) @ basis_nk

    tiled_positions(vectors, corpus_nD, project)
    return out


def fit_basis(positions_mn: np.ndarray, dimensions: int) -> np.ndarray:
    """Orthonormal basis V (n, k) float32 that keeps most of the sampled rank vectors U (m, n).

    The k leading right singular vectors of U, without centring: what must survive is the product
    U U^T, and no other k directions keep more of it (Eckart-Young). From the eigenvectors of the
    (m, m) product, built by blocks of columns. Projections are *not* rescaled to length 1: what
    is cut off is mostly noise of each sentence's own, and rescaling would inflate every product.
    """
    from scipy.sparse.linalg import eigsh

    m, n = positions_mn.shape
    product = exact_similarities(positions_mn)
    values, vectors = eigsh(product, k=dimensions, which="LM", v0=np.ones(m, dtype=np.float32))
    if values.min() <= 1e-6 * values.max():
        raise UserError(
            f"ranks.dimensions is {dimensions:,}, but the sampled rank vectors span fewer; lower it"
        )
    weights = (vectors / np.sqrt(values)).astype(np.float32)
    basis = np.empty((n, dimensions), dtype=np.float32)
    for columns, block_mb in _factor_blocks(positions_mn):
        basis[columns] = block_mb.T @ weights
    return basis


def _factor_blocks(positions_mn: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """The rank factors of all rows, by blocks of columns."""
    n = positions_mn.shape[1]
    for start in range(0, n, COLUMN_BLOCK):
        columns = slice(start, min(start + COLUMN_BLOCK, n))
        yield columns, scaled(positions_mn[:, columns], n)


def exact_similarities(positions_mn: np.ndarray) -> np.ndarray:
    """Spearman's rho of all pairs (m, m) float32."""
    product = np.zeros((len(positions_mn), len(positions_mn)), dtype=np.float32)
    for _, block_mb in _factor_blocks(positions_mn):
        product += block_mb @ block_mb.T
    return product


def corpus_files(
    vectors_of: Callable[[np.ndarray], np.ndarray],
    num_rows: int,
    settings: RanksSettings,
    model: str,
) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Corpus vectors and, when compressed, the basis.

    Args:
        vectors_of: unit vectors (rows, D) of sentence rows, under the encoder that ranks.

    Returns:
        files (`corpus.npy` (n, D) fp16, `basis.npy` (n, k) float32), and figures for the manifest.
    """
    sample = sample_rows(num_rows, settings)
    corpus = vectors_of(sample.corpus).astype(np.float16)
    stats: dict[str, Any] = {"corpus_size": len(corpus)}
    stats["duplicate_vectors"] = check_corpus(corpus, model)
    files = {"corpus.npy": npy_bytes(corpus)}
    corpus = unit_rows(corpus)
    if settings.dimensions is not None:
        fit = positions_of(vectors_of(sample.fit), corpus)
        basis = fit_basis(fit, settings.dimensions)
        del fit
        held_out = vectors_of(sample.held_out)
        exact = exact_similarities(positions_of(held_out, corpus))
        stats["error"] = similarity_error(exact, compressed_factors(held_out, corpus, basis))
        stats["fit_rows"], stats["held_out_rows"] = len(sample.fit), len(sample.held_out)
        files["basis.npy"] = npy_bytes(basis)
    return files, stats


class Ranker:
    """A shard of encoder vectors to rank factors over one corpus. Row-wise: shard in, shard out."""

    def __init__(self, corpus_nD: np.ndarray, basis_nk: np.ndarray | None) -> None:
        self._corpus = unit_rows(corpus_nD)
        self._basis = basis_nk

    def __call__(self, vectors_ND: np.ndarray) -> dict[str, bytes]:
        """`factors.npy`: positions (N, n) uint16 or uint32 when exact, else (N, k) fp16."""
        if self._basis is None:
            return {"factors.npy": npy_bytes(positions_of(vectors_ND, self._corpus))}
        factors = compressed_factors(vectors_ND, self._corpus, self._basis)
        return {"factors.npy": npy_bytes(factors.astype(np.float16))}
