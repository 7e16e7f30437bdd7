"""The student's token ids, computed once and memory-mapped by every training. Row-wise.

Stored without special tokens and template, which training puts around them: one view may have
another template than the other.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np

from stages.negation import Negator
from stages.rows import npy_bytes
from stages.train.settings import StudentSettings


class Tokeniser:
    """Sentences of a shard to flat ids and offsets. Loads the tokenizer, never the weights.

    Args:
        negate: tokens of the sentences' negations instead (SNCSE's soft negatives).
    """

    def __init__(self, settings: StudentSettings, negate: bool = False) -> None:
        from stages.train.views import view_tokenizers

        self._tokenizers = view_tokenizers(settings)
        self._negator = Negator() if negate else None

    def __call__(self, texts: Sequence[str]) -> dict[str, bytes]:
        """`ids.npy` (all tokens,) uint16 or int32, `offsets.npy` (N + 1,) int64."""
        if self._negator is not None:
            texts = self._negator(texts)
        room = min(tokenizer.room for tokenizer in self._tokenizers)
        rows = self._tokenizers[0].sentence_ids(texts, room)
        offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        small = len(self._tokenizers[0].pretrained) <= 1 << 16
        dtype = np.uint16 if small else np.int32
        ids = np.fromiter(chain.from_iterable(rows), dtype, count=offsets[-1])
        return {"ids.npy": npy_bytes(ids), "offsets.npy": npy_bytes(offsets)}
