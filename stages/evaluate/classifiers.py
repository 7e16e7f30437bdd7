"""Many small linear classifiers at once: folds x penalties as one batched tensor problem.

Each is trained as SentEval trains its own (tools/classifier.py with nhid 0): torch's first weights
for seed 1111, cross-entropy, Adam or RMSprop with the penalty as coupled weight decay, a new
permutation every epoch from a generator with that seed, accuracy on held-out rows every few epochs.
Classifiers of one fold share their batches; what has stopped is left out of later steps.

Memory: features once; 4 bytes x folds x batch x width for the batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

SEED = 1111
MAX_EPOCHS = 200


@dataclass(frozen=True)
class Schedule:
    """How a classifier is trained (SentEval's `classifier` settings).

    tenacity: it stops at the (tenacity + 1)-th check, over all of its training, that is not better
    than the best one before. epochs_per_check: epochs between two checks.
    """

    optimizer: str
    rate: float
    batch_size: int
    tenacity: int
    epochs_per_check: int
    num_folds: int


FULL = Schedule("adam", 1e-3, 64, 5, 4, 10)
FAST = Schedule("rmsprop", 1e-2, 128, 3, 2, 5)


@dataclass(frozen=True)
class Fold:
    """Rows to train on and rows (`held`) that decide when to stop."""

    train: np.ndarray
    held: np.ndarray
    random: np.random.RandomState = field(default_factory=lambda: np.random.RandomState(SEED))

    @classmethod
    def drawn(cls, rows: np.ndarray, share: float = 0.05) -> "Fold":
        """A share of the rows, at random, is held out; the permutations go on from there."""
        random = np.random.RandomState(SEED)
        order = random.permutation(len(rows))
        count = int(share * len(rows))
        return cls(rows[order[count:]], rows[order[:count]], random)


@dataclass(frozen=True)
class Fitted:
    """weights: (F, P, D + 1, K), the last of D + 1 rows is the bias; those of the best check.
    accuracy: (F, P) of the held-out rows then."""

    weights: Tensor
    accuracy: np.ndarray


def fit(
    features_ND: Tensor,
    labels_N: Tensor,
    folds: Sequence[Fold],
    penalties_FP: np.ndarray,
    schedule: Schedule,
) -> Fitted:
    """Trains a classifier for every fold and penalty.

    Args:
        features_ND: float32, on the device to train on. labels_N: int64, there
            too: 0 to K - 1.
        penalties_FP: weight decay of each classifier of each fold.
    """
    device = features_ND.device
    features = torch.cat([features_ND, features_ND.new_ones(len(features_ND), 1)], dim=1)
    decay = torch.tensor(penalties_FP, dtype=torch.float32, device=device)
    weights = first_weights(features_ND.shape[1], int(labels_N.max()) + 1).to(device)
    weights = weights.expand(*decay.shape, *weights.shape).clone()
    best_weights, best = weights.clone(), np.full(decay.shape, -1.0)
    misses, running = np.zeros(decay.shape, np.int64), np.ones(decay.shape, bool)
    alive = list(range(len(folds)))  # folds with a classifier that still runs
    update = _Update(schedule, weights, decay)
    epoch = 0
    while len(alive) and epoch <= MAX_EPOCHS:
        for _ in range(schedule.epochs_per_check):
            for rows, counts in _batches([folds[f] for f in alive], schedule.batch_size):
                inputs = features[rows.to(device)]
                gradient = _gradient(inputs, labels_N[rows.to(device)], counts.to(device), weights)
                update(weights, gradient, (counts > 0).to(device))
        epoch += schedule.epochs_per_check
        found = _accuracies(features, labels_N, [folds[f].held for f in alive], weights)
        better = found > best[alive]
        improved = running[alive] & better
        for place, penalty in np.argwhere(improved):
            best_weights[alive[place], penalty] = weights[place, penalty]
            best[alive[place], penalty] = found[place, penalty]
        worse = running[alive] & ~better
        running[alive] &= ~(worse & (misses[alive] >= schedule.tenacity))
        misses[alive] += worse
        kept = running[alive].any(1)
        if not kept.all():
            chosen = torch.from_numpy(np.flatnonzero(kept)).to(device)
            weights = weights[chosen]
            update.keep(chosen)
            alive = [alive[place] for place in chosen.tolist()]
    return Fitted(best_weights, best)


def first_weights(width: int, num_labels: int) -> Tensor:
    """(D + 1, K): what nn.Linear(D, K) begins with after torch.manual_seed(1111)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        layer = nn.Linear(width, num_labels)
    return torch.cat([layer.weight.detach().T, layer.bias.detach()[None]])


def correct(features_ND: Tensor, labels_N: Tensor, weights: Tensor) -> np.ndarray:
    """Which rows (N,) a classifier (D + 1, K) gets right."""
    scores = features_ND @ weights[:-1] + weights[-1]
    return np.asarray((scores.argmax(1) == labels_N).cpu().numpy())


def _batches(folds: Sequence[Fold], size: int) -> list[tuple[Tensor, Tensor]]:
    """One epoch: rows (F, B) of every fold and how many of them count; shorter folds are padded."""
    orders = [fold.train[fold.random.permutation(len(fold.train))] for fold in folds]
    longest = -(-max(map(len, orders)) // size) * size
    padded = np.zeros((len(orders), longest), np.int64)
    for place, order in enumerate(orders):
        padded[place, : len(order)] = order
    lengths = torch.tensor([len(order) for order in orders])
    return [
        (torch.from_numpy(padded[:, start : start + size]), (lengths - start).clamp(0, size))
        for start in range(0, longest, size)
    ]


def _gradient(inputs_FBD: Tensor, labels_FB: Tensor, counts_F: Tensor, weights: Tensor) -> Tensor:
    """Of the mean cross-entropy over the rows that count; (F, P, D + 1, K)."""
    num_folds, num_penalties, width, num_labels = weights.shape
    flat = weights.transpose(1, 2).reshape(num_folds, width, -1)
    scores = torch.bmm(inputs_FBD, flat).view(*labels_FB.shape, num_penalties, num_labels)
    slope = scores.softmax(-1)
    slope.scatter_add_(
        -1,
        labels_FB[:, :, None, None].expand(*slope.shape[:3], 1),
        slope.new_full((1,), -1.0).expand(*slope.shape[:3], 1),
    )
    counted = torch.arange(labels_FB.shape[1], device=slope.device) < counts_F[:, None]
    slope *= (counted / counts_F.clamp(min=1)[:, None])[:, :, None, None]
    found = torch.bmm(inputs_FBD.transpose(1, 2), slope.flatten(2))
    return found.view(num_folds, width, num_penalties, num_labels).transpose(1, 2)


class _Update:
    """torch.optim's Adam (betas 0.9, 0.999, eps 1e-8) or RMSprop (alpha 0.99, eps 1e-8), with the
    decay added to the gradient, for each classifier its own."""

    def __init__(self, schedule: Schedule, weights: Tensor, decay_FP: Tensor) -> None:
        self._adam, self._rate = schedule.optimizer == "adam", schedule.rate
        self._first, self._second = torch.zeros_like(weights), torch.zeros_like(weights)
        self._decay = decay_FP[:, :, None, None]
        self._steps = torch.zeros(len(weights), 1, 1, 1, dtype=torch.float64, device=weights.device)

    def __call__(self, weights: Tensor, gradient: Tensor, present_F: Tensor) -> None:
        """Changes the weights of those folds that have rows in this batch."""
        absent = torch.nonzero(~present_F)[:, 0]  # the last batch of an epoch, a shorter fold
        state = (weights, self._first, self._second, self._steps)
        before = [one[absent] for one in state]
        gradient = gradient + self._decay * weights
        self._steps += 1
        if self._adam:
            self._first.lerp_(gradient, 0.1)
            self._second.lerp_(gradient**2, 0.001)
            scale = (1 - 0.999**self._steps).sqrt().float()
            step = self._first / (1 - 0.9**self._steps).float()
            weights.addcdiv_(step, self._second.sqrt().div_(scale).add_(1e-8), value=-self._rate)
        else:
            self._second.lerp_(gradient**2, 0.01)
            weights.addcdiv_(gradient, self._second.sqrt().add_(1e-8), value=-self._rate)
        for one, kept in zip(state, before, strict=True):
            one[absent] = kept

    def keep(self, chosen: Tensor) -> None:
        """Only these folds go on."""
        self._first, self._second = self._first[chosen], self._second[chosen]
        self._decay, self._steps = self._decay[chosen], self._steps[chosen]


def _accuracies(
    features: Tensor, labels_N: Tensor, held: Sequence[np.ndarray], weights: Tensor
) -> np.ndarray:
    """(F, P): share of each fold's held-out rows that each classifier gets right."""
    found = np.empty(weights.shape[:2])
    for place, rows in enumerate(held):
        chosen = torch.from_numpy(rows).to(features.device)
        scores = torch.einsum("bd,pdk->pbk", features[chosen], weights[place])
        found[place] = (scores.argmax(-1) == labels_N[chosen]).double().mean(1).cpu().numpy()
    return found
