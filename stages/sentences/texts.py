"""The sentences of a published artifact, as other rooms read them."""

from bisect import bisect_left
from collections.abc import Sequence

import pyarrow.parquet as pq

from stages.contract import Artifact
from stages.kinds import Kind


def read_texts(sentences: Artifact, number: int) -> list[str]:
    """Sentences of one shard."""
    path = sentences.shard_path(number, "rows.parquet")
    return list(pq.read_table(path, columns=["text"]).column(0).to_pylist())


def read_kinds(sentences: Artifact, number: int) -> list[Kind] | None:
    """The kind of each sentence of one shard; None where they have none."""
    path = sentences.shard_path(number, "rows.parquet")
    if "kind" not in pq.read_schema(path).names:
        return None
    return list(pq.read_table(path, columns=["kind"]).column(0).to_pylist())


def texts_of_rows(sentences: Artifact, rows: Sequence[int]) -> tuple[list[str], list[Kind] | None]:
    """Sentences and their kinds by row number, in the order asked for; one shard is in memory at a
    time."""
    found: dict[int, str] = {}
    kind_of: dict[int, Kind] = {}
    ordered = sorted({*rows})
    start = first = 0
    for shard in sentences.shard_numbers:
        end = start + sentences.shard_rows(shard)
        last = bisect_left(ordered, end, first)
        inside = ordered[first:last]
        if inside:
            texts = read_texts(sentences, shard)
            kinds = read_kinds(sentences, shard) or []
            found |= {row: texts[row - start] for row in inside}
            kind_of |= {row: kinds[row - start] for row in inside if kinds}
        start, first = end, last
    return [found[row] for row in rows], [kind_of[row] for row in rows] if kind_of else None
