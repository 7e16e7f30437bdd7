"""Rows of the table that teach nobody: other encoders, whitened vectors, word vectors, BM25."""

import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from stages import content
from stages.contract import Fingerprinted, Work
from stages.encoder.settings import EncoderSettings
from stages.errors import UserError
from stages.evaluate.base import Encode, Evaluation
from stages.evaluate.bm25 import K1, B, Bm25
from stages.fields import InputPath, ModelName, Name
from stages.kinds import Kinds
from stages.rows import unit_rows
from stages.settings import added

# Sentences that whitening is learned from, at most
WHITENED_ROWS = 10_000
# A word, or a mark of punctuation, as GloVe's own tokeniser leaves them
WORD = re.compile(r"\w+(?:'\w+)?|[^\w\s]")


class BaselineSettings(EncoderSettings):
    """An encoder to compare with, a file of word vectors, or BM25."""

    name: Name = Field(description="Name of its row.")
    model: ModelName = Field("", description="As for any encoder; none for the other kinds.")
    words: InputPath | None = Field(
        None,
        description="Word vectors as text (GloVe, word2vec, fastText): a word and its numbers a "
        "line. A sentence's vector is the mean over its words, in lower case.",
    )
    bm25: bool = added(
        False,
        description="Rank documents by the words that they share with a query; for `retrieval`, "
        "`corpora` and `reranking`.",
    )
    whitening: int | None = Field(
        None,
        ge=1,
        description="Whiten its vectors with the mean and covariance over sentences of the corpus, "
        "and keep so many dimensions (Su et al. 2021, BERT-whitening).",
    )

    @model_validator(mode="after")
    def _one_source(self) -> "BaselineSettings":
        kinds = {"model": bool(self.model), "words": self.words is not None, "bm25": self.bm25}
        kind, *others = [name for name, given in kinds.items() if given] or [""]
        if not kind or others:
            raise ValueError(f"baseline '{self.name}': give one of model, words and bm25")
        of_models = [key for key in EncoderSettings.model_fields if key != "model"]
        unread = self.given(*of_models) if kind != "model" else []
        if kind == "bm25" and self.whitening is not None:
            unread.append("whitening")
        if unread:
            raise ValueError(f"baseline '{self.name}': `{unread[0]}` has no effect on {kind}")
        return self

    def takes(self, test: Evaluation) -> bool:
        """Whether a test says anything about it."""
        return test.of_documents or (test.of_teachers and not self.bm25)


@dataclass(frozen=True)
class WordsSource:
    """Word vectors or BM25, where an evaluation has an encoder of a recipe."""

    settings: BaselineSettings
    node: str = ""
    inputs: tuple[tuple[str, str], ...] = ()

    def identity(self, inputs: Mapping[str, Fingerprinted]) -> dict[str, Any]:
        if self.settings.bm25:
            return {"encoder.bm25": {"k1": K1, "b": B}}
        where = f"evaluate.baselines '{self.settings.name}'"
        return {"encoder.words": content.describe_path(str(self.settings.words), where)}

    @property
    def packages(self) -> tuple[str, ...]:
        return ("scikit-learn", "scipy") if self.settings.bm25 else ()

    def check(self, max_length: int) -> None:
        """Reads the file's first word.

        Raises:
            UserError: it is no file of words and numbers.
        """
        if self.settings.words is not None:
            next(_word_vectors(self._file))

    def load(self) -> "WordVectors | Bm25":
        if self.settings.bm25:
            return Bm25()
        return WordVectors(self._file)

    @property
    def _file(self) -> Path:
        return Path(str(self.settings.words)).expanduser()


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            yield from file
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a UTF-8 text file of words and numbers") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder; name the file with the word vectors") from None


def _word_vectors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Words and their vectors (D,) float32, one at least.

    Raises:
        UserError: the file is no table of words and numbers.
    """
    width, vector = 0, None
    for number, line in enumerate(_lines(path), start=1):
        cells = line.rstrip().split(" ")
        if number == 1 and len(cells) == 2 and cells[1].isdigit():
            continue  # word2vec's count of words, and width
        width = width or len(cells) - 1
        try:
            vector = np.array(cells[-width:], dtype=np.float32)
        except ValueError:
            vector = None
        if vector is None or not np.isfinite(vector).all() or not 0 < width < len(cells):
            raise UserError(
                f"{path}, line {number}: not a word and {width or 'its'} numbers with a space "
                "between them"
            )
        yield " ".join(cells[:-width]), vector  # some words of GloVe have spaces in them
    if vector is None:
        raise UserError(f"{path}: there are no word vectors in it")


class WordVectors:
    """Mean word vectors; a sentence without a known word has a zero vector.

    Memory: 4 bytes for each number of the file, 0.5 GB for GloVe's 400,000 words of 300 numbers.

    Raises:
        UserError: the file is no table of words and numbers.
    """

    num_layers = 0

    def __init__(self, path: Path) -> None:
        numbers = array("f")
        self._row_of: dict[str, int] = {}
        for row, (word, vector) in enumerate(_word_vectors(path)):
            self._row_of.setdefault(word, row)
            numbers.frombytes(vector.tobytes())
        self._vectors = np.frombuffer(numbers, dtype=np.float32).reshape(row + 1, -1)
        self.num_parameters = self._vectors.size

    def encode(self, texts: Sequence[str], kinds: Kinds = None) -> np.ndarray:
        """Rows (N, D) float32."""
        out = np.zeros((len(texts), self._vectors.shape[1]), dtype=np.float32)
        for place, text in enumerate(texts):
            words = WORD.findall(text.lower())
            rows = [self._row_of[word] for word in words if word in self._row_of]
            if rows:
                out[place] = self._vectors[rows].mean(0)
        return out


def whitened(encode: Encode, dimensions: int, work: Work) -> Encode:
    """The encoder with its vectors whitened: x -> (x - mu) U L^-1/2, the leading dimensions.

    mu and the covariance U L U^T are those of sentences of the corpus (its first, in random order).

    Raises:
        UserError: the vectors have fewer dimensions, or there are fewer sentences.
    """
    from stages.sentences.texts import texts_of_rows

    sentences = work.input("sentences")
    count = min(WHITENED_ROWS, sentences.num_rows)
    vectors = encode(*texts_of_rows(sentences, list(range(count)))).astype(np.float64)
    width = vectors.shape[1]
    if dimensions > min(width, count - 1):
        raise UserError(
            f"evaluate.baselines.whitening is {dimensions}, but there are {width} dimensions and "
            f"{count} sentences to learn it from; lower it"
        )
    mean = vectors.mean(0)
    directions, values, _ = np.linalg.svd(np.cov(vectors.T, bias=True))
    kernel = directions[:, :dimensions] / np.sqrt(values[:dimensions])

    def encode_whitened(texts: Sequence[str], kinds: Kinds = None) -> np.ndarray:
        return unit_rows((encode(texts, kinds) - mean) @ kernel)

    return encode_whitened
