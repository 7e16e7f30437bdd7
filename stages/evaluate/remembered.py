"""An encoder that embeds each text once, however many tests have it."""

from collections.abc import Sequence

import numpy as np

from stages.evaluate.base import Encode
from stages.kinds import Kind, Kinds, kind_of_each

# Of the vectors kept: 200,000 of width 384, 7,000 rank vectors over 10,000 sentences
MOST_BYTES = 300 << 20
FEW = 4096  # more are not embedded before it is known how long a vector is


class Remembered:
    """The encoder with a memory of MOST_BYTES; what would be too much is forgotten first."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._known: dict[tuple[str, Kind | None], np.ndarray] = {}
        self._bytes_each = 0  # of a vector, once it is known

    def __call__(self, texts: Sequence[str], kinds: Kinds = None) -> np.ndarray:
        if len(texts) > FEW and not self._bytes_each:
            self._bytes_each = self._encode(texts[:1], kind_of_each(kinds, len(texts))[:1]).nbytes
        if not texts or len(texts) * self._bytes_each > MOST_BYTES:  # a corpus is not copied
            return self._encode(texts, kinds)
        keys = list(zip(texts, kind_of_each(kinds, len(texts)), strict=True))
        missing = list(dict.fromkeys(key for key in keys if key not in self._known))
        found: dict[tuple[str, Kind | None], np.ndarray] = {}
        if missing:
            given = None if kinds is None else [kind for _, kind in missing]
            vectors = self._encode([text for text, _ in missing], given)
            found = dict(zip(missing, vectors, strict=True))
            self._bytes_each = vectors[0].nbytes
        rows = [found[key] if key in found else self._known[key] for key in keys]
        if (len(self._known) + len(found)) * self._bytes_each > MOST_BYTES:
            self._known = {}
        if len(found) * self._bytes_each <= MOST_BYTES:
            self._known |= found
        return np.stack(rows)
