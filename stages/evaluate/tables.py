"""Tables that tests read: where they are, and reading them. Imports no torch.

A file is TSV (no quoting), CSV, JSONL or Parquet, told from its suffix; a data set is the hub's.
"""

import csv
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, model_validator

from stages.errors import UserError
from stages.evaluate.base import Encode, Evaluation
from stages.fields import Dataset, InputPath, Name
from stages.kinds import Kinds, kind_of_each
from stages.packages import need
from stages.plain import shortened
from stages.sentences.sources import about_quotes, dialect
from stages.settings import Settings, added

Row = dict[str, Any]

# Half of a pair of UTF-16, which JSON can hold and no text
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class TableSettings(Settings):
    """A table by name: a file, or a data set of the hub."""

    what: ClassVar[str] = "test set"  # starts messages about it

    name: Name = Field(description="Name of the set in tables and node names.")
    path: InputPath | None = Field(None, description="A TSV (no quoting), CSV, JSONL or Parquet "
                                   "file with a column for each thing.")  # fmt: skip
    dataset: Dataset | None = Field(
        None, description="Id of a Hugging Face data set, or its folder; instead of path."
    )
    dataset_config: str | None = added(
        None, description="Configuration (subset) of the data set, of one that has several."
    )

    @model_validator(mode="after")
    def _one_source(self) -> "TableSettings":
        if (self.path is None) == (self.dataset is None):
            raise ValueError(f"{self.what} '{self.name}': give either path or dataset")
        if self.dataset is None and self.dataset_config:
            raise ValueError(f"{self.what} '{self.name}': dataset_config is of a `dataset`")
        return self

    @property
    def where(self) -> str:
        """What to call the table in a message."""
        return f"{self.what} '{self.name}' ({self.path or f'data set {self.dataset}'})"

    def check(self) -> None:
        """Reads the table if it is a file.

        Raises:
            UserError: it cannot be read, or the package that reads data sets is missing.
        """
        if self.dataset is not None:
            need("hub", f"{self.what} '{self.name}'")
        if self.path is not None:
            self.load()

    def load(self) -> object:
        """Reads and checks the table."""
        raise NotImplementedError

    def rows(self, columns: Sequence[str], splits: Sequence[str] = ("test",)) -> list[Row]:
        """All rows; of a data set those of these splits, with a column `split`.

        Raises:
            UserError: no such file, not a table, or a column is not there.
        """
        if self.dataset is not None:
            from stages.sentences.data_sets import hub_splits, load_hub_dataset

            if len(splits) > 1:
                there = hub_splits(self.dataset, self.dataset_config)
                splits = [split for split in splits if split in there] or splits[-1:]
            rows = [
                dict(row) | {"split": split}
                for split in splits
                for row in load_hub_dataset(self.dataset, split, self.dataset_config)
            ]
        else:
            rows = self._file_rows(Path(str(self.path)).expanduser())
        there = columns_of(rows)
        for column in columns:
            if rows and column not in there:
                raise UserError(
                    f"{self.where}: there is no column '{column}'; it has {', '.join(there)}"
                )
        return rows

    def tested(self, rows: Sequence[Row], split: str | None) -> list[tuple[int, Row]]:
        """Rows of a split, with their numbers; None: of `test`, or all where no row has one.

        Raises:
            UserError: there are none.
        """
        if split is None and "split" not in columns_of(rows):
            return list(enumerate(rows, start=1))
        name = split or "test"
        found = [(n, row) for n, row in enumerate(rows, start=1) if row.get("split") == name]
        if not found:
            others = ", ".join(sorted({str(row.get("split")) for row in rows})) or "none"
            raise UserError(f"{self.where}: no rows with split '{name}'; there are: {others}")
        return found

    def _file_rows(self, path: Path) -> list[Row]:
        if not path.exists():
            raise UserError(f"{self.what} '{self.name}': there is no file {path}")
        try:
            return self.read_path(path)
        except UnicodeDecodeError as error:
            raise UserError(f"{self.where}: not UTF-8 ({error.reason})") from None
        except ValueError as error:
            raise UserError(f"{self.where}: cannot be read ({error})") from None

    def read_path(self, path: Path) -> list[Row]:
        """The rows of a path that is there."""
        if path.is_dir():
            raise UserError(f"{self.where}: that is a folder; name a file in it")
        if not path.is_file():  # a device may never end
            raise UserError(f"{self.where}: that is no ordinary file")
        return read_table(path)

    def label(self, row: Row, number: int) -> str:
        """The cell `label`; whole numbers and truth values of JSON and Parquet as 0, 1, 2, ...

        Raises:
            UserError: nothing is there.
        """
        value = row.get("label")
        if isinstance(value, bool | float) and value == value // 1:
            row = row | {"label": int(value)}
        elif isinstance(value, float) and value != value:
            row = row | {"label": None}
        return self.text(row, "label", number)

    def text(self, row: Row, column: str, number: int) -> str:
        """A cell with its white space squeezed.

        Raises:
            UserError: nothing is there.
        """
        try:
            found = as_text(row.get(column))
        except ValueError as error:
            raise UserError(f"{self.where}, row {number}: '{column}' is {error}") from None
        if not found:
            raise UserError(f"{self.where}, row {number}: '{column}' is empty")
        return found


def as_text(cell: Any) -> str:
    """A cell with its white space squeezed; "" where there is nothing.

    Raises:
        ValueError: it is a list or the like, or cannot be written as UTF-8.
    """
    if not isinstance(cell, str | int | float | None):
        raise ValueError(f"{shortened(repr(cell))}, neither a text nor a number")
    found = " ".join(str("" if cell is None else cell).split())
    if LONE_SURROGATE.search(found):
        raise ValueError(f"{shortened(ascii(found))}, half a character")
    return found


def read_table(path: Path) -> list[Row]:
    """Rows of a file, told from its suffix; TSV where that says nothing.

    Raises:
        ValueError: it is none.
    """
    try:
        return _read_rows(path)
    except UnicodeDecodeError:
        raise
    except csv.Error as error:
        raise ValueError(f"{error}{about_quotes(error)}") from None
    except (ValueError, OSError) as error:
        raise ValueError(shortened(str(error))) from None
    except RecursionError:
        raise ValueError("JSON that is nested too deep") from None


def _read_rows(path: Path) -> list[Row]:
    csv.field_size_limit(1 << 30)  # a document may be longer than the 131,072 characters of csv
    suffix = path.suffix.lower()
    if suffix == ".json":
        raise ValueError("JSON; write it as .jsonl, with an object on each line")
    if suffix == ".parquet":
        import pyarrow.parquet as pq

        return list(pq.read_table(path).to_pylist())
    with path.open(encoding="utf-8-sig", newline="") as file:
        if suffix == ".jsonl":
            rows = [json.loads(line) for line in file if line.strip()]
            if any(not isinstance(row, dict) for row in rows):
                raise ValueError("every line must be a JSON object")
            return rows
        reader = csv.DictReader(file, **dialect(tab=suffix != ".csv"))
        try:
            names, rows = list(reader.fieldnames or []), list(reader)
        except csv.Error as error:
            raise csv.Error(f"line {reader.reader.line_num}: {error}") from None
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"the column '{twice[0]}' is there twice")
    for number, row in enumerate(rows, start=1):
        if None in row:
            raise ValueError(f"row {number}: there are more cells than the header has names")
    return rows


def columns_of(rows: Sequence[Row]) -> list[str]:
    """Of all rows, in the order in which they first occur."""
    return list(dict.fromkeys(str(column) for row in rows for column in row))


@dataclass(frozen=True)
class Labelled:
    """Examples with labels, one entry each.

    texts: one or two texts of each example. labels: (N,) int64, numbers of `names`.
    """

    texts: list[tuple[str, ...]]
    labels: np.ndarray
    names: list[str]

    def of(self, rows: np.ndarray) -> "Labelled":
        return Labelled([self.texts[row] for row in rows], self.labels[rows], self.names)


class LabelledTest(TableSettings, Evaluation):
    """A test on a table of examples with labels.

    The table has the columns `label` and either `text` or `sentence1` and `sentence2`.
    needs_tested: whether there must be rows to test, beside others.
    """

    needs_tested: ClassVar[bool] = True

    split: str | None = Field(
        None, description="Test on the rows whose column `split` has this value; null: 'test', "
        "or all rows where there is no such column.",
    )  # fmt: skip

    def read(
        self, other_splits: Sequence[str] = (), num_texts: int | None = None
    ) -> dict[str, Labelled]:
        """The examples by split, the tested one as `test`; labels are numbered over all of them.

        Args:
            other_splits: that are read too, where they are there. num_texts: of an example; None:
                one or two.

        Raises:
            UserError: see `rows`; an empty cell, no example to test, or only one label.
        """
        tested = self.split or "test"
        rows = self.rows(["label"], list(dict.fromkeys([*other_splits, tested])))
        if not rows:
            raise UserError(f"{self.where}: there are no rows")
        there = columns_of(rows)
        columns = ("text",) if "text" in there else ("sentence1", "sentence2")
        if not set(columns) <= set(there):
            raise UserError(
                f"{self.where}: there is neither a column 'text' nor 'sentence1' and 'sentence2'; "
                f"it has {', '.join(there)}"
            )
        if num_texts is not None and len(columns) != num_texts:
            wanted = "'sentence1' and 'sentence2'" if num_texts == 2 else "a column 'text'"
            raise UserError(f"{self.where}: it has {', '.join(columns)}; this test needs {wanted}")
        by_split: dict[str, list[tuple[tuple[str, ...], str]]] = {}
        has_splits = "split" in there
        if self.split is not None and not has_splits:
            raise UserError(f"{self.where}: there is no column 'split' to choose '{tested}' by")
        for number, row in enumerate(rows, start=1):
            texts = tuple(self.text(row, column, number) for column in columns)
            split = self.text(row, "split", number) if has_splits else tested
            by_split.setdefault(split, []).append((texts, self.label(row, number)))
        used = {
            name: by_split[name] for name in other_splits if name in by_split and name != tested
        }
        if self.needs_tested or not used or tested in by_split:
            self.tested(rows, tested if has_splits else None)
            used = {"test": by_split[tested]} | used
        names = sorted({label for examples in used.values() for _, label in examples})
        if len(names) < 2:
            raise UserError(
                f"{self.where}: all rows have the label '{names[0]}'; "
                "a test needs at least two different ones"
            )
        number_of = {name: number for number, name in enumerate(names)}
        return {
            split: Labelled(
                [texts for texts, _ in examples],
                np.array([number_of[label] for _, label in examples]),
                names,
            )
            for split, examples in used.items()
        }


def embed_once(texts: Sequence[str], encode: Encode, kinds: Kinds = None) -> np.ndarray:
    """Vectors (N, D) of texts, each distinct one of a kind encoded once."""
    keys = list(zip(texts, kind_of_each(kinds, len(texts)), strict=True))
    row_of = {key: row for row, key in enumerate(dict.fromkeys(keys))}
    if not (kinds is None or isinstance(kinds, str)):
        kinds = [kind for _, kind in row_of]
    return encode([text for text, _ in row_of], kinds)[[row_of[key] for key in keys]]


def finite_vectors(texts: Sequence[str], encode: Encode, kinds: Kinds = None) -> np.ndarray:
    """As `embed_once`, for figures that would look like any other where a vector is not finite.

    Raises:
        UserError: a vector is not finite.
    """
    vectors = embed_once(texts, encode, kinds)
    if not isinstance(vectors, np.ndarray):  # BM25's
        return vectors
    bad = np.flatnonzero(~np.isfinite(vectors).all(1))
    if len(bad):
        raise UserError(
            f"the encoder's vector of {texts[int(bad[0])][:80]!r} is not finite (and of "
            f"{len(bad) - 1} more texts); train it with a lower learning rate, or in float32"
        )
    return vectors


def products(queries: Any, documents: Any) -> np.ndarray:
    """Scores (Q, N) of vectors (Q, D) and (N, D), dense or sparse."""
    scores = queries @ documents.T
    return scores if isinstance(scores, np.ndarray) else np.asarray(scores.toarray())
