"""Retrieval without labels: find a query's own document among those of all held-out pairs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import Field

from stages.contract import Work
from stages.evaluate.base import Evaluation, Result, Tested
from stages.evaluate.relevance import mean_figures, mean_items
from stages.evaluate.tables import finite_vectors, products
from stages.kinds import Kinds

# Queries compared with all descriptions at once: 1,024 x N float32 scores in memory.
QUERY_ROWS = 1024


class RetrievalSettings(Evaluation):
    """A test without labels: find a query's own document."""

    two_sided = True
    of_documents = True

    kind: Literal["python-docs", "columns", "first-sentence"] = Field(
        "python-docs",
        description="What the stage `sentences` held out. python-docs: documented functions, a "
        "summary line and a description. columns: pairs of a table (`sentences.columns`); queries "
        "and documents have the prompts of their kinds. first-sentence: texts that are split; the "
        "first sentence is to find the rest.",
    )
    num_pairs: int = Field(1000, ge=2, description="Most pairs to use.")

    @property
    def title(self) -> str:
        return "retrieval"

    @property
    def reads(self) -> tuple[str, ...]:
        return ("sentences",)

    def score(self, tested: Tested, work: Work) -> Result:
        import pyarrow.parquet as pq

        held_out = pq.read_table(work.input("sentences").file_path("holdout.parquet"))
        rows = held_out.slice(0, self.num_pairs).to_pydict()
        work.say(f"retrieval: {min(held_out.num_rows, self.num_pairs):,} pairs")
        if self.kind == "python-docs":
            what = "a held-out function's description from its summary line"
            return score_retrieval(rows["summary"], rows["description"], tested, what)
        if self.kind == "first-sentence":
            what = "the rest of a held-out text from its first sentence"
            return score_retrieval(rows["query"], rows["document"], tested, what)
        what = "the document of a held-out query"
        kinds: tuple[Kinds, Kinds] = "query", "document"
        return score_retrieval(rows["query"], rows["document"], tested, what, kinds)


def score_retrieval(
    queries: Sequence[str],
    documents: Sequence[str],
    tested: Tested,
    what: str,
    kinds: tuple[Kinds, Kinds] = (None, None),
) -> Result:
    """MRR@10, recall@1, recall@10 and nDCG@10 (all x 100) where document i answers query i.

    A document that ties with the right one is ranked before it, so a constant encoder scores 0.

    Args:
        what: is found, from what; for the note.
        kinds: of the queries and of the documents.

    Raises:
        UserError: a vector is not finite.
    """
    of_query, of_document = kinds
    encode_documents = tested.encode_documents or tested.encode
    document_vectors = finite_vectors(documents, encode_documents, of_document)
    query_vectors = finite_vectors(queries, tested.encode, of_query)
    ranks = np.empty(len(queries), dtype=np.int64)
    for start in range(0, len(queries), QUERY_ROWS):
        scores = products(query_vectors[start : start + QUERY_ROWS], document_vectors)
        right = scores[np.arange(len(scores)), np.arange(start, start + len(scores))]
        ranks[start : start + QUERY_ROWS] = (scores >= right[:, None]).sum(1)
    found = ranks <= 10
    values = {
        "MRR@10": np.where(found, 1 / ranks, 0),
        "R@1": ranks == 1,
        "R@10": found,
        "nDCG@10": np.where(found, 1 / np.log2(1 + ranks), 0),
    }
    return Result(
        [replace(figure, decimals=1) for figure in mean_figures("", values)],
        (f"Retrieval x 100: {what}, among {len(queries):,}.",),
        {"num_pairs": len(queries)},
        mean_items("", values),
    )
