"""Which rows form global batch s: a pure function of (seed, epoch, batch size, corpus size)."""

import numpy as np


class BatchOrder:
    """Batches without replacement inside an epoch; the partial batch at its end is left out.

    Memory: 4 bytes a row (8 beyond 2^31 rows), and 20 while an epoch's permutation is made. That
    sorts raw Philox output, which NumPy keeps stable over versions, unlike `Generator.permutation`.
    """

    def __init__(self, num_rows: int, batch_size: int, seed: int) -> None:
        self._num_rows = num_rows
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = -1
        self._dtype = np.int32 if num_rows < 2**31 else np.int64
        self._permutation = np.empty(0, dtype=self._dtype)

    def rows(self, step: int) -> np.ndarray:
        """Row numbers (batch_size,) int64 of global batch `step`, counted over all epochs."""
        epoch, place = divmod(step, self._num_rows // self._batch_size)
        if epoch != self._epoch:
            self._permutation = self._permutation[:0].copy()  # the old one goes first
            keys = np.random.Philox(key=[self._seed, epoch]).random_raw(self._num_rows)
            order = np.argsort(keys, kind="stable")
            del keys
            self._permutation = order.astype(self._dtype)
            self._epoch = epoch
        some = slice(place * self._batch_size, (place + 1) * self._batch_size)
        return self._permutation[some].astype(np.int64)
