"""Settings of the stage `sentences`: where text comes from. Imports nothing heavy."""

from typing import Any, Literal

from pydantic import Field, model_validator

from stages import content
from stages.errors import UserError
from stages.fields import Dataset, Seed, TextsPath
from stages.kinds import KINDS, Kind
from stages.settings import Settings, added, execution

# Similarities of all pairs of these are in memory together, 8 bytes each and some copies: 1 GiB
MOST_HELD_OUT = 4000
LEAST_HELD_OUT = 25  # of whose 300 pairs three are the nearest 1%
SourceKind = Literal["text", "parquet", "jsonl", "csv", "tsv", "dataset", "python-docs"]
SUFFIXES: dict[str, SourceKind] = {
    ".txt": "text", ".gz": "text", ".parquet": "parquet", ".jsonl": "jsonl",
    ".csv": "csv", ".tsv": "tsv",
}  # fmt: skip


class Columns(Settings):
    """The columns of a table whose rows are pairs: a query, and the document that answers it."""

    query: str = Field(description="Column of the queries, such as titles or questions.")
    document: str = Field(description="Column of the documents, such as bodies or answers.")


class SentencesSettings(Settings):
    source: SourceKind | None = Field(
        None, description="Kind of input; null: told from the file's suffix (.gz may follow it)."
    )
    path: TextsPath | None = Field(
        None,
        description="A file, or a folder, whose files and folders are read in name order, but "
        "those that begin with a dot or an underscore.",
    )
    dataset: Dataset | None = Field(None, description="Hugging Face data set: id or local folder.")
    dataset_config: str | None = added(
        None, description="Configuration (subset) of the data set, of one that has several."
    )
    dataset_file: str | None = Field(None, description="Only this file of the data set.")
    dataset_split: str = Field("train", description="Split of the data set.")
    packages: list[str] | None = Field(
        None,
        description="python-docs: installed packages to read; null: all.",
    )
    holdout_pairs: int = Field(
        0,
        ge=0,
        description="python-docs: number of documented functions to keep out of training, for the "
        "retrieval test. With `columns`: number of pairs, for the same; with split_sentences: "
        "number of texts, whose first sentence is to find the rest.",
    )
    holdout: int | None = added(
        None,
        ge=0,
        le=MOST_HELD_OUT,
        description="Keep so many sentences from training, to measure on them how well the student "
        "agrees with its teachers. null: 1,000, but a tenth at most and none of fewer than 1,000, "
        "where `train.dev` names no set with labels to choose the checkpoint on; else none.",
    )
    column: str = Field("text", description="Column (or JSON key) that holds the text.")
    columns: Columns | None = added(
        None,
        description="Two columns instead of one: {query: title, document: body}. Both become "
        "sentences, of two kinds, which may have prompts of their own.",
    )
    split_sentences: bool = Field(False, description="Cut each text into sentences (sentencex).")
    language: str = Field("en", description="Language for sentence splitting.")
    unicode: Literal["NFC", "NFKC", "none"] = Field("NFC", description="Unicode normal form.")
    min_chars: int = Field(10, ge=1, description="Drop shorter sentences.")
    max_chars: int = Field(1000, ge=1, description="Drop longer sentences.")
    invalid_utf8: Literal["error", "reject"] = Field(
        "error",
        description="What to do with lines that are not UTF-8: stop, or drop and count them.",
    )
    limit: int | None = Field(
        None, ge=1, description="Keep a random sample of this many sentences; null: keep all."
    )
    seed: Seed = Field(0, description="Seed of the shuffle and of the sample.")
    rows_per_shard: int = Field(8192, ge=1, description="Sentences in a shard.")
    max_rejects_kept: int = execution(
        1000, ge=0, description="Dropped rows to keep as examples, for each reason."
    )

    @model_validator(mode="after")
    def _one_source(self) -> "SentencesSettings":
        if self.min_chars > self.max_chars:
            raise ValueError(f"min_chars {self.min_chars} is above max_chars {self.max_chars}")
        given = [self.path is not None, self.dataset is not None, self.source == "python-docs"]
        if sum(given) != 1:
            raise ValueError("give exactly one of: path, dataset, source: python-docs")
        if self.source == "dataset" and self.dataset is None:
            raise ValueError("source 'dataset' is told by `dataset`; name the kind of file instead")
        if self.dataset is not None and self.source not in (None, "dataset"):
            raise ValueError(
                f"source '{self.source}' is of a `path`; leave it out beside a `dataset`"
            )
        if self.packages is not None and self.source != "python-docs":
            raise ValueError("packages are read by source: python-docs; leave them out")
        split = type(self).model_fields["dataset_split"].default
        chosen = self.dataset_config or self.dataset_file or self.dataset_split != split
        if self.dataset is None and chosen:
            raise ValueError(
                "dataset_config, dataset_file and dataset_split are of a `dataset`; leave them out"
            )
        if self.holdout is not None and 0 < self.holdout < LEAST_HELD_OUT:
            raise ValueError(
                f"holdout {self.holdout}: fewer than {LEAST_HELD_OUT} sentences say nothing about "
                "agreement; raise it, or set 0"
            )
        if self.columns is not None:
            self._check_columns(self.columns)
        elif self.holds_out_pairs and not self.split_sentences:
            raise ValueError(
                "holdout_pairs is for source: python-docs, for `columns`, and for texts that are "
                "split (split_sentences: true)"
            )
        return self

    def _check_columns(self, columns: Columns) -> None:
        if self.source == "python-docs":
            raise ValueError("columns are of a table; leave them out, or give a path or data set")
        if self.column != "text":
            raise ValueError("column and columns name the same thing; leave one out")
        if columns.query == columns.document:
            raise ValueError(f"columns: both are '{columns.query}'; use `column` for a single one")

    @property
    def holds_out_pairs(self) -> bool:
        """Whether pairs of the source's own texts are held out."""
        return bool(self.holdout_pairs) and self.source != "python-docs"

    @property
    def kinds(self) -> tuple[Kind | None, ...]:
        """The kind of each column that is read; None where there is but one."""
        return (None,) if self.columns is None else KINDS

    @property
    def text_columns(self) -> tuple[str, ...]:
        """The columns that are read, in the order of `kinds`."""
        both = self.columns
        return (self.column,) if both is None else (both.query, both.document)

    def identity(self, where: str = "") -> dict[str, Any]:
        found = super().identity(where)
        found.pop("holdout", None)  # they are sentences like the others; training leaves them out
        if self.path is None:
            found.pop("path")
        if self.source == "python-docs":
            found["packages"] = content.describe_packages(self.packages)
        if self.columns is not None or self.holds_out_pairs:
            found["pairs"] = 2  # kinds of a text beside each other; pairs that share no text
        return found


def num_held_out(holdout: int | None, num_rows: int) -> int:
    """How many of the first sentences are not trained on; they are in random order.

    Args:
        holdout: the setting; None: chosen by the number of sentences.

    Raises:
        UserError: no sentence would be left.
    """
    if holdout is None:
        return min(1000, num_rows // 10) if num_rows >= 1000 else 0
    if holdout >= num_rows:
        raise UserError(
            f"sentences.holdout is {holdout:,}, but there are only {num_rows:,} sentences, so none "
            "would be left to train on; lower it or give more text"
        )
    return holdout
