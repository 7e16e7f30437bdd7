"""Rank-aware similarity when a student is used (RankEncoder Eq. 7).

    from stages.ranks.similarity import load_student
    model = load_student("runs/students/wiki-ranks")
    print(model.similarity(["A man eats."], ["Somebody has lunch."]))

sim(x, y) = w rho(x, y) + (1 - w) cos(x, y) is one dot product: of the unit vector of x, scaled by
sqrt(1 - w), beside its rank factor, scaled by sqrt(w). So a sentence's ranks are computed once,
whatever it is compared with, and any index of dot products can hold the vectors.
"""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.stats import rankdata

from stages.encoder.config import described_in, tokens_read
from stages.encoder.model import Encoder, load_for_inference
from stages.encoder.pipeline import PipelineEncoder
from stages.encoder.prompts import with_kind_prompts
from stages.encoder.settings import EncoderSettings, Precision
from stages.errors import UserError
from stages.kinds import Kind, Kinds
from stages.ranks.corpus import tiled_similarities
from stages.rows import unit_rows

WINDOW_TEXTS = 1024


class RankAwareEncoder:
    """An encoder whose vectors' dot products are Eq. 7; without a corpus they are cosines.

    Args:
        corpus_nD: the encoder's own unit vectors of the corpus sentences.
        basis_nk: compresses rank vectors; None keeps all n entries (4 n bytes a sentence).
        weight: w, between 0 (cosines) and 1 (ranks alone).
    """

    def __init__(
        self,
        encoder: Encoder | PipelineEncoder,
        corpus_nD: np.ndarray | None,
        basis_nk: np.ndarray | None,
        weight: float,
    ) -> None:
        self.encoder = encoder
        self._corpus = None if corpus_nD is None else unit_rows(corpus_nD)
        self._basis = basis_nk
        self._weight = weight

    def encode(self, texts: Sequence[str], kinds: Kinds = None) -> np.ndarray:
        """Vectors (N, D + n), (N, D + k) when compressed, or (N, D) without a corpus; float32.

        Raises:
            UserError: the corpus vectors have another dimension than the encoder's.
        """
        vectors = self.encoder.encode_unit(texts, kinds)
        if self._corpus is None:
            return vectors
        basis = self._basis
        width = len(self._corpus) if basis is None else basis.shape[1]
        out = np.empty((len(texts), vectors.shape[1] + width), dtype=np.float32)

        def use(rows: slice, scores_Tn: np.ndarray) -> None:
            factors = averaged_rank_factor(scores_Tn)
            factors = factors if basis is None else factors @ basis
            out[rows] = joined(vectors[rows], factors, self._weight)

        tiled_similarities(vectors, self._corpus, use)
        return out

    def similarity(self, left: Sequence[str], right: Sequence[str]) -> np.ndarray:
        """Similarities (len(left), len(right)) float32."""
        return np.asarray(self.encode(left) @ self.encode(right).T)


def averaged_rank_factor(scores_Tn: np.ndarray) -> np.ndarray:
    """As `rank_factor` of the scores, but with tied ranks averaged, as at inference (scipy's rule).

    A row of equal scores has no order: it becomes a zero vector, similar to nothing.
    """
    ranks = rankdata(scores_Tn, axis=1) - (scores_Tn.shape[1] + 1) / 2
    norms = np.linalg.norm(ranks, axis=1, keepdims=True)
    return np.divide(ranks, norms, out=np.zeros_like(ranks), where=norms > 0).astype(np.float32)


def joined(vectors_TD: np.ndarray, factors_Tk: np.ndarray, weight: float) -> np.ndarray:
    """Vectors (T, D + k) whose dot products are weight rho + (1 - weight) cos (Eq. 7)."""
    return np.hstack([math.sqrt(1 - weight) * vectors_TD, math.sqrt(weight) * factors_Tk])


def write_vectors(
    model: RankAwareEncoder, texts: Sequence[str], target: Path, kind: Kind | None = None
) -> tuple[int, int]:
    """Writes vectors (N, D') float32 as `.npy`, whole or not at all; returns their shape.

    Encodes 1,024 texts at a time and writes them as they come, so memory does not grow with N; not
    into a map of the file, where a full disk is a dead process and no error.
    """
    aside = target.with_name(f".tmp-{target.name}-{os.getpid()}")
    shape = (0, 0)
    try:
        with aside.open("wb") as file:
            for start in range(0, len(texts), WINDOW_TEXTS):
                rows = model.encode(texts[start : start + WINDOW_TEXTS], kind)
                if not start:
                    shape = (len(texts), rows.shape[1])
                    about = {"descr": "<f4", "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(file, about)
                file.write(np.ascontiguousarray(rows, "<f4").data)
            file.flush()
            os.fsync(file.fileno())
        assert all(shape)
        os.replace(aside, target)
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror})") from None
    finally:
        aside.unlink(missing_ok=True)
    return shape


def load_student(
    model: str | Path, rank_weight: float | None = None, precision: Precision = "float32"
) -> RankAwareEncoder:
    """An exported student with the corpus of its ranks, if it has one.

    Args:
        model: a folder that the export stage wrote, or any encoder that names its pooling.
        rank_weight: w of Eq. 7 instead of the exported one; 0 gives plain cosines.
        precision: type that the encoder computes in.

    Raises:
        UserError: no such model, or ranks asked of one that has none.
    """
    folder = Path(model).expanduser()
    if rank_weight is not None and not 0 <= rank_weight <= 1:
        raise UserError(f"the rank weight is {rank_weight}; it must be between 0 and 1")
    about = folder / "ranks.json"
    if not about.is_file() and rank_weight:
        raise UserError(f"model '{model}': it was exported without rank vectors")
    settings = EncoderSettings(model=str(model), precision=precision)
    settings = settings.model_copy(update={"max_length": tokens_read(described_in(settings))})
    encoder = load_for_inference(with_kind_prompts(settings))
    if not about.is_file():
        return RankAwareEncoder(encoder, None, None, 0.0)
    weight = json.loads(about.read_text())["inference_weight"]
    basis = folder / "basis.npy"
    return RankAwareEncoder(
        encoder,
        np.load(folder / "corpus.npy", mmap_mode="r", allow_pickle=False),
        np.load(basis, mmap_mode="r", allow_pickle=False) if basis.is_file() else None,
        weight if rank_weight is None else rank_weight,
    )
