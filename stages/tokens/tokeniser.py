"""The student's token ids, computed once and memory-mapped by every training. Row-wise.

Stored with their prompts, and without special tokens and template, which training puts around
them: one view may have another template than the other.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np

from stages.encoder.settings import EncoderSettings
from stages.encoder.tokenizer import load_view_tokenizers
from stages.kinds import Kinds
from stages.rows import npy_bytes


class Tokeniser:
    """Sentences of a shard to flat ids and offsets. Loads the tokenizer, never the weights.

    Args:
        views: the encoder of every view, which may have templates of their own; the longest one
            leaves the least room for a sentence.
    """

    def __init__(self, views: Sequence[EncoderSettings]) -> None:
        self._tokenizers = load_view_tokenizers(views)
        last = max(self._tokenizers[0].pretrained.get_vocab().values(), default=0)  # ids have gaps
        self._dtype = np.uint16 if last < 1 << 16 else np.int32

    def __call__(self, texts: Sequence[str], kinds: Kinds = None) -> dict[str, bytes]:
        """`ids.npy` (all tokens,) uint16 or int32, `offsets.npy` (N + 1,) int64."""
        room = min(tokenizer.room for tokenizer in self._tokenizers)
        rows = self._tokenizers[0].sentence_ids(texts, room, kinds)
        offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        ids = np.fromiter(chain.from_iterable(rows), self._dtype, count=offsets[-1])
        return {"ids.npy": npy_bytes(ids), "offsets.npy": npy_bytes(offsets)}
