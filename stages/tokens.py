"""The student's token ids, computed once and memory-mapped by every training. Row-wise."""

from collections.abc import Sequence

import numpy as np

from stages.embed import npy_bytes
from stages.encoder.settings import EncoderSettings


class Tokeniser:
    """Sentences of a shard to flat ids and offsets. Loads the tokenizer, never the weights."""

    def __init__(self, settings: EncoderSettings) -> None:
        from stages.encoder.tokenizer import load_tokenizer

        self._tokenizer = load_tokenizer(settings)

    def __call__(self, texts: Sequence[str]) -> dict[str, bytes]:
        """`ids.npy` (all tokens,) uint16 or int32, `offsets.npy` (N + 1,) int64."""
        rows = self._tokenizer(texts)
        offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        ids = np.concatenate(rows)
        if len(self._tokenizer.pretrained) <= 1 << 16:
            ids = ids.astype(np.uint16)
        return {"ids.npy": npy_bytes(ids), "offsets.npy": npy_bytes(offsets)}
