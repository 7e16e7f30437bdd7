"""Which rows form global batch s: a pure function of (seed, epoch, batch size, corpus size)."""

import numpy as np


class BatchOrder:
    """Batches without replacement inside an epoch; the partial batch at its end is left out.

    Holds one permutation (8 bytes a row) at a time. The permutation sorts raw Philox output,
    which NumPy keeps stable over versions, unlike `Generator.permutation`.
    """

    def __init__(self, num_rows: int, batch_size: int, seed: int) -> None:
        self._num_rows = num_rows
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = -1
        self._permutation = np.empty(0, dtype=np.int64)

    def rows(self, step: int) -> np.ndarray:
        """Row numbers (batch_size,) int64 of global batch `step`, counted over all epochs."""
        epoch, place = divmod(step, self._num_rows // self._batch_size)
        if epoch != self._epoch:
            keys = np.random.Philox(key=[self._seed, epoch]).random_raw(self._num_rows)
            self._permutation = np.argsort(keys, kind="stable")
            self._epoch = epoch
        return self._permutation[place * self._batch_size : (place + 1) * self._batch_size]
