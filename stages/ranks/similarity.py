"""Rank-aware similarity when a student is used (RankEncoder Eq. 7).

    from stages.ranks.similarity import load_student
    model = load_student("runs/students/wiki-ranks")
    print(model.similarity(["A man eats."], ["Somebody has lunch."]))

sim(x, y) = w rho(x, y) + (1 - w) cos(x, y) is one dot product: of the unit vector of x, scaled by
sqrt(1 - w), beside its rank factor, scaled by sqrt(w). So a sentence's ranks are computed once,
whatever it is compared with, and any index of dot products can hold the vectors.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from stages.encoder.model import Encoder, load_for_inference
from stages.encoder.settings import EncoderSettings
from stages.errors import UserError
from stages.ranks.corpus import tiled_similarities
from stages.ranks.positions import averaged_rank_factor


class RankAwareEncoder:
    """An encoder whose vectors' dot products are Eq. 7; without a corpus they are cosines.

    Args:
        corpus_nD: the encoder's own unit vectors of the corpus sentences.
        basis_nk: compresses rank vectors; None keeps all n entries (4 n bytes a sentence).
        weight: w, between 0 (cosines) and 1 (ranks alone).
    """

    def __init__(
        self,
        encoder: Encoder,
        corpus_nD: np.ndarray | None,
        basis_nk: np.ndarray | None,
        weight: float,
    ) -> None:
        self.encoder = encoder
        self._corpus = corpus_nD
        self._basis = basis_nk
        self._weight = weight

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors (N, D + n), (N, D + k) when compressed, or (N, D) without a corpus; float32.

        Raises:
            UserError: the corpus vectors have another dimension than the encoder's.
        """
        vectors = self.encoder.encode_unit(texts)
        if self._corpus is None:
            return vectors
        basis = self._basis
        width = len(self._corpus) if basis is None else basis.shape[1]
        factors = np.empty((len(texts), width), dtype=np.float32)

        def use(rows: slice, scores_Tn: np.ndarray) -> None:
            exact = averaged_rank_factor(scores_Tn)
            factors[rows] = exact if basis is None else exact @ basis

        tiled_similarities(vectors, self._corpus, use)
        return np.hstack([np.sqrt(1 - self._weight) * vectors, np.sqrt(self._weight) * factors])

    def similarity(self, left: Sequence[str], right: Sequence[str]) -> np.ndarray:
        """Similarities (len(left), len(right)) float32."""
        return np.asarray(self.encode(left) @ self.encode(right).T)


def load_student(model: str | Path, rank_weight: float | None = None) -> RankAwareEncoder:
    """An exported student with the corpus of its ranks, if it has one.

    Args:
        model: a folder that the export stage wrote, or any encoder that names its pooling.
        rank_weight: w of Eq. 7 instead of the exported one; 0 gives plain cosines.

    Raises:
        UserError: no such model, or ranks asked of one that has none.
    """
    folder = Path(model).expanduser()
    if rank_weight is not None and not 0 <= rank_weight <= 1:
        raise UserError(f"the rank weight is {rank_weight}; it must be between 0 and 1")
    about = folder / "ranks.json"
    if not about.is_file() and rank_weight:
        raise UserError(f"model '{model}': it was exported without rank vectors")
    length = folder / "sentence_bert_config.json"
    limits = {}
    if length.is_file():
        limits["max_length"] = json.loads(length.read_text())["max_seq_length"]
    encoder = load_for_inference(EncoderSettings(model=str(model), **limits))
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
