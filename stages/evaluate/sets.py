"""Sets for semantic textual similarity: settings, and reading them. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import Field, FiniteFloat

from stages.errors import UserError
from stages.evaluate.senteval import sts_rows
from stages.evaluate.tables import Row, TableSettings, read_table
from stages.fields import InputPath
from stages.plain import shortened
from stages.settings import added


class StsSettings(TableSettings):
    """A set for semantic textual similarity: pairs of sentences with gold scores."""

    what: ClassVar[str] = "STS set"

    path: InputPath | None = Field(
        None,
        description="A TSV (no quoting), CSV, JSONL or Parquet file with the columns sentence1, "
        "sentence2, score and, if you like, subset and split; or a SentEval task folder.",
    )
    split: str | None = Field(
        None, description="Keep only the rows whose column `split` has this value."
    )

    min_score: FiniteFloat | None = added(
        None, description="Keep only the pairs with this gold score or a higher one."
    )
    max_score: FiniteFloat | None = added(
        None, description="Keep only the pairs with this gold score or a lower one."
    )

    def load(self) -> object:
        return load_sts(self)

    def read_path(self, path: Path) -> list[Row]:
        return sts_rows(path) if path.is_dir() else read_table(path)


def check_names_differ(sets: Sequence[TableSettings]) -> None:
    """Raises ValueError where two test sets have one name: results are kept by name."""
    names = [one.name for one in sets]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two sets are called '{twice[0]}'")


@dataclass(frozen=True)
class StsSet:
    """Pairs with gold scores; all four sequences have one entry per pair."""

    name: str
    sentence1: list[str]
    sentence2: list[str]
    gold: np.ndarray
    subset: list[str]


def load_sts(settings: StsSettings) -> StsSet:
    """Reads and checks an STS set. White space is squeezed; rows without a score are dropped.

    Raises:
        UserError: missing file or column, a score that is no number, no rows left, scores that are
            all alike.
    """
    rows = settings.rows(("sentence1", "sentence2", "score"), [settings.split or "test"])
    sentence1, sentence2, gold, subset = [], [], [], []
    for number, row in enumerate(rows, start=1):
        if settings.split is not None and row.get("split") != settings.split:
            continue
        score = row.get("score")
        if score is None or score == "":
            continue
        try:
            value = float(score)
        except (TypeError, ValueError):
            value = float("nan")
        if not np.isfinite(value):
            raise UserError(
                f"{settings.where}, row {number}: the score is {shortened(repr(score))}, which is "
                "not a number"
            )
        if settings.min_score is not None and value < settings.min_score:
            continue
        if settings.max_score is not None and value > settings.max_score:
            continue
        sentence1.append(settings.text(row, "sentence1", number))
        sentence2.append(settings.text(row, "sentence2", number))
        gold.append(value)
        subset.append("" if row.get("subset") is None else str(row["subset"]))
    which = f" with split '{settings.split}'" if settings.split else ""
    if settings.min_score is not None or settings.max_score is not None:
        least, most = (
            "any" if one is None else f"{one:g}" for one in (settings.min_score, settings.max_score)
        )
        which += f" with scores from {least} to {most}"
    if len(gold) < 2:
        raise UserError(f"{settings.where}: fewer than two pairs{which}")
    if min(gold) == max(gold):
        raise UserError(
            f"{settings.where}: all pairs{which} have the score {gold[0]:g}, so there is no order "
            "to find; look at the column 'score'"
        )
    return StsSet(settings.name, sentence1, sentence2, np.asarray(gold), subset)
