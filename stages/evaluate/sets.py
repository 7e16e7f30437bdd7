"""Sets for semantic textual similarity: settings, and reading them. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import Field

from stages.errors import UserError
from stages.evaluate.senteval import sts_rows
from stages.evaluate.tables import Row, TableSettings, read_table
from stages.fields import InputPath


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

    def load(self) -> object:
        return load_sts(self)

    def read_path(self, path: Path) -> list[Row]:
        return sts_rows(path) if path.is_dir() else read_table(path)


def check_names_differ(sets: list[StsSettings]) -> None:
    """Raises ValueError where two test sets have one name: results are kept by name."""
    names = [one.name for one in sets]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two STS sets are called '{twice[0]}'")


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
        UserError: missing file or column, a score that is no number, no rows left.
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
                f"{settings.where}, row {number}: the score is {score!r}, which is not a number"
            )
        if row["sentence1"] is None or row["sentence2"] is None:
            raise UserError(f"{settings.where}, row {number}: a sentence is missing")
        sentence1.append(" ".join(str(row["sentence1"]).split()))
        sentence2.append(" ".join(str(row["sentence2"]).split()))
        gold.append(value)
        subset.append(str(row.get("subset") or ""))
    if len(gold) < 2:
        split = f" with split '{settings.split}'" if settings.split else ""
        raise UserError(f"{settings.where}: fewer than two pairs{split}")
    return StsSet(settings.name, sentence1, sentence2, np.asarray(gold), subset)
