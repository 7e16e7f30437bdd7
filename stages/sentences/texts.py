"""The sentences of a published artifact, as other rooms read them."""

from collections.abc import Sequence

import pyarrow.parquet as pq

from stages.contract import Artifact


def read_texts(sentences: Artifact, number: int) -> list[str]:
    """Sentences of one shard."""
    path = sentences.shard_path(number, "rows.parquet")
    return list(pq.read_table(path, columns=["text"]).column(0).to_pylist())


def texts_of_rows(sentences: Artifact, rows: Sequence[int]) -> list[str]:
    """Sentences by row number, in the order asked for; one shard is in memory at a time."""
    found: dict[int, str] = {}
    start = 0
    for shard in sentences.shard_numbers:
        end = start + sentences.shard_rows(shard)
        inside = [row for row in rows if start <= row < end]
        if inside:
            texts = read_texts(sentences, shard)
            found |= {row: texts[row - start] for row in inside}
        start = end
    return [found[row] for row in rows]
