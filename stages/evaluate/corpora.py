"""Retrieval on a corpus of one's own: queries, documents, and which documents answer which query.

Files as the BEIR collection has them, and TSV. Search is exact, in blocks.

Memory: the texts (twice while a file is read), the vectors (4 bytes x width for each, twice while
they are put in order), and a block of QUERY_ROWS x DOCUMENT_ROWS scores.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from stages.contract import Work
from stages.errors import UserError
from stages.evaluate.base import Evaluation, Result, Tested
from stages.evaluate.relevance import mean_figures, mean_items, ndcg, reciprocal_rank, trec_order
from stages.evaluate.tables import as_text, finite_vectors, products, read_table
from stages.fields import InputPath, Name

QUERY_ROWS = 256
DOCUMENT_ROWS = 65536
# Documents kept of each query; the deepest measure is recall@100.
DEPTH = 100
ID, TEXT = ("_id", "id"), ("text",)
QUERY_ID, DOCUMENT_ID, SCORE = ("query-id", "query"), ("corpus-id", "document"), ("score", "label")
# Tests whose files were found good in this process; a run asks once for each row of its table.
_whole: set[str] = set()


@dataclass(frozen=True)
class Corpus:
    """relevance: of each query that has any, the gains of its relevant documents by id."""

    queries: dict[str, str]
    documents: dict[str, str]
    relevance: dict[str, dict[str, float]]


class CorpusTest(Evaluation):
    """nDCG@10, MRR@10, recall@10 and recall@100 of exact search."""

    two_sided = True
    of_documents = True

    name: Name = Field(description="Name of the corpus in tables and node names.")
    queries: InputPath = Field(
        description="TSV, CSV, JSONL or Parquet with the columns _id (or id) and text."
    )
    documents: InputPath = Field(
        description="The same for documents; a column title stands before the text."
    )
    relevance: InputPath = Field(
        description="Columns query-id, corpus-id and score (BEIR), or query, document and label; "
        "or TREC's qrels. A document with score 0 is not relevant."
    )

    @property
    def title(self) -> str:
        return f"retrieval-{self.name}"

    def check(self) -> None:
        known = json.dumps(self.described(), sort_keys=True)
        if known not in _whole:
            self.load()
            _whole.add(known)

    def load(self) -> Corpus:
        """Raises UserError: a file or a column is missing, an id is there twice, a text is empty,
        relevance of what is not there, or no query has a relevant document."""
        queries = dict(self._texts("queries", self.queries, ""))
        documents = dict(self._texts("documents", self.documents, "title"))
        relevance: dict[str, dict[str, float]] = {}
        seen: set[tuple[str, str]] = set()
        for number, row in self._rows("relevance", self.relevance):
            where = f"{self._where('relevance')}, row {number}"
            query, document, score = (
                _cell(row, names, where) for names in (QUERY_ID, DOCUMENT_ID, SCORE)
            )
            for kind, one, known in (("query", query, queries), ("document", document, documents)):
                if one not in known:
                    raise UserError(
                        f"{where}: there is no {kind} '{one}'; add it or take the row out"
                    )
            try:
                gain = float(score)
            except ValueError:
                gain = float("nan")
            if not np.isfinite(gain):
                raise UserError(f"{where}: the score is {score!r}, which is not a number")
            if (query, document) in seen:
                raise UserError(f"{where}: '{document}' for '{query}' is there twice; keep one")
            seen.add((query, document))
            if gain > 0:
                relevance.setdefault(query, {})[document] = gain
        if not relevance:
            raise UserError(f"{self._where('relevance')}: no document is relevant to any query")
        return Corpus(queries, documents, relevance)

    def _where(self, setting: str) -> str:
        return f"evaluate.corpora '{self.name}', {setting} ({getattr(self, setting)})"

    def _rows(self, setting: str, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
        path = Path(name).expanduser()
        if not path.is_file():
            raise UserError(f"{self._where(setting)}: there is no such file")
        try:
            rows = _qrels(path) if setting == "relevance" else None
            yield from enumerate(rows or read_table(path), start=1)
        except ValueError as error:
            raise UserError(f"{self._where(setting)}: cannot be read ({error})") from None

    def _texts(self, setting: str, name: str, title: str) -> Iterator[tuple[str, str]]:
        seen: set[str] = set()
        for number, row in self._rows(setting, name):
            where = f"{self._where(setting)}, row {number}"
            known, text = _cell(row, ID, where), _cell(row, TEXT, where)
            if title and title in row:  # "" is a column that pandas writes, the rows' numbers
                text = f"{_cell(row, (title,), where)} {text}".strip()
            if not known:
                raise UserError(f"{where}: the id is empty; give every text one")
            if known in seen:
                raise UserError(f"{where}: the id '{known}' is there twice; ids must differ")
            if not text:
                raise UserError(f"{where}: the text of '{known}' is empty; take the row out")
            seen.add(known)
            yield known, text

    def score(self, tested: Tested, work: Work) -> Result:
        corpus = self.load()
        work.say(f"{self.name}: {len(corpus.relevance):,} queries, {len(corpus.documents):,} texts")
        return score_corpus(self.name, corpus, tested)


def _qrels(path: Path) -> list[dict[str, Any]] | None:
    """Rows of a file that begins as trec_eval's do, `query 0 document relevance` without a header;
    None of others.

    Raises:
        ValueError: a line has not these four.
    """
    if path.suffix not in ("", ".txt", ".tsv", ".qrels"):
        return None
    lines: list[list[str]] = []
    with suppress(OSError, UnicodeDecodeError), path.open(encoding="utf-8") as file:
        first = file.readline().split()
        if len(first) == 4 and first[3].lstrip("-").isdigit():
            lines = [first, *(line.split() for line in file)]
    if not lines:
        return None
    for number, line in enumerate(lines, start=1):
        if len(line) != 4:
            raise ValueError(f"line {number} has not the four columns of TREC's qrels")
    return [{"query": q, "document": d, "score": score} for q, _, d, score in lines]


def _cell(row: dict[str, Any], names: tuple[str, ...], where: str) -> str:
    for name in names:
        if name in row:
            try:
                return as_text(row[name])
            except ValueError as error:
                raise UserError(f"{where}: '{name}' is {error}") from None
    raise UserError(f"{where}: there is no column '{names[0]}'; it has {', '.join(row)}")


def score_corpus(name: str, corpus: Corpus, tested: Tested) -> Result:
    """All x 100, means over the queries that have a relevant document, with 95% intervals of a mean
    over queries. Queries and documents get the prompts of their kinds."""
    asked, ids = list(corpus.relevance), list(corpus.documents)
    encode_documents = tested.encode_documents or tested.encode
    documents = finite_vectors(list(corpus.documents.values()), encode_documents, "document")
    queries = finite_vectors([corpus.queries[one] for one in asked], tested.encode, "query")
    id_ranks = np.empty(len(ids), np.int64)
    id_ranks[sorted(range(len(ids)), key=ids.__getitem__)] = np.arange(len(ids))
    found: dict[str, list[float]] = {"nDCG@10": [], "MRR@10": [], "R@10": [], "R@100": []}
    for start in range(0, len(asked), QUERY_ROWS):
        block = queries[start : start + QUERY_ROWS]
        for query, ranked in zip(asked[start:], search(block, documents, id_ranks), strict=False):
            gain_of = corpus.relevance[query]
            gains = np.array([gain_of.get(ids[row], 0.0) for row in ranked])
            found["nDCG@10"].append(ndcg(gains, list(gain_of.values()), 10))
            found["MRR@10"].append(reciprocal_rank(gains > 0, 10))
            for depth in (10, 100):
                found[f"R@{depth}"].append(float((gains[:depth] > 0).sum() / len(gain_of)))
    figures = mean_figures(name, found)
    note = f"Retrieval x 100 from {name}: {len(asked):,} queries, {len(ids):,} documents, exact."
    facts = {"num_queries": len(asked), "num_documents": len(ids)}
    return Result(figures, (note,), facts, mean_items(name, found))


def search(queries: np.ndarray, documents: np.ndarray, id_ranks: np.ndarray) -> list[np.ndarray]:
    """Rows of the DEPTH most similar documents of each query, the most similar first; equally
    similar ones as trec_eval orders them, by the places of their ids (N,)."""
    kept: list[tuple[np.ndarray, np.ndarray]] = [
        (np.empty(0, np.int64), np.empty(0, np.float32)) for _ in range(queries.shape[0])
    ]
    for start in range(0, documents.shape[0], DOCUMENT_ROWS):
        scores = products(queries, documents[start : start + DOCUMENT_ROWS])
        for place, (rows, best) in enumerate(kept):
            own = scores[place]
            if len(own) > DEPTH:  # all that tie with the last one stay until they are ordered
                near = np.flatnonzero(own >= np.partition(own, -DEPTH)[-DEPTH])
            else:
                near = np.arange(len(own))
            rows, best = np.concatenate([rows, near + start]), np.concatenate([best, own[near]])
            order = trec_order(best, id_ranks[rows])[:DEPTH]
            kept[place] = rows[order], best[order]
    return [rows for rows, _ in kept]
