"""SentEval's transfer tasks as SentEval runs them: one classifier after another, one row at a time.

Written from its published description (Conneau and Kiela 2018), for
the CPU; slow on purpose.
"""

import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.model_selection import StratifiedKFold
from torch import Tensor, nn

Config = dict[str, Any]
Examples = tuple[Tensor, Tensor]
PENALTIES = [10.0**exponent for exponent in range(-5, -1)]
FULL = dict(optimizer="adam", batch_size=64, tenacity=5, epoch_size=4, folds=10)
FAST = dict(optimizer="rmsprop", batch_size=128, tenacity=3, epoch_size=2, folds=5)


class Accuracies(NamedTuple):
    """x 100: of the tested rows, and of those by which penalties are chosen (`devacc`)."""

    tested: float
    dev: float


class Classifier:
    def __init__(self, width: int, num_labels: int, penalty: float, config: Config) -> None:
        np.random.seed(1111)
        torch.manual_seed(1111)
        self.model = nn.Sequential(nn.Linear(width, num_labels))
        kind, rate = {"adam": (torch.optim.Adam, 1e-3), "rmsprop": (torch.optim.RMSprop, 1e-2)}[
            config["optimizer"]
        ]
        self.optimizer = kind(self.model.parameters(), lr=rate, weight_decay=penalty)
        self.config = config

    def fit(self, x: Tensor, y: Tensor, dev: Examples | None = None, share: float = 0.05) -> float:
        """Accuracy on dev, or on a share of the rows that is held out."""
        if dev is None:
            order = np.random.permutation(len(x))
            count = int(share * len(x))
            dev = x[order[:count]], y[order[:count]]
            x, y = x[order[count:]], y[order[count:]]
        best, misses, epoch = -1.0, 0, 0
        size = self.config["batch_size"]
        while epoch <= 200:
            for _ in range(self.config["epoch_size"]):
                shuffled = torch.from_numpy(np.random.permutation(len(x)))
                for start in range(0, len(x), size):
                    rows = shuffled[start : start + size]
                    loss = nn.functional.cross_entropy(self.model(x[rows]), y[rows])
                    self.optimizer.zero_grad()
                    loss.backward()
                    self.optimizer.step()
            epoch += self.config["epoch_size"]
            accuracy = self.score(*dev)
            if accuracy > best:
                best, kept = accuracy, copy.deepcopy(self.model)
            else:
                if misses >= self.config["tenacity"]:
                    break
                misses += 1
        self.model = kept
        return best

    def score(self, x: Tensor, y: Tensor) -> float:
        with torch.no_grad():
            return (self.model(x).argmax(1) == y).double().mean().item()


def nested(x: Tensor, y: Tensor, config: Config) -> Accuracies:
    """Of tasks without splits."""
    num_labels, found, best = int(y.max()) + 1, [], []
    for train, test in _folds(x, y, config):
        scores = []
        for penalty in PENALTIES:
            inner = []
            for a, b in _folds(x[train], y[train], config):
                a, b = train[a], train[b]
                model = Classifier(x.shape[1], num_labels, penalty, config)
                inner.append(model.fit(x[a], y[a], dev=(x[b], y[b])))
            scores.append(round(100 * np.mean(inner), 2))
        model = Classifier(x.shape[1], num_labels, PENALTIES[np.argmax(scores)], config)
        model.fit(x[train], y[train])
        found.append(100 * model.score(x[test], y[test]))
        best.append(max(scores))
    return Accuracies(float(np.mean(found)), float(np.mean(best)))


def folds_then_test(x: Tensor, y: Tensor, test: Examples, config: Config) -> Accuracies:
    """Of tasks with a split for training and one for testing."""
    num_labels, scores = int(y.max()) + 1, []
    for penalty in PENALTIES:
        inner = []
        for a, b in _folds(x, y, config):
            model = Classifier(x.shape[1], num_labels, penalty, config)
            inner.append(model.fit(x[a], y[a], dev=(x[b], y[b])))
        scores.append(round(100 * np.mean(inner), 2))
    model = Classifier(x.shape[1], num_labels, PENALTIES[np.argmax(scores)], config)
    model.fit(x, y)
    return Accuracies(100 * model.score(*test), float(max(scores)))


def dev_then_test(
    x: Tensor, y: Tensor, dev: Examples, test: Examples, config: Config
) -> Accuracies:
    """Of tasks with three splits."""
    scores = []
    for penalty in PENALTIES:
        model = Classifier(x.shape[1], int(y.max()) + 1, penalty, config)
        scores.append(round(100 * model.fit(x, y, dev=dev), 2))
    model = Classifier(x.shape[1], int(y.max()) + 1, PENALTIES[np.argmax(scores)], config)
    model.fit(x, y, dev=dev)
    return Accuracies(100 * model.score(*test), float(max(scores)))


def _folds(x: Tensor, y: Tensor, config: Config) -> Any:
    folds = StratifiedKFold(config["folds"], shuffle=True, random_state=1111)
    return list(folds.split(x, y))
