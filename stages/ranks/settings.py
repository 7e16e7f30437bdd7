"""Settings of rank vectors (RankEncoder). Imports no torch."""

from pydantic import Field, model_validator

from stages.fields import Seed
from stages.settings import Settings


class RanksSettings(Settings):
    """The ranked corpus: a sample of the sentences, one for all rank vectors of a recipe."""

    corpus_size: int = Field(
        10_000,
        ge=2,
        description="n: number of corpus sentences. The paper uses 100,000, its released code "
        "10,000.",
    )
    seed: Seed = Field(42, description="Seed of the sample.")
    dimensions: int | None = Field(
        None,
        ge=1,
        description="Compress rank vectors to this many PCA dimensions and measure the error. "
        "null: keep exact ranks; a sentence takes n times 2 bytes (4 where n is above 65,536).",
    )
    inference_weight: float | None = Field(
        0.1,
        ge=0,
        le=1,
        description="lambda of Eq. 7: share of rank similarity when the student is used. null: "
        "export the student without rank vectors.",
    )

    @model_validator(mode="after")
    def _compresses(self) -> "RanksSettings":
        if self.dimensions is not None and self.dimensions >= self.corpus_size:
            raise ValueError(
                f"dimensions {self.dimensions} must be below corpus_size {self.corpus_size}; "
                "lower it, or leave it out for exact ranks"
            )
        return self
