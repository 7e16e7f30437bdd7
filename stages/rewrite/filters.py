"""Quality filters: their settings, and why a rewrite is rejected."""

import difflib
import re
import sys
import unicodedata
from functools import cache

from pydantic import Field, field_validator, model_validator

from stages.errors import UserError
from stages.packages import need
from stages.plain import UNPRINTABLE
from stages.settings import Settings

# py3langid guesses on shorter text
LANGUAGE_NEEDS_CHARS = 30


class Filters(Settings):
    """Which rewrites are rejected. Lengths and similarities are measured in characters."""

    min_growth: float = Field(
        0.3, ge=0, description="Shortest rewrite, as a multiple of its source."
    )
    max_growth: float = Field(
        3.0, gt=0, description="Longest rewrite, as a multiple of its source."
    )
    max_similarity: float = Field(
        0.98,
        gt=0,
        le=1,
        description="Reject near copies: rewrites with a higher normalised edit similarity to "
        "their source, case and white space aside. 1 rejects exact copies only.",
    )
    max_repeats: int = Field(
        3, ge=1, description="How often in a row one to four words may repeat."
    )
    script: str | None = Field(
        "LATIN",
        description="Script of at least half of the letters, as Unicode's names of letters begin "
        "(CYRILLIC, GREEK, HANGUL; HAN: Chinese characters); null: any.",
    )
    language: str | None = Field(
        None,
        description="Language that py3langid must find, as an ISO 639-1 code; null: any. Rewrites "
        "of less than 30 characters pass, since it is unsure of them.",
    )

    @field_validator("script")
    @classmethod
    def _is_a_script(cls, script: str | None) -> str | None:
        letters = (char for char in map(chr, range(sys.maxunicode + 1)) if char.isalpha())
        if script and not any(_script_of(char) == _named(script) for char in letters):
            close = difflib.get_close_matches(_named(script), _scripts(), n=1)
            hint = f"did you mean {close[0]}?" if close else "such as CYRILLIC or HAN"
            raise ValueError(f"no letter's name in Unicode begins with '{script}'; {hint}")
        return script

    @model_validator(mode="after")
    def _ordered(self) -> "Filters":
        if self.min_growth > self.max_growth:
            raise ValueError(f"min_growth {self.min_growth} is above max_growth {self.max_growth}")
        return self

    @property
    def packages(self) -> tuple[str, ...]:
        """What decides which rewrites they keep."""
        return ("rapidfuzz", "py3langid") if self.language else ("rapidfuzz",)

    def check_packages(self, what: str) -> None:
        """Raises UserError where the packages that the filters need are not installed, or know no
        such language."""
        need("rewrites", what, *self.packages)
        if self.language is not None and self.language not in _languages():
            known = ", ".join(sorted(_languages()))
            raise UserError(f"{what}.language: py3langid knows no '{self.language}'; {known}")

    def fault(self, sentence: str, rewrite: str) -> str | None:
        """Why a rewrite of a sentence is rejected, the first reason that applies; None: it is kept.

        Reasons: empty, control_characters, unchanged, too_short, too_long, near_copy, repeats,
        wrong_script, wrong_language.
        """
        from rapidfuzz.distance import Levenshtein

        source, found = _plain(sentence), _plain(rewrite)
        if not found:
            return "empty"
        if UNPRINTABLE.search(rewrite):
            return "control_characters"
        if source == found:
            return "unchanged"
        growth = len(found) / max(1, len(source))
        if growth < self.min_growth:
            return "too_short"
        if growth > self.max_growth:
            return "too_long"
        similarity = Levenshtein.normalized_similarity(source, found)
        if self.max_similarity < 1 and similarity > self.max_similarity:
            return "near_copy"
        if most_repeats(found) > self.max_repeats >= most_repeats(source):
            return "repeats"
        if self.script and script_share(rewrite, _named(self.script)) < 0.5:
            return "wrong_script"
        if self.language is not None and len(found) >= LANGUAGE_NEEDS_CHARS:
            import py3langid

            if py3langid.classify(rewrite)[0] != self.language:
                return "wrong_language"
        return None


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def most_repeats(text: str) -> int:
    """Most times in a row that the same one to four words come."""
    words = re.findall(r"\w+", text)
    most = 1
    for size in range(1, 5):
        run = 0
        for place in range(size, len(words)):
            run = run + 1 if words[place] == words[place - size] else 0
            most = max(most, 1 + run // size)
    return most


def script_share(text: str, script: str) -> float:
    """Share of the letters whose Unicode name starts with the script's; 1 without letters."""
    letters = [char for char in text if char.isalpha()]
    if not letters:
        return 1.0
    return sum(_script_of(char) == script for char in letters) / len(letters)


def _named(script: str) -> str:
    """As names of letters begin with it: those of Chinese characters do not name their script."""
    return {"HAN": "CJK"}.get(script.upper(), script.upper())


@cache
def _scripts() -> set[str]:
    return {_script_of(char) for char in map(chr, range(sys.maxunicode + 1)) if char.isalpha()}


@cache
def _languages() -> set[str]:
    import py3langid

    return {language for language, _ in py3langid.rank("a")}


@cache
def _script_of(char: str) -> str:
    return unicodedata.name(char, "").partition(" ")[0].partition("-")[0]
