"""Sentences of an artifact by row number."""

from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.sentences.texts import texts_of_rows


@pytest.mark.parametrize("kinds", [True, False])
def test_rows_come_in_the_order_asked_for_from_any_shard(tmp_path, kinds):
    counts = [4, 3, 5]
    texts = [f"sentence {row}" for row in range(12)]
    kind_of = ["query" if row % 3 else "document" for row in range(12)]
    for number, start in enumerate((0, 4, 7)):
        inside = slice(start, start + counts[number])
        table = {"text": texts[inside]} | ({"kind": kind_of[inside]} if kinds else {})
        pq.write_table(pa.table(table), tmp_path / f"{number}.parquet")
    sentences = SimpleNamespace(
        shard_numbers=range(3),
        shard_rows=counts.__getitem__,
        shard_path=lambda number, name: tmp_path / f"{number}.parquet",
    )
    rows = [11, 0, 4, 3, 8, 0, 6]
    found, of_kinds = texts_of_rows(sentences, rows)
    assert found == [texts[row] for row in rows]
    assert of_kinds == ([kind_of[row] for row in rows] if kinds else None)
    assert texts_of_rows(sentences, []) == ([], None)
