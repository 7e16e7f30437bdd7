"""Transfer tasks (SentEval): frozen vectors, a linear classifier on top, accuracy.

Conneau and Kiela, SentEval (LREC 2018), as SimCSE's line of papers runs it; which rows choose the
penalty depends on the splits that a table has:
  no column `split`     nested folds: MR, CR, SUBJ, MPQA
  train, test           folds of train choose it, and 5% of train decides when to stop: TREC, MRPC
  train, dev, test      dev decides both: SST2
Vectors are as the encoder pools them: papers do not scale them to length 1.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field

from stages.contract import Figure, Work
from stages.errors import UserError
from stages.evaluate.base import Encode, Result, Tested
from stages.evaluate.resampling import Items
from stages.evaluate.senteval import transfer_rows
from stages.evaluate.tables import Labelled, LabelledTest, Row, finite_vectors, read_table
from stages.fields import InputPath

if TYPE_CHECKING:
    from torch import Tensor

    from stages.evaluate.classifiers import Fitted, Schedule

    Data = tuple[Tensor, Tensor]  # features (N, D) float32 and labels (N,), where they are used

Rows = tuple[np.ndarray, np.ndarray]

PENALTIES = (1e-5, 1e-4, 1e-3, 1e-2)
SEED = 1111  # of SentEval's folds
# BERT-base has 94 to 95.5 of SUBJ by SentEval's procedure. Figures of 99 and more came of a file
# that had lost nearly all rows of one label (SimCSE's repository, issue 84).
MOST_OF_SUBJ = 98.0


class TransferTest(LabelledTest):
    """Accuracy of a linear classifier on frozen vectors.

    Of two sentences it sees |a - b| and a * b.
    """

    what: ClassVar[str] = "transfer task"
    packages = ("scikit-learn", "scipy")

    path: InputPath | None = Field(
        None,
        description="A TSV (no quoting), CSV, JSONL or Parquet file with the columns label, text "
        "(or sentence1 and sentence2) and perhaps split; or a SentEval task folder.",
    )
    protocol: Literal["full", "fast"] = Field(
        "full",
        description="full: the papers' tables (ten folds, Adam); fast: SimCSE's dev mode (five "
        "folds, RMSprop).",
    )

    @property
    def title(self) -> str:
        return f"transfer-{self.name}"

    def read_path(self, path: Path) -> list[Row]:
        return transfer_rows(path) if path.is_dir() else read_table(path)

    def load(self) -> dict[str, Labelled]:
        """The examples by split: test, and train and dev where they are there.

        Raises:
            UserError: as `read`; a label is too rare for the folds, or only in the tested rows.
        """
        found = self.read(("train", "dev"))
        splits = set(found)
        if "dev" in splits and "train" not in splits:
            raise UserError(f"{self.where}: there is a split dev and no train; rename it to train")
        chosen = found["train" if "train" in found else "test"]
        num_folds = 1 if "dev" in found else 10 if self.protocol == "full" else 5
        counts = np.bincount(chosen.labels, minlength=len(chosen.names))
        if not counts.all():
            label = chosen.names[int(counts.argmin())]
            raise UserError(
                f"{self.where}: the label '{label}' is not in the split train; add examples "
                "or leave it out"
            )
        # nested: each of the outer folds' training parts is cut again
        need = num_folds if "train" in found else -(-num_folds * num_folds // (num_folds - 1))
        if counts.min() < need:
            raise UserError(
                f"{self.where}: only {counts.min()} rows have the label "
                f"'{chosen.names[int(counts.argmin())]}', too few for {num_folds} folds; "
                f"it takes {need} (under `evaluate.classification`, few-shot, 8 of a label do)"
            )
        rows = len(chosen.labels) if "train" in found else len(chosen.labels) * 9 // 10
        if rows < 23 and "dev" not in found:
            raise UserError(
                f"{self.where}: only {len(chosen.labels)} rows to learn from, of which 5% decide "
                f"when to stop; it takes {23 if 'train' in found else 26}"
            )
        return {split: in_sentevals_order(one) for split, one in found.items()}

    @property
    def schedule(self) -> "Schedule":
        from stages.evaluate.classifiers import FAST, FULL

        return FULL if self.protocol == "full" else FAST

    def score(self, tested: Tested, work: Work) -> Result:
        splits = self.load()
        work.say(f"{self.name}: {sum(len(one.texts) for one in splits.values()):,} examples")
        result = score_transfer(self.name, splits, tested.as_pooled, self.schedule)
        notes = list(result.notes)
        if self.protocol == "fast":
            notes.append(f"{self.name}: SimCSE's dev mode, not what papers' tables are made with.")
        if self.name.upper() == "SUBJ" and result.figures[0].value > MOST_OF_SUBJ:
            notes.append(
                f"{self.name}: above {MOST_OF_SUBJ:g}, where BERT-base has 94 to 95.5. Count its "
                "rows: SentEval has 5,000 of each label."
            )
        return replace(result, notes=tuple(notes))


def in_sentevals_order(examples: Labelled) -> Labelled:
    """By words of the texts, then label: the order from which SentEval makes its folds."""

    def key(row: int) -> tuple[int, ...]:
        # a period alone is the empty line that SentEval counts as no word
        words = (len(text.split()) if text != "." else 0 for text in examples.texts[row])
        return (*words, int(examples.labels[row]))

    return examples.of(np.array(sorted(range(len(examples.texts)), key=key)))


def score_transfer(
    name: str, splits: dict[str, Labelled], encode: Encode, schedule: "Schedule"
) -> Result:
    """Accuracy x 100; nested folds: the mean of ten (five).

    Its interval is Wilson's for as many rows as were tested: a classifier's own spread is not in.
    """
    from scipy.stats import binomtest

    data = _on_device(splits, encode)
    right = _official(data, schedule) if "train" in splits else _nested(data["test"], schedule)
    value = 100 * float(np.mean([part.mean() for part in right]))
    hits = np.concatenate(right)
    interval = binomtest(int(hits.sum()), len(hits)).proportion_ci(method="wilson")
    figure = Figure(
        name, value, interval=(100 * interval.low, 100 * interval.high), percent=True,
        averaged="transfer",
    )  # fmt: skip
    note = "Transfer: accuracy x 100 of a linear classifier on frozen vectors."
    items = {name: Items("mean", hits.astype(np.float32))}
    return Result([figure], (note,), {"num_tested": len(hits)}, items)


def learned(splits: dict[str, Labelled]) -> dict[str, Labelled]:
    """Without the split test, where there is a split train."""
    return {name: one for name, one in splits.items() if name != "test" or "train" not in splits}


def dev_accuracy(splits: dict[str, Labelled], encode: Encode, schedule: "Schedule") -> float:
    """SentEval's `devacc` x 100: with the best penalty, of the rows by which it is chosen.

    Nested folds: the mean over the outer ones.

    Args:
        splits: that are `learned`.
    """
    data = _on_device(splits, encode)
    if "train" in splits:
        accuracies = [_official_tries(data, schedule).accuracy]
    else:
        _, accuracies = _nested_tries(data["test"], schedule)
    return float(np.mean([_means(one).max() for one in accuracies]))


def features(splits: dict[str, Labelled], encode: Encode) -> dict[str, np.ndarray]:
    """What classifiers see of each split: float32 (N, D), of two sentences (N, 2 D)."""
    texts = [text for one in splits.values() for example in one.texts for text in example]
    vectors = finite_vectors(texts, encode).astype(np.float32)
    found, start = {}, 0
    for name, one in splits.items():
        count, sides = len(one.texts), len(one.texts[0])
        own = vectors[start : start + count * sides].reshape(count, sides, -1)
        start += count * sides
        if sides == 1:
            found[name] = own[:, 0]
        else:
            left, right = own[:, 0], own[:, 1]
            found[name] = np.concatenate([np.abs(left - right), left * right], axis=1)
    return found


def _on_device(splits: dict[str, Labelled], encode: Encode) -> "dict[str, Data]":
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        name: (torch.from_numpy(one).to(device), torch.from_numpy(splits[name].labels).to(device))
        for name, one in features(splits, encode).items()
    }


def _nested(data: "Data", schedule: "Schedule") -> list[np.ndarray]:
    """Which rows are right, by outer fold, each with the penalty that its inner folds chose."""
    from stages.evaluate.classifiers import Fold, correct, fit

    outer, accuracies = _nested_tries(data, schedule)
    best = np.array([[_best(one)] for one in accuracies])
    fitted = fit(*data, [Fold.drawn(rows) for rows, _ in outer], best, schedule)
    return [
        correct(data[0][rows], data[1][rows], fitted.weights[place, 0])
        for place, (_, rows) in enumerate(outer)
    ]


def _nested_tries(data: "Data", schedule: "Schedule") -> tuple[list[Rows], list[np.ndarray]]:
    """Rows of the outer folds, and of each every penalty's accuracy (F, P) on its inner folds."""
    from stages.evaluate.classifiers import Fold, fit

    labels, count = data[1].cpu().numpy(), schedule.num_folds
    outer = _stratified(np.arange(len(labels)), labels, count)
    inner = [Fold(*part) for rows, _ in outer for part in _stratified(rows, labels, count)]
    accuracy = fit(*data, inner, np.tile(PENALTIES, (len(inner), 1)), schedule).accuracy
    return outer, [*accuracy.reshape(count, count, -1)]


def _official(data: "dict[str, Data]", schedule: "Schedule") -> list[np.ndarray]:
    """Which rows of the split test are right."""
    from stages.evaluate.classifiers import Fold, correct, fit

    tried = _official_tries(data, schedule)
    best = _best(tried.accuracy)
    if "dev" in data:
        weights = tried.weights[0, PENALTIES.index(best)]
    else:
        fold = Fold.drawn(np.arange(len(data["train"][1])))
        weights = fit(*data["train"], [fold], np.array([[best]]), schedule).weights[0, 0]
    return [correct(*data["test"], weights)]


def _official_tries(data: "dict[str, Data]", schedule: "Schedule") -> "Fitted":
    """Every penalty, trained on the split train: on its folds, or all of it and tested on dev."""
    import torch

    from stages.evaluate.classifiers import Fold, fit

    features, labels = data["train"]
    rows = np.arange(len(labels))
    if "dev" in data:
        features, labels = (torch.cat(two) for two in zip(data["train"], data["dev"], strict=True))
        folds = [Fold(rows, np.arange(len(rows), len(labels)))]
    else:
        parts = _stratified(rows, labels.cpu().numpy(), schedule.num_folds)
        folds = [Fold(*part) for part in parts]
    return fit(features, labels, folds, np.tile(PENALTIES, (len(folds), 1)), schedule)


def _means(accuracy_FP: np.ndarray) -> np.ndarray:
    """Over folds, in percent, by penalty; to two digits, as SentEval chooses by them."""
    return np.round(100 * accuracy_FP.mean(0), 2)


def _best(accuracy_FP: np.ndarray) -> float:
    """The penalty of the best mean over folds; the least of several."""
    return PENALTIES[int(_means(accuracy_FP).argmax())]


def _stratified(rows: np.ndarray, labels_N: np.ndarray, count: int) -> list[Rows]:
    """The other rows and the rows of each fold."""
    from sklearn.model_selection import StratifiedKFold

    folds = StratifiedKFold(count, shuffle=True, random_state=SEED)
    return [(rows[a], rows[b]) for a, b in folds.split(rows, labels_N[rows])]
