"""What one training step feeds the student: views of the batch's sentences, and masked copies.

A view is a sentence with its template. View 1 and view 2 are the same sentence (dropout, or another
template, tells them apart), or one of them is a rewrite of it; its negation and a hard negative may
follow. Where nothing tells views 1 and 2 apart, or nobody reads view 2, there is only view 1. All
are rows of one forward pass, view by view. What is drawn at random here is drawn for the *global*
batch from (seed, step), so it does not depend on the number of workers.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, reduce

import numpy as np
import torch
from torch import Tensor

from stages.encoder.tokenizer import SentenceTokenizer, pad
from stages.evaluate.sets import StsSet
from stages.evaluate.transfer import TransferTest
from stages.rows import FactorRows, OwnedRows, TokenRows
from stages.train.order import BatchOrder
from stages.train.settings import Objectives, TrainSettings

# Streams of `uniform`, behind those of the objectives that mask
REWRITE_STREAM, NEGATIVE_STREAM = 100, 101


@dataclass(frozen=True)
class TrainingData:
    """Memory-mapped inputs of training; every worker opens them by itself.

    dev: the STS sets that checkpoints are chosen on, maybe none; transfer: and transfer tasks.
    views: tokens of further views of each sentence, by name, as objectives ask for them.
    num_held_out: of the first sentences, which are not trained on.
    rewrites, negatives: tokens of each sentence's rewrites and hard negatives; only sentences that
        have them take part in training.
    """

    tokens: TokenRows
    factors: list[FactorRows]
    teacher_weights: list[float]
    dev: list[StsSet]
    views: dict[str, TokenRows] = field(default_factory=dict)
    rewrites: OwnedRows | None = None
    negatives: OwnedRows | None = None
    num_held_out: int = 0
    transfer: Sequence[TransferTest] = ()

    @cached_property
    def _owners(self) -> np.ndarray | None:
        """Sentences that have what must be there (int64, ascending); None: all of them."""
        owned = [one.owners for one in (self.rewrites, self.negatives) if one is not None]
        if not owned:
            return None
        owners: np.ndarray = reduce(np.intersect1d, owned)
        return owners[owners >= self.num_held_out]

    @property
    def num_rows(self) -> int:
        """Sentences that take part."""
        if self._owners is None:
            return self.tokens.num_rows - self.num_held_out
        return len(self._owners)

    def sentences(self, places: np.ndarray) -> np.ndarray:
        """Row numbers of sentences by their place (int64) among those that take part."""
        return places + self.num_held_out if self._owners is None else self._owners[places]


@dataclass(frozen=True)
class Batch:
    """Rows of one worker (b sentences, V views) and teacher factors of the global batch (B).

    own: which of the global batch are this worker's.
    masked: by objective, masked copies of views 1 and 2 (2 b, L), or of view 1 where there is no
        other, and where they were chosen.
    """

    ids_VbL: Tensor
    mask_VbL: Tensor
    masked: dict[str, tuple[Tensor, Tensor]]
    factors_BD: list[Tensor]
    own: slice
    num_tokens: int


def view_names(objectives: Objectives, differ: bool) -> tuple[str, ...]:
    """The views of a batch, in order.

    Args:
        differ: whether a second view would be another than the first.
    """
    names = ["first", *["second"] * (objectives.needs_second and differ)]
    names += [view.name for view in objectives.views]
    if objectives.needs_negatives:
        names.append("negative")
    return tuple(names)


def mask_ratios(objectives: Objectives) -> dict[str, float]:
    """Share of masked tokens of every objective that wants a masked copy."""
    found = {name: one.masked_share for name, one in objectives.chosen.items()}
    return {name: share for name, share in found.items() if share is not None}


class BatchReader:
    """Reads the batches of one worker, the next one while this one trains."""

    def __init__(
        self,
        settings: TrainSettings,
        data: TrainingData,
        tokenizers: list[SentenceTokenizer],
        views: tuple[str, ...],
        worker: tuple[int, int],
        device: torch.device,
    ) -> None:
        self._settings = settings
        self._data = data
        self._tokenizers = tokenizers
        self._plain = 1 + ("second" in views)
        self._device = device
        self._order = BatchOrder(data.num_rows, settings.batch_size, settings.seed)
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
        rows = self._data.sentences(self._order.rows(step))
        first, second = self._tokenizers
        own = rows[self._own]
        contents = self._contents(own, step)
        # further views have the second one's template
        views = [*first.wrap(contents[0]), *(r for c in contents[1:] for r in second.wrap(c))]
        ids, mask = pad(views, first.pad_id)
        masked = {
            name: self._masked(ids[: self._plain * len(own)], step, number, ratio)
            for number, (name, ratio) in enumerate(self._ratios.items())
        }
        factors = self._data.factors if self._settings.objectives.needs_teacher else []
        return Batch(
            self._to_device(ids),
            self._to_device(mask),
            {name: (self._to_device(x), self._to_device(y)) for name, (x, y) in masked.items()},
            [self._to_device(factor.take(rows)) for factor in factors],
            self._own,
            int(mask.sum()),
        )

    def _contents(self, own: np.ndarray, step: int) -> list[list[np.ndarray]]:
        """Token ids of every view of these sentences, view by view."""
        data = self._data
        sentences = data.tokens.take(own)
        contents = [sentences] * self._plain
        number = {"first": 0, "second": 1, "none": 2}[self._settings.rewritten_view]
        if data.rewrites is not None and number < len(contents):
            contents[number] = data.rewrites.take(own, self._draws(step, REWRITE_STREAM))
        contents += [tokens.take(own) for tokens in data.views.values()]
        if data.negatives is not None:
            contents.append(data.negatives.take(own, self._draws(step, NEGATIVE_STREAM)))
        return contents

    def _draws(self, step: int, stream: int) -> np.ndarray:
        return uniform(self._settings.seed, step, stream, (self._settings.batch_size,))[self._own]

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    def _masked(
        self, ids_bL: np.ndarray, step: int, number: int, ratio: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """BERT's corruption: of `ratio` of the plain tokens 80% masked, 10% random, 10% kept."""
        tokenizer = self._tokenizers[0]
        size, width = self._settings.batch_size, tokenizer.settings.max_length
        draws = uniform(self._settings.seed, step, number, (self._plain, size, width, 3))
        draws = draws[:, self._own].reshape(len(ids_bL), width, 3)[:, : ids_bL.shape[1]]
        plain = ~np.isin(ids_bL, tokenizer.pretrained.all_special_ids)
        chosen = plain & (draws[..., 0] < ratio)
        how, which = draws[..., 1], draws[..., 2] * len(tokenizer.pretrained)
        masked = np.where(chosen & (how < 0.8), tokenizer.mask_id, ids_bL)
        return np.where(chosen & (how >= 0.9), which.astype(np.int64), masked), chosen


def uniform(seed: int, step: int, stream: int, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers in [0, 1) float64, a pure function of (seed, step, stream), the same everywhere."""
    raw = np.random.Philox(key=[seed, (stream + 1 << 48) + step]).random_raw(int(np.prod(shape)))
    return (raw >> np.uint64(11)).reshape(shape) * 2.0**-53
