"""SentEval's transfer tasks as SentEval runs them: one classifier after another, one row at a time.

Written from its published description (Conneau and Kiela 2018), for
the CPU; slow on purpose.
"""

import copy

import numpy as np
import torch
from sklearn.model_selection import StratifiedKFold
from torch import nn

PENALTIES = [10.0**exponent for exponent in range(-5, -1)]
FULL = dict(optimizer="adam", batch_size=64, tenacity=5, epoch_size=4, folds=10)
FAST = dict(optimizer="rmsprop", batch_size=128, tenacity=3, epoch_size=2, folds=5)


class Classifier:
    def __init__(self, width, num_labels, penalty, config):
        np.random.seed(1111)
        torch.manual_seed(1111)
        self.model = nn.Sequential(nn.Linear(width, num_labels))
        kind, rate = {"adam": (torch.optim.Adam, 1e-3), "rmsprop": (torch.optim.RMSprop, 1e-2)}[
            config["optimizer"]
        ]
        self.optimizer = kind(self.model.parameters(), lr=rate, weight_decay=penalty)
        self.config = config

    def fit(self, x, y, dev=None, share=None):
        if dev is None:
            order = np.random.permutation(len(x))
            count = int(share * len(x))
            dev = x[order[:count]], y[order[:count]]
            x, y = x[order[count:]], y[order[count:]]
        best, misses, epoch = -1.0, 0, 0
        size = self.config["batch_size"]
        while epoch <= 200:
            for _ in range(self.config["epoch_size"]):
                order = torch.from_numpy(np.random.permutation(len(x)))
                for start in range(0, len(x), size):
                    rows = order[start : start + size]
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

    def score(self, x, y):
        with torch.no_grad():
            return (self.model(x).argmax(1) == y).double().mean().item()


def nested(x, y, config):
    """Accuracy x 100 of tasks without splits."""
    num_labels, found = int(y.max()) + 1, []
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
        model.fit(x[train], y[train], share=0.05)
        found.append(100 * model.score(x[test], y[test]))
    return np.mean(found)


def folds_then_test(x, y, test, config):
    """Accuracy x 100 of tasks with a split for training and one for testing."""
    num_labels, scores = int(y.max()) + 1, []
    for penalty in PENALTIES:
        inner = []
        for a, b in _folds(x, y, config):
            model = Classifier(x.shape[1], num_labels, penalty, config)
            inner.append(model.fit(x[a], y[a], dev=(x[b], y[b])))
        scores.append(round(100 * np.mean(inner), 2))
    model = Classifier(x.shape[1], num_labels, PENALTIES[np.argmax(scores)], config)
    model.fit(x, y, share=0.05)
    return 100 * model.score(*test)


def dev_then_test(x, y, dev, test, config):
    """Accuracy x 100 of tasks with three splits."""
    scores = []
    for penalty in PENALTIES:
        model = Classifier(x.shape[1], int(y.max()) + 1, penalty, config)
        scores.append(round(100 * model.fit(x, y, dev=dev), 2))
    model = Classifier(x.shape[1], int(y.max()) + 1, PENALTIES[np.argmax(scores)], config)
    model.fit(x, y, dev=dev)
    return 100 * model.score(*test)


def _folds(x, y, config):
    folds = StratifiedKFold(config["folds"], shuffle=True, random_state=1111)
    return list(folds.split(x, y))
