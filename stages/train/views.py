"""What one training step feeds the student: views of the batch's sentences, and masked copies.

A view is the sentence with its template. View 1 and view 2 are the same sentence (dropout, or
another template, tells them apart); view 3, if there is one, is its negation. All are rows of one
forward pass, view by view. What is drawn at random here is drawn for the *global* batch from
(seed, step), so it does not depend on the number of workers.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stages.encoder.tokenizer import SentenceTokenizer, load_tokenizer, pad
from stages.evaluate.sts import StsSet
from stages.rows import FactorRows, TokenRows
from stages.train.order import BatchOrder
from stages.train.settings import Objectives, StudentSettings, TrainSettings


@dataclass(frozen=True)
class TrainingData:
    """Memory-mapped inputs of training; every worker opens them by itself.

    negated: tokens of each sentence's negation, when the recipe has soft negatives.
    """

    tokens: TokenRows
    factors: list[FactorRows]
    teacher_weights: list[float]
    dev: StsSet | None
    negated: TokenRows | None = None


@dataclass(frozen=True)
class Batch:
    """Rows of one worker (b sentences, V views) and teacher factors of the global batch (B).

    masked: by objective, masked copies (2 b, L) of the first two views and where they were chosen.
    """

    ids_VbL: Tensor
    mask_VbL: Tensor
    masked: dict[str, tuple[Tensor, Tensor]]
    factors_BD: list[Tensor]
    num_tokens: int


def view_tokenizers(settings: StudentSettings) -> list[SentenceTokenizer]:
    """Tokenizer of view 1 and of view 2 (and 3): the same one with other templates."""
    return [load_tokenizer(view) for view in settings.view_settings()]


def mask_ratios(objectives: Objectives) -> dict[str, float]:
    """Share of masked tokens of every objective that wants a masked copy."""
    wanted = ("masked_language", "replaced_token")
    found = {name: getattr(objectives, name) for name in wanted}
    return {name: one.mask_ratio for name, one in found.items() if one is not None}


class BatchReader:
    """Reads the batches of one worker, the next one while this one trains."""

    def __init__(
        self,
        settings: TrainSettings,
        data: TrainingData,
        tokenizers: list[SentenceTokenizer],
        worker: tuple[int, int],
        device: torch.device,
    ) -> None:
        self._settings = settings
        self._data = data
        self._tokenizers = tokenizers
        self._device = device
        self._order = BatchOrder(data.tokens.num_rows, settings.batch_size, settings.seed)
        self._ratios = mask_ratios(settings.objectives)
        rank, num_workers = worker
        share = settings.batch_size // num_workers
        self._own = slice(rank * share, (rank + 1) * share)

    def __call__(self, steps: range) -> Iterator[tuple[int, Batch]]:
        with ThreadPoolExecutor(max_workers=1) as pool:
            pending = pool.submit(self._read, steps[0]) if steps else None
            for step in steps:
                assert pending is not None
                batch = pending.result()
                if step + 1 < steps.stop:
                    pending = pool.submit(self._read, step + 1)
                yield step, batch

    def _read(self, step: int) -> Batch:
        rows = self._order.rows(step)
        first, second = self._tokenizers
        sentences = self._data.tokens.take(rows[self._own])
        views = first.wrap(sentences) + second.wrap(sentences)
        if self._data.negated is not None:
            views += second.wrap(self._data.negated.take(rows[self._own]))
        ids, mask = pad(views, first.pad_id)
        masked = {
            name: self._masked(ids[: 2 * len(sentences)], step, number, ratio)
            for number, (name, ratio) in enumerate(self._ratios.items())
        }
        factors = self._data.factors if self._settings.objectives.needs_teacher else []
        return Batch(
            self._to_device(ids),
            self._to_device(mask),
            {name: (self._to_device(x), self._to_device(y)) for name, (x, y) in masked.items()},
            [self._to_device(factor.take(rows)) for factor in factors],
            int(mask.sum()),
        )

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    def _masked(
        self, ids_2bL: np.ndarray, step: int, number: int, ratio: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """BERT's corruption: of `ratio` of the plain tokens 80% masked, 10% random, 10% kept."""
        tokenizer = self._tokenizers[0]
        size, width = self._settings.batch_size, tokenizer.settings.max_length
        draws = uniform(self._settings.seed, step, number, (2, size, width, 3))
        draws = draws[:, self._own].reshape(len(ids_2bL), width, 3)[:, : ids_2bL.shape[1]]
        plain = ~np.isin(ids_2bL, tokenizer.pretrained.all_special_ids)
        chosen = plain & (draws[..., 0] < ratio)
        how, which = draws[..., 1], draws[..., 2] * len(tokenizer.pretrained)
        masked = np.where(chosen & (how < 0.8), tokenizer.mask_id, ids_2bL)
        return np.where(chosen & (how >= 0.9), which.astype(np.int64), masked), chosen


def uniform(seed: int, step: int, stream: int, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers in [0, 1) float64, a pure function of (seed, step, stream), the same everywhere."""
    raw = np.random.Philox(key=[seed, (stream + 1 << 48) + step]).random_raw(int(np.prod(shape)))
    return (raw >> np.uint64(11)).reshape(shape) * 2.0**-53
