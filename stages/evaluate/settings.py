"""Settings of `evaluate`: the tests of student and teachers. Imports no torch."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from stages.contract import Work
from stages.evaluate.base import Evaluation, Result, Tested
from stages.evaluate.size import Size
from stages.fields import Dataset, InputPath
from stages.packages import need
from stages.settings import Open, Settings

if TYPE_CHECKING:
    from stages.evaluate.sts import StsSet


# Columns of every table, which no test set may be called.
TAKEN_NAMES = ("layers", "MB", "mean", "sentences/s")


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

    def load(self) -> "StsSet":
        """Reads and checks the set; raises UserError as `stages.evaluate.sts.load_sts`."""
        from stages.evaluate.sts import load_sts

        return load_sts(self)

    def check(self) -> None:
        """Reads the set if it is a file.

        Raises:
            UserError: it cannot be read, or the package that reads data sets is missing.
        """
        if self.dataset is not None:
            need("hub", f"STS set '{self.name}'")
        if self.path is not None:
            self.load()


class StsTest(Evaluation):
    """Spearman of similarity and gold score on one set."""

    sts: StsSettings
    num_bootstrap: int

    @property
    def title(self) -> str:
        return self.sts.name

    def check(self) -> None:
        self.sts.check()

    def score(self, tested: Tested, work: Work) -> Result:
        from stages.evaluate.sts import score_sts

        pairs = self.sts.load()
        work.say(f"{pairs.name}: {len(pairs.gold):,} pairs")
        return score_sts(pairs, tested.encode, self.num_bootstrap)


class GeometrySettings(Evaluation, StsSettings):
    """Alignment of pairs that mean the same, and uniformity of all sentences."""

    positives_above: float = Field(
        4.0,
        description="Pairs with a higher gold score count as meaning the same (4 of 5 in the "
        "papers).",
    )

    @property
    def title(self) -> str:
        return f"geometry-{self.name}"

    def check(self) -> None:
        StsSettings.check(self)

    def score(self, tested: Tested, work: Work) -> Result:
        from stages.evaluate.geometry import score_geometry

        return score_geometry(self.load(), self.positives_above, tested.encode)


class RetrievalSettings(Evaluation):
    """A test without labels: find a function's description from its summary line."""

    kind: Literal["python-docs"] = Field(
        "python-docs",
        description="Source of the pairs. python-docs: the documented functions that the stage "
        "`sentences` held out.",
    )
    num_pairs: int = Field(1000, ge=2, description="Most pairs to use.")

    @property
    def title(self) -> str:
        return "retrieval"

    @property
    def reads(self) -> tuple[str, ...]:
        return ("sentences",)

    def score(self, tested: Tested, work: Work) -> Result:
        import pyarrow.parquet as pq

        from stages.evaluate.retrieval import score_retrieval

        held_out = pq.read_table(work.input("sentences").file_path("holdout.parquet"))
        rows = held_out.slice(0, self.num_pairs).to_pydict()
        work.say(f"retrieval: {len(rows['summary']):,} pairs")
        return score_retrieval(rows["summary"], rows["description"], tested.encode)


class EvaluateSettings(Open):
    """The list of tests. Tests of plug-ins join it."""

    additions = "evaluations"

    sts: list[StsSettings] = Field([], description="STS sets for the final table, a test each.")
    retrieval: RetrievalSettings | None = Field(
        None, description="Retrieval among held-out documentation; it needs no labels."
    )
    geometry: GeometrySettings | None = Field(
        None, description="STS set for alignment and uniformity, usually STS-B dev."
    )
    num_bootstrap: int = Field(
        1000, ge=0, description="Bootstrap resamples for the 95% intervals; 0: no intervals."
    )
    speed: bool = Field(
        True, description="Time the student side by side with its teachers, at the end."
    )
    max_length: int = Field(
        128,
        ge=3,
        le=8192,
        description="Most tokens of a test sentence, the same for every encoder.",
    )

    @model_validator(mode="after")
    def _names_differ(self) -> "EvaluateSettings":
        check_names_differ(self.sts)
        titles = [test.title for test in self.tests]
        for title in (*titles, *TAKEN_NAMES):
            if titles.count(title) > (title not in TAKEN_NAMES):
                raise ValueError(f"the name '{title}' of a test is taken; choose another")
        return self

    @property
    def tests(self) -> list[Evaluation]:
        """All tests, in the order of the table's columns."""
        found: list[Evaluation] = [Size()]
        found += [StsTest(sts=one, num_bootstrap=self.num_bootstrap) for one in self.sts]
        found += [one for one in (self.retrieval, self.geometry) if one is not None]
        found += [one for one in self.added_sections.values() if isinstance(one, Evaluation)]
        return found


def check_names_differ(sets: list[StsSettings]) -> None:
    """Raises ValueError where two test sets have one name: results are kept by name."""
    names = [one.name for one in sets]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two STS sets are called '{twice[0]}'")
