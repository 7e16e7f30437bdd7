"""Translators as tests ask for them."""

from pathlib import Path
from typing import Any

from stages.rewrite.back_translation import BackTranslation, TranslationModel
from stages.rewrite.translate import Translator


def translator(folder: Path, prefix: str = "", **settings: Any) -> Translator:
    given = {"device": "cpu"} | settings
    return Translator(TranslationModel(model=str(folder), prefix=prefix), BackTranslation(**given))
