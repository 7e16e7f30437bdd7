"""A tokenizer cut to some of its tokens, as data: `tokenizer.json` in, `tokenizer.json` out.

Texts whose tokens are all kept are read exactly as before:
  WordPiece  takes the longest piece that it has; the longest one is still there.
  Unigram    takes the pieces with the best sum of scores; they are still there with their scores,
             and so is the lowest score, which says what an unknown character costs.
  BPE        merges pair by pair. What is inside a token was merged as if it stood alone, so a
             token is kept with the steps that it takes by itself, and no others.
"""

import copy
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from stages.errors import UserError
from stages.vocabulary.settings import VocabularySettings

SUPPORTED = ("WordPiece", "BPE", "Unigram")
WHERE = "student.vocabulary"
BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def check_kind(raw: dict[str, Any], model: str) -> None:
    """Raises UserError where the tokenizer is of a kind that cannot be cut."""
    kind = raw["model"].get("type")
    if kind not in SUPPORTED:
        raise UserError(
            f"{WHERE}: the tokenizer of model '{model}' is a {kind}, and those that can be cut are "
            f"{', '.join(SUPPORTED)}; leave `vocabulary` out"
        )


@dataclass(frozen=True)
class CutTokenizer:
    """text: `tokenizer.json`. kept: (n,) int32, the old id of every new one."""

    text: str
    kept: np.ndarray

    @property
    def new_ids(self) -> dict[int, int]:
        return {int(old): new for new, old in enumerate(self.kept)}


class WholeTokenizer:
    """A tokenizer that is to be cut.

    Args:
        text: as `tokenizers` writes it. model: its name in messages.

    Raises:
        UserError: see `check_kind`.
    """

    def __init__(self, text: str, model: str) -> None:
        self._raw: dict[str, Any] = json.loads(text)
        check_kind(self._raw, model)
        self._name = model
        self._model = self._raw["model"]
        self.kind: str = self._model["type"]
        vocabulary = self._model["vocab"]
        pairs = (
            enumerate(piece for piece, _ in vocabulary)
            if self.kind == "Unigram"
            else ((number, token) for token, number in vocabulary.items())
        )
        self._tokens: dict[int, str] = dict(sorted(pairs))
        self._ids = {token: number for number, token in self._tokens.items()}
        self._added = {one["id"]: one["content"] for one in self._raw["added_tokens"]}
        self._merges = Merges(self._model) if self.kind == "BPE" else None
        every = self._tokens.keys() | self._added.keys()
        self.num_tokens, self.num_ids = len(every), max(every) + 1

    @property
    def unknown_id(self) -> int | None:
        """Of the token that stands for what cannot be read, if there is one."""
        if self.kind == "Unigram":
            found: int | None = self._model["unk_id"]
            return found
        return self._ids.get(self._model.get("unk_token"))

    def token(self, number: int) -> str:
        return self._tokens.get(number) or self._added[number]

    def check_size(self, settings: VocabularySettings) -> None:
        """Raises UserError where more tokens are asked for than there are."""
        if settings.size is not None and settings.size > self.num_tokens:
            raise UserError(
                f"{WHERE}.size: {settings.size:,} is more than the {self.num_tokens:,} tokens of "
                f"model '{self._name}'; lower it, or leave it out"
            )

    def choose(
        self, counts: np.ndarray, settings: VocabularySettings, required: Iterable[int] = ()
    ) -> set[int]:
        """Ids to keep.

        Args:
            counts: (ids,) int64, how often each occurs. required: ids that stay in any case.

        Raises:
            UserError: no token occurs often enough, or `size` is too small.
        """
        used = np.flatnonzero(counts >= settings.min_count).tolist()
        if not used:
            raise UserError(
                f"{WHERE}.min_count: {settings.min_count}: no token occurs so often (the most "
                f"frequent one occurs {int(counts.max(initial=0)):,} times); lower it"
            )
        known = self._tokens.keys() | self._added.keys()
        kept = (
            self._always(np.flatnonzero(counts), settings).union(*map(self._with_parts, required))
            & known
        )
        size = settings.size
        if size is not None and len(kept) > size:
            raise UserError(
                f"{WHERE}.size: {size:,} is less than the {len(kept):,} tokens that stay in any "
                "case (special ones, single characters, bytes); raise it, or set "
                f"{WHERE}.characters: corpus"
            )
        for number in sorted(used, key=lambda one: (-int(counts[one]), one)):
            more = self._with_parts(number) - kept
            if size is not None and len(kept) + len(more) > size:
                break
            kept |= more
        return kept

    def cut(self, kept: set[int]) -> CutTokenizer:
        """The tokenizer with these tokens alone, numbered in their old order.

        Tokens that only were added come last: `tokenizers` numbers them so when it reads the file.
        """
        inner = [number for number in self._tokens if number in kept]
        order = inner + sorted(kept - set(inner))
        new = {old: number for number, old in enumerate(order)}
        raw = copy.deepcopy(self._raw)
        raw["padding"] = raw["truncation"] = None
        model = raw["model"]
        if self.kind == "Unigram":
            model["vocab"] = [model["vocab"][old] for old in inner]
            model["unk_id"] = None if model["unk_id"] is None else new[model["unk_id"]]
        else:
            model["vocab"] = {self._tokens[old]: new[old] for old in inner}
        if self._merges is not None:
            there = set(model["vocab"])
            model["merges"] = [
                [*pair] for pair in self._merges.ranks
                if {*pair, self._merges.joined(*pair)} <= there
            ]  # fmt: skip
        for one in raw["added_tokens"]:
            one["id"] = new[one["id"]]
        for holder, key in _id_places(raw["post_processor"]):
            holder[key] = new[holder[key]]
        return CutTokenizer(json.dumps(raw, ensure_ascii=False), np.array(order, dtype=np.int32))

    def _always(self, occurring: np.ndarray, settings: VocabularySettings) -> set[int]:
        """What must stay so that any text has tokens, and the same ones around it.

        Args:
            occurring: ids of tokens that the texts have, rare ones too.
        """
        found = {*self._added}
        found |= {holder[key] for holder, key in _id_places(self._raw["post_processor"])}
        if self.unknown_id is not None:
            found.add(self.unknown_id)
        if self.kind == "Unigram":
            scores = [score for _, score in self._model["vocab"]]
            found.add(scores.index(min(scores)))
        every_byte = {i for i, token in self._tokens.items() if BYTE.fullmatch(token)}
        if self._model.get("byte_fallback") and len(every_byte) == 256:
            return found | every_byte
        bodies = {number: self._body(token) for number, token in self._tokens.items()}
        wanted: set[str] | None = None
        if settings.characters == "corpus" and not self._is_byte_level:
            wanted = {one for number in occurring.tolist() for one in bodies.get(number, "")}
        return found | {
            number
            for number, body in bodies.items()
            if len(body) == 1 and (wanted is None or body in wanted)
        }

    @property
    def _is_byte_level(self) -> bool:
        return '"ByteLevel"' in json.dumps([self._raw["pre_tokenizer"], self._raw["normalizer"]])

    def _body(self, token: str) -> str:
        """A token's characters, without the marks of a word's middle or end."""
        prefix = self._model.get("continuing_subword_prefix") or ""
        suffix = self._model.get("end_of_word_suffix") or ""
        return token.removeprefix(prefix).removesuffix(suffix)

    def _with_parts(self, number: int) -> set[int]:
        if self._merges is None or number not in self._tokens:
            return {number}
        parts = self._merges.steps(self._tokens[number])
        return {number} | {self._ids[part] for part in parts if part in self._ids}


class Merges:
    """The merges of a BPE, and how a token is made by them.

    Args:
        model: of a tokenizer's JSON.
    """

    def __init__(self, model: dict[str, Any]) -> None:
        self._prefix = model.get("continuing_subword_prefix") or ""
        self._suffix = model.get("end_of_word_suffix") or ""
        self.ranks = {(left, right): rank for rank, (left, right) in enumerate(model["merges"])}

    def joined(self, left: str, right: str) -> str:
        return left + right[len(self._prefix) :]

    def steps(self, token: str) -> set[str]:
        """Characters and merged parts that lead to `token`, itself included; nothing where merges
        lead elsewhere, so that only a whole word can be that token (`ignore_merges`)."""
        parts = self._characters(token)
        found = set(parts)
        while len(parts) > 1:
            pairs = [*pairwise(parts)]
            best = min(pairs, key=lambda pair: self.ranks.get(pair, len(self.ranks)))
            if best not in self.ranks:
                return set()
            place = pairs.index(best)
            parts[place : place + 2] = [self.joined(*best)]
            found.add(parts[place])
        return found

    def _characters(self, token: str) -> list[str]:
        inner = bool(self._prefix) and token.startswith(self._prefix)
        ends = bool(self._suffix) and token.endswith(self._suffix)
        body = token[len(self._prefix) * inner : len(token) - len(self._suffix) * ends]
        parts = [self._prefix * (inner or place > 0) + one for place, one in enumerate(body)]
        if ends and parts:
            parts[-1] += self._suffix
        return parts


def _id_places(processor: Any) -> Iterator[tuple[Any, Any]]:
    """Where a post-processor has token ids: (what holds one, its key there)."""
    if processor is None:
        return
    for inner in processor.get("processors", ()):
        yield from _id_places(inner)
    for key in ("cls", "sep"):
        if key in processor:
            yield processor[key], 1
    for one in (processor.get("special_tokens") or {}).values():
        for place in range(len(one["ids"])):
            yield one["ids"], place
