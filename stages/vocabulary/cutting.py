"""From counts of tokens to a cut model, and the proof that it reads and computes as before."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stages.contract import Artifact
from stages.encoder.model import load_encoder
from stages.encoder.tokenizer import (
    SentenceTokenizer,
    load_view_tokenizers,
    rebuilt,
    save_tokenizer,
)
from stages.errors import UserError
from stages.kinds import Kinds, kind_of_each
from stages.rows import unit_rows
from stages.sentences.texts import read_texts
from stages.train.student_settings import StudentSettings
from stages.vocabulary.settings import VocabularySettings
from stages.vocabulary.tokenizer import WHERE, WholeTokenizer

BLOCK = 4096  # texts in memory as tokens at once
ROOM = 1 << 20  # tokens of a text: all
# Sentences of the corpus, which is shuffled, that are read with both tokenizers, and of these that
# go through both models
NUM_READ, NUM_COMPUTED = 100_000, 64
LEAST_COSINE = 0.9999


@dataclass(frozen=True)
class Comparison:
    """How texts are read with the whole vocabulary and with the cut one.

    changed: texts with other tokens. tokens, unknown: of all texts, (whole, cut).
    """

    texts: int
    changed: int
    tokens: tuple[int, int]
    unknown: tuple[int, int]

    def told(self) -> str:
        before, after = (f"{number / self.texts:.2f}" for number in self.tokens)
        found = f"{self.changed:,} of {self.texts:,} sentences have other tokens"
        found += f", {before} -> {after} tokens per sentence"
        return found + f", unknown {self.unknown[0]:,} -> {self.unknown[1]:,}"

    def figures(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Cut:
    """What became of a model; pairs are of the whole one and the cut one.

    parameters: with all layers, as they are trained. embeddings: those of token embeddings alone.
    corpus: how sentences are read. cosine: the lowest of vectors of sentences with the same tokens;
    None where there were none. warning: "" for none.
    """

    tokens: tuple[int, int]
    parameters: tuple[int, int]
    embeddings: tuple[int, int]
    corpus: Comparison
    cosine: float | None
    warning: str

    def told(self) -> str:
        return (
            f"vocabulary: {self.tokens[0]:,} -> {self.tokens[1]:,} tokens, their embeddings "
            f"{_megabytes(self.embeddings)}, with all layers {_megabytes(self.parameters)}; of the "
            f"corpus {self.corpus.told()}"
        )

    def figures(self) -> dict[str, Any]:
        return asdict(self)


def _megabytes(parameters: tuple[int, int]) -> str:
    before, after = (f"{4 * number / 1e6:,.1f}" for number in parameters)
    return f"{before} -> {after} MB"


class Counter:
    """Texts to the tokens that they have, read whole. Loads the tokenizer, never the weights."""

    def __init__(self, settings: StudentSettings) -> None:
        self._tokenizer = view_tokenizer(settings)

    def __call__(self, texts: Sequence[str], kinds: Kinds = None) -> tuple[np.ndarray, np.ndarray]:
        """Ids (n,) int32, ascending, and how often each occurs, int64."""
        total = np.zeros(0, dtype=np.int64)
        each = None if kinds is None else kind_of_each(kinds, len(texts))
        for start in range(0, len(texts), BLOCK):
            block = slice(start, start + BLOCK)
            rows = self._tokenizer.sentence_ids(texts[block], ROOM, each and each[block])
            flat = np.concatenate([np.asarray(row, dtype=np.int64) for row in rows])
            found = np.bincount(flat, minlength=len(total))
            found[: len(total)] += total
            total = found
        ids = np.flatnonzero(total)
        return ids.astype(np.int32), total[ids]


def view_tokenizer(settings: StudentSettings) -> SentenceTokenizer:
    """What reads the sentences of a student: see `Tokeniser`."""
    return load_view_tokenizers(settings.view_settings())[0]


def cut_student(
    settings: StudentSettings,
    wanted: VocabularySettings,
    counted: Sequence[Artifact],
    sentences: Artifact,
    target: Path,
) -> tuple[np.ndarray, Cut]:
    """Writes the cut model to `target`, and compares it with the whole one.

    Args:
        counted: counts of the tokens of all that the student reads.

    Returns:
        the old id (n,) int32 of each token, and what was found.

    Raises:
        UserError: nothing is left, the model cannot be cut, or computes something else when cut.
    """
    from stages.vocabulary.model import cut_model, required_ids, whole_folder

    views = load_view_tokenizers(settings.view_settings())
    before = views[0]
    rust = before.pretrained.backend_tokenizer
    whole = WholeTokenizer(rust.to_str(), settings.model)
    whole.check_size(wanted)
    required = required_ids(whole_folder(settings))
    required |= {number for one in views for number in [*one.prefix, *one.suffix]}
    for prompt in (settings.prompt or "", *settings.prompts.values()):
        required |= {*before.pretrained(prompt, add_special_tokens=False)["input_ids"]}
    cut = whole.cut(whole.choose(_added_up(counted, whole.num_ids), wanted, required))
    rows, width = cut_model(settings, cut, target)
    save_tokenizer(rebuilt(type(rust).from_str(cut.text), before.pretrained), target)

    located = settings.model_copy(update={"model": str(target)})
    after = view_tokenizer(located)
    numbers = after.pretrained.get_vocab()
    assert [numbers[whole.token(old)] for old in cut.kept] == [*range(len(cut.kept))]
    readers = Readers(before, after)
    corpus = readers.compare(_first_texts(sentences))
    alike = readers.read_alike(next(_first_texts(sentences)))[:NUM_COMPUTED]
    cosine, parameters = _computed(settings, located, alike)
    warning = ""
    if corpus.changed and wanted.min_count == 1 and wanted.size is None:
        warning = (
            f"{corpus.changed:,} of {corpus.texts:,} sentences of the corpus have other tokens "
            "than with the whole vocabulary, though every token of them was kept"
        )
    sizes = whole.num_tokens, len(cut.kept)
    embeddings = rows * width, len(cut.kept) * width
    return cut.kept, Cut(sizes, parameters, embeddings, corpus, cosine, warning)


class Readers:
    """The tokenizer of the whole vocabulary and that of the cut one."""

    def __init__(self, whole: SentenceTokenizer, cut: SentenceTokenizer) -> None:
        self._both = whole, cut
        known = whole.pretrained.get_vocab()
        self._old = {number: known[name] for name, number in cut.pretrained.get_vocab().items()}

    def compare(self, blocks: Iterable[list[str]]) -> Comparison:
        """How texts are read; a block of them is in memory as tokens at once."""
        count, changed, tokens, unknown = 0, 0, [0, 0], [0, 0]
        for texts in blocks:
            rows = self._rows(texts)
            count += len(texts)
            changed += len(texts) - sum(self._same(*rows))
            for place, reader in enumerate(self._both):
                tokens[place] += sum(map(len, rows[place]))
                unk = reader.pretrained.unk_token_id
                unknown[place] += sum(row.count(unk) for row in rows[place])
        return Comparison(count, changed, (tokens[0], tokens[1]), (unknown[0], unknown[1]))

    def read_alike(self, texts: list[str]) -> list[str]:
        """Those of the texts that have the same tokens with both."""
        return [text for text, same in zip(texts, self._same(*self._rows(texts)), strict=True)
                if same]  # fmt: skip

    def _rows(self, texts: list[str]) -> tuple[list[list[int]], list[list[int]]]:
        whole, cut = (reader.sentence_ids(texts, ROOM) for reader in self._both)
        return whole, cut

    def _same(self, whole: list[list[int]], cut: list[list[int]]) -> list[bool]:
        pairs = zip(whole, cut, strict=True)
        return [old == [self._old[number] for number in new] for old, new in pairs]


def _added_up(counted: Sequence[Artifact], num_ids: int) -> np.ndarray:
    """(ids,) int64: how often each token occurs in all texts."""
    total = np.zeros(num_ids, dtype=np.int64)
    for one in counted:
        for number in one.shard_numbers:
            ids, counts = (np.load(one.shard_path(number, f"{name}.npy")) for name in
                           ("ids", "counts"))  # fmt: skip
            total[ids] += counts
    return total


def _first_texts(sentences: Artifact) -> Iterator[list[str]]:
    left = NUM_READ
    for number in sentences.shard_numbers:
        texts = read_texts(sentences, number)[:left]
        left -= len(texts)
        for start in range(0, len(texts), BLOCK):
            yield texts[start : start + BLOCK]
        if not left:
            return


def _computed(
    settings: StudentSettings, located: StudentSettings, texts: list[str]
) -> tuple[float | None, tuple[int, int]]:
    """The lowest cosine of what both models make of the same tokens, and their parameters.

    Raises:
        UserError: it is not 1.
    """
    whole, cut = (
        load_encoder(one.model_copy(update={"layers": None})) for one in (settings, located)
    )
    parameters = whole.num_parameters, cut.num_parameters
    if not texts:
        return None, parameters
    vectors = [unit_rows(one.encode(texts)) for one in (whole, cut)]
    lowest = float((vectors[0] * vectors[1]).sum(1).min())
    if not lowest > LEAST_COSINE:
        raise UserError(
            f"{WHERE}: cut, model '{settings.model}' gives other vectors for the same tokens "
            f"(cosine {lowest:.4f}), so there is something else in it that depends on their "
            "numbers; leave `vocabulary` out"
        )
    return lowest, parameters
