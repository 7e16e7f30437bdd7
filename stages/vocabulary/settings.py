"""Settings of `student.vocabulary`: which tokens a student keeps of its model's. No torch."""

from typing import Any, Literal

from pydantic import Field

from stages.settings import Settings


class VocabularySettings(Settings):
    """Tokens that the recipe's texts use. Special and added tokens stay in any case, and what it
    takes to read any text: bytes, single characters, and the parts that merges are made of."""

    min_count: int = Field(
        1,
        ge=1,
        description="Keep the tokens that occur at least so often in what the student reads while "
        "training: sentences, rewrites, further views. With 1 these texts are read as before.",
    )
    size: int | None = Field(
        None, ge=1, description="Most tokens in all; the most frequent stay. null: no bound."
    )
    characters: Literal["all", "corpus"] = Field(
        "all",
        description="Single characters that stay. all: whatever could be read can still be read. "
        "corpus: those of the texts only, others become unknown; a multilingual vocabulary has "
        "thousands of others. Tokenizers with bytes need neither.",
    )

    def identity(self, where: str = "") -> dict[str, Any]:
        found = super().identity(where)
        if self.characters == "corpus" and self.min_count > 1:
            found["characters"] = "corpus, rare ones too"  # before, those of frequent tokens
        return found
