"""An encoder that embeds each text once, however many tests have it."""

from collections.abc import Sequence

import numpy as np

from stages.evaluate.base import Encode
from stages.kinds import Kind, Kinds, kind_of_each

# Vectors kept, 4 bytes a dimension: 0.3 GB at width 384
MOST = 200_000


class Remembered:
    """The encoder with a memory of MOST vectors; what would be too many is forgotten first."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._known: dict[tuple[str, Kind | None], np.ndarray] = {}

    def __call__(self, texts: Sequence[str], kinds: Kinds = None) -> np.ndarray:
        if not 0 < len(texts) <= MOST:  # a corpus is not copied
            return self._encode(texts, kinds)
        keys = list(zip(texts, kind_of_each(kinds, len(texts)), strict=True))
        missing = list(dict.fromkeys(key for key in keys if key not in self._known))
        found: dict[tuple[str, Kind | None], np.ndarray] = {}
        if missing:
            given = None if kinds is None else [kind for _, kind in missing]
            vectors = self._encode([text for text, _ in missing], given)
            found = dict(zip(missing, vectors, strict=True))
        rows = [found[key] if key in found else self._known[key] for key in keys]
        if len(self._known) + len(found) > MOST:
            self._known = {}
        self._known |= found
        return np.stack(rows)
