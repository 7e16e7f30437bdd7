"""Reranking: candidates of a query in the order of their similarity to it."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from pydantic import Field

from stages.contract import Work
from stages.errors import UserError
from stages.evaluate.base import Evaluation, Result, Tested
from stages.evaluate.relevance import (
    average_precision,
    mean_figures,
    mean_items,
    reciprocal_rank,
    trec_order,
)
from stages.evaluate.tables import TableSettings, finite_vectors, products


@dataclass(frozen=True)
class Candidates:
    """A query's candidates; relevant: (n,) bool."""

    query: str
    texts: list[str]
    relevant: np.ndarray


class RerankingTest(TableSettings, Evaluation):
    """MAP and MRR@10 over queries. Columns `query`, `candidate` and `label` (0 or 1), a row for
    each candidate."""

    what: ClassVar[str] = "reranking set"
    two_sided = True
    of_documents = True

    split: str | None = Field(
        None,
        description="Test on the rows whose column `split` has this value; null: 'test', "
        "or all rows where there is no such column.",
    )

    @property
    def title(self) -> str:
        return f"reranking-{self.name}"

    def load(self) -> list[Candidates]:
        """Queries that have relevant candidates and others; a candidate that is there twice counts
        once.

        Raises:
            UserError: an empty cell, a label that is not 0 or 1, or no query is left.
        """
        rows = self.rows(("query", "candidate", "label"), [self.split or "test"])
        found: dict[str, dict[str, bool]] = {}
        for number, row in self.tested(rows, self.split):
            query, text = (self.text(row, column, number) for column in ("query", "candidate"))
            label = self.label(row, number)
            if label not in ("0", "1"):
                raise UserError(f"{self.where}, row {number}: the label is {label!r}, not 0 or 1")
            candidates = found.setdefault(query, {})
            candidates[text] = candidates.get(text, False) or label == "1"
        queries = [
            Candidates(query, list(candidates), np.array(list(candidates.values())))
            for query, candidates in found.items()
            if len(set(candidates.values())) == 2
        ]
        if not queries:
            raise UserError(
                f"{self.where}: of {len(found)} queries none has both a relevant candidate and "
                "another one"
            )
        return queries

    def score(self, tested: Tested, work: Work) -> Result:
        queries = self.load()
        work.say(f"{self.name}: {len(queries):,} queries")
        return score_reranking(self.name, queries, tested)


def score_reranking(name: str, queries: list[Candidates], tested: Tested) -> Result:
    """MAP and MRR@10 x 100; of equally similar candidates the later one comes first.
    Queries and candidates get the prompts of queries and documents."""
    texts = [text for one in queries for text in one.texts]
    vectors = finite_vectors(texts, tested.encode_documents or tested.encode, "document")
    asked = finite_vectors([one.query for one in queries], tested.encode, "query")
    precisions, ranks, start = [], [], 0
    for row, one in enumerate(queries):
        (scores,) = products(asked[row : row + 1], vectors[start : start + len(one.texts)])
        start += len(one.texts)
        relevant = one.relevant[trec_order(scores, np.arange(len(scores)))]
        precisions.append(average_precision(relevant, int(relevant.sum())))
        ranks.append(reciprocal_rank(relevant, 10))
    values = {"MAP": precisions, "MRR@10": ranks}
    figures = mean_figures(name, values)
    note = "Reranking: MAP and MRR@10 x 100 of each query's own candidates."
    facts = {"num_queries": len(queries), "num_candidates": len(texts)}
    return Result(figures, (note,), facts, mean_items(name, values))
