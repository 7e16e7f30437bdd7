"""One text to the sentences in it."""

import re
import unicodedata

from stages.sentences.settings import SentencesSettings

# Without those that are white space, such as form feeds, which part words.
CONTROL = re.compile(r"[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\u200b\ufeff]")


def clean_text(text: str, form: str) -> str:
    """Without control characters, Unicode-normalised, white space squeezed; once is enough."""
    text = CONTROL.sub("", text)  # first: what one stood between may compose
    if form != "none":
        text = unicodedata.normalize(form, text)  # type: ignore[arg-type]
    return " ".join(text.split())


def cleaned(text: str, settings: SentencesSettings) -> str:
    """`clean_text`, of a text that may be broken."""
    # a lone surrogate (from JSON escapes) cannot be encoded; it marks text that was cut apart
    return clean_text(text.encode("utf-8", "replace").decode("utf-8"), settings.unicode)


def pieces_of(text: str, settings: SentencesSettings) -> list[str]:
    """A clean text's sentences, where it is to be split; else the text itself."""
    if not settings.split_sentences:
        return [text]
    import sentencex

    return [piece.strip() for piece in sentencex.segment(settings.language, text)] or [text]


def fault_of(text: str, settings: SentencesSettings) -> str:
    """Why a clean text is no sentence of the corpus; "" where it is."""
    if not text:
        return "blank"
    if len(text) < settings.min_chars:
        return "too_short"
    return "too_long" if len(text) > settings.max_chars else ""
