"""Teacher factors: every sentence through an encoder. Row-wise: shard in, shard out."""

from collections.abc import Callable, Sequence

import numpy as np

from stages.embed.basis import reduced
from stages.encoder.settings import EncoderSettings
from stages.errors import UserError
from stages.kinds import Kinds
from stages.rows import npy_bytes, unit_rows, without_direction


class Embedder:
    """Sentences of a shard to factor rows; loads its encoder once and keeps it.

    Args:
        count: told the tokens and positions of every batch.
        basis_Dk: what the factors are reduced to; None keeps them whole.
    """

    def __init__(
        self,
        settings: EncoderSettings,
        count: Callable[[int, int], None] | None = None,
        basis_Dk: np.ndarray | None = None,
    ) -> None:
        from stages.encoder.model import load_for_inference

        self._count, self._basis = count, basis_Dk
        self._encoder = load_for_inference(settings)
        self._model = settings.model
        narrow = settings.precision != "float32"
        self._mend = "; try precision: float32" if narrow else ". Are its weights whole?"
        self.arithmetic = self._encoder.arithmetic
        self.dimension = self._encoder.dimension

    def __call__(self, texts: Sequence[str], kinds: Kinds = None) -> dict[str, bytes]:
        """`factors.npy`: unit rows (N, D) fp16, or reduced ones (N, k); raises like `units`."""
        return {"factors.npy": npy_bytes(reduced(self.units(texts, kinds), self._basis))}

    def units(self, texts: Sequence[str], kinds: Kinds = None) -> np.ndarray:
        """Unit vectors (N, D) float32.

        Raises:
            UserError: the encoder gives vectors that are not finite or have no direction.
        """
        vectors = self._encoder.encode(texts, kinds, self._count)
        norms = np.linalg.norm(vectors, axis=1)
        bad = without_direction(norms)
        if len(bad):
            raise UserError(
                f"model '{self._model}': gives no usable vector for {len(bad)} sentences, "
                f"the first being {texts[bad[0]]!r}{self._mend}"
            )
        return unit_rows(vectors)
