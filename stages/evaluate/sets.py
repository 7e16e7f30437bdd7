"""Sets for semantic textual similarity: settings, and reading them. Imports no torch."""

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from stages.errors import UserError
from stages.fields import Dataset, InputPath
from stages.packages import need
from stages.settings import Settings


class StsSettings(Settings):
    """A set for semantic textual similarity: pairs of sentences with gold scores."""

    name: str = Field(description="Name of the set in tables and node names.", min_length=1)
    path: InputPath | None = Field(
        None,
        description="A TSV (no quoting), CSV, JSONL or Parquet file with the columns sentence1, "
        "sentence2, score and, if you like, subset and split; or a SentEval task folder.",
    )
    dataset: Dataset | None = Field(
        None, description="Id of a Hugging Face data set, or its folder; instead of path."
    )
    split: str | None = Field(
        None, description="Keep only the rows whose column `split` has this value."
    )

    @model_validator(mode="after")
    def _one_source(self) -> "StsSettings":
        if (self.path is None) == (self.dataset is None):
            raise ValueError("an STS set needs either path or dataset")
        return self

    def check(self) -> None:
        """Reads the set if it is a file.

        Raises:
            UserError: it cannot be read, or the package that reads data sets is missing.
        """
        if self.dataset is not None:
            need("hub", f"STS set '{self.name}'")
        if self.path is not None:
            load_sts(self)


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
    where = settings.path or f"data set {settings.dataset}"
    rows = _read_rows(settings)
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
                f"STS set '{settings.name}' ({where}), row {number}: "
                f"the score is {score!r}, which is not a number"
            )
        if row["sentence1"] is None or row["sentence2"] is None:
            raise UserError(
                f"STS set '{settings.name}' ({where}), row {number}: a sentence is missing"
            )
        sentence1.append(" ".join(str(row["sentence1"]).split()))
        sentence2.append(" ".join(str(row["sentence2"]).split()))
        gold.append(value)
        subset.append(str(row.get("subset") or ""))
    if len(gold) < 2:
        split = f" with split '{settings.split}'" if settings.split else ""
        raise UserError(f"STS set '{settings.name}' ({where}): fewer than two pairs{split}")
    return StsSet(settings.name, sentence1, sentence2, np.asarray(gold), subset)


def _read_rows(settings: StsSettings) -> list[dict[str, Any]]:
    if settings.dataset is not None:
        from stages.sentences.sources import load_hub_dataset

        rows = load_hub_dataset(settings.dataset, settings.split or "test")
        return [dict(row) | {"split": settings.split} for row in rows]
    path = Path(str(settings.path)).expanduser()
    if not path.exists():
        raise UserError(f"STS set '{settings.name}': there is no file {path}")
    try:
        rows = _senteval_rows(path) if path.is_dir() else _file_rows(path)
    except UnicodeDecodeError as error:
        raise UserError(f"STS set '{settings.name}' ({path}): not UTF-8 ({error.reason})") from None
    except (json.JSONDecodeError, csv.Error) as error:
        raise UserError(f"STS set '{settings.name}' ({path}): cannot be read ({error})") from None
    for column in ("sentence1", "sentence2", "score"):
        if rows and column not in rows[0]:
            raise UserError(
                f"STS set '{settings.name}' ({path}): there is no column '{column}'; "
                f"it has {', '.join(map(str, rows[0]))}"
            )
    return rows


def _file_rows(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        return list(pq.read_table(path).to_pylist())
    with path.open(encoding="utf-8-sig", newline="") as file:
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in file if line.strip()]
        if path.suffix == ".csv":
            return list(csv.DictReader(file))
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def _senteval_rows(folder: Path) -> list[dict[str, Any]]:
    """SentEval's layouts: `STS.input.X.txt` with `STS.gs.X.txt`, `sts-SPLIT.csv`, `SICK_*.txt`."""
    rows: list[dict[str, Any]] = []
    for pairs in sorted(folder.glob("STS.input.*.txt")):
        name = pairs.name.removeprefix("STS.input.").removesuffix(".txt")
        gold = folder / f"STS.gs.{name}.txt"
        if not gold.is_file():
            raise UserError(f"{pairs}: its gold scores {gold.name} are missing")
        lines = pairs.read_text(encoding="utf-8").splitlines()
        scores = gold.read_text(encoding="utf-8").splitlines()
        if len(lines) != len(scores):
            raise UserError(f"{pairs}: {len(lines)} pairs, but {gold.name} has {len(scores)}")
        for line, score in zip(lines, scores, strict=True):
            left, right, *_ = [*line.split("\t"), ""]
            rows.append(
                dict(sentence1=left, sentence2=right, score=score, subset=name, split="test")
            )
    for file in sorted(folder.glob("sts-*.csv")):
        split = file.stem.removeprefix("sts-")
        for line in file.read_text(encoding="utf-8").splitlines():
            parts = line.split("\t")
            rows.append(
                dict(sentence1=parts[5], sentence2=parts[6], score=parts[4], subset="", split=split)
            )
    for file in sorted(folder.glob("SICK_*.txt")):
        split = {"train": "train", "trial": "dev"}.get(file.stem.split("_")[1], "test")
        for line in file.read_text(encoding="utf-8").splitlines()[1:]:
            parts = line.split("\t")
            rows.append(
                dict(sentence1=parts[1], sentence2=parts[2], score=parts[3], subset="", split=split)
            )
    if not rows:
        raise UserError(f"{folder}: no SentEval STS files (STS.input.*.txt, sts-*.csv, SICK_*.txt)")
    return rows
