"""What is evaluated. Imports no torch."""

from typing import Literal

from pydantic import Field, model_validator

from stages.settings import Settings


class StsSettings(Settings):
    name: str = Field(description="Name of the set in tables.", min_length=1)
    path: str | None = Field(
        None,
        description="TSV (no quoting), CSV, JSONL or Parquet file with the columns sentence1, "
        "sentence2, score and optionally subset and split; or a SentEval task folder.",
    )
    dataset: str | None = Field(None, description="Hugging Face data set id, instead of a path.")
    split: str | None = Field(None, description="Keep only these rows of the column split.")

    @model_validator(mode="after")
    def _one_source(self) -> "StsSettings":
        if (self.path is None) == (self.dataset is None):
            raise ValueError("an STS set needs either path or dataset")
        return self


class GeometrySettings(StsSettings):
    positives_above: float = Field(
        4.0, description="Pairs with a higher gold score mean the same (4 of 5, as in the papers)."
    )


class RetrievalSettings(Settings):
    kind: Literal["python-docs"] = Field(
        "python-docs",
        description="Summary line to description of the documented functions that the sentences "
        "stage held out.",
    )
    num_pairs: int = Field(1000, ge=2, description="Pairs used, at most.")


class EvaluateSettings(Settings):
    sts: list[StsSettings] = Field([], description="STS sets for the final table.")
    retrieval: RetrievalSettings | None = Field(None, description="A check that needs no labels.")
    geometry: GeometrySettings | None = Field(
        None, description="STS set for alignment and uniformity, usually STS-B dev."
    )
    num_bootstrap: int = Field(
        1000, ge=0, description="Bootstrap resamples for the 95% intervals; 0 for none."
    )
    speed: bool = Field(True, description="Time the student against its teachers at the end.")
    max_length: int = Field(
        128, ge=3, le=8192, description="Tokens of a test sentence, for every encoder alike."
    )

    @model_validator(mode="after")
    def _names_differ(self) -> "EvaluateSettings":
        check_names_differ(self.sts)
        return self


def check_names_differ(sets: list[StsSettings]) -> None:
    """Raises ValueError where two test sets have one name: results are kept by name."""
    names = [one.name for one in sets]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two STS sets are called '{twice[0]}'")
