"""Retrieval without labels: find a function's description from its summary line."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from stages.contract import Figure, Work
from stages.evaluate.base import Evaluation, Result, Tested

# Queries compared with all descriptions at once: 1,024 x N float32 scores in memory.
QUERY_ROWS = 1024


class RetrievalSettings(Evaluation):
    """A test without labels: find a function's description from its summary line."""

    two_sided = True

    kind: Literal["python-docs"] = Field(
        "python-docs",
        description="Source of the pairs. python-docs: the documented functions that the stage "
        "`sentences` held out.",
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
        work.say(f"retrieval: {len(rows['summary']):,} pairs")
        return score_retrieval(rows["summary"], rows["description"], tested)


def score_retrieval(
    queries: Sequence[str],
    documents: Sequence[str],
    tested: Tested,
) -> Result:
    """MRR@10, recall@1 and recall@10 (all x 100) where document i answers query i.

    A document that ties with the right one is ranked before it, so a constant encoder scores 0.
    """
    query_vectors = tested.encode(queries)
    document_vectors = (tested.encode_documents or tested.encode)(documents)
    ranks = np.empty(len(queries), dtype=np.int64)
    for start in range(0, len(queries), QUERY_ROWS):
        scores = query_vectors[start : start + QUERY_ROWS] @ document_vectors.T
        right = scores[np.arange(len(scores)), np.arange(start, start + len(scores))]
        ranks[start : start + QUERY_ROWS] = (scores >= right[:, None]).sum(1)
    found = ranks <= 10
    values = {
        "MRR@10": np.where(found, 1 / ranks, 0).mean(),
        "R@1": (ranks == 1).mean(),
        "R@10": found.mean(),
    }
    return Result(
        [Figure(name, 100 * float(x), decimals=1, percent=True) for name, x in values.items()],
        (
            "Retrieval x 100: a held-out function's description from its summary line, among "
            f"{len(queries):,}.",
        ),
        (("num_pairs", len(queries)),),
    )
