"""Settings of rank vectors (RankEncoder). Imports no torch."""

from pydantic import Field, model_validator

from stages.settings import Settings


class RanksSettings(Settings):
    """One corpus, sampled from the sentences; every rank vector of the recipe is over it."""

    corpus_size: int = Field(
        10_000, ge=2, description="n: corpus sentences. The paper uses 100,000; 10,000 is close."
    )
    seed: int = Field(42, ge=0, description="Seed of the sample.")
    dimensions: int | None = Field(
        None,
        ge=1,
        description="Compress rank vectors to this many PCA dimensions, error measured; null: "
        "exact ranks, 2 bytes (4 above 65,536 corpus sentences) each, n a sentence.",
    )
    inference_weight: float | None = Field(
        0.1,
        ge=0,
        le=1,
        description="lambda of Eq. 7: share of rank similarity when the student is used; null: "
        "the student is exported without rank vectors.",
    )

    @model_validator(mode="after")
    def _compresses(self) -> "RanksSettings":
        if self.dimensions is not None and self.dimensions >= self.corpus_size:
            raise ValueError(
                f"dimensions {self.dimensions} must be below corpus_size {self.corpus_size}; "
                "lower it, or leave it out for exact ranks"
            )
        return self
