"""Tables of made-up pairs: a title, and a body that goes on about it."""

import csv
import json
from pathlib import Path

from tests.support.models import make_sentences


def make_pairs(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Distinct titles, each with a distinct body that begins with its words."""
    titles, rest = make_sentences(count, seed), make_sentences(count, seed + 1000)
    return [(title, f"{title[:-1]} and {more}") for title, more in zip(titles, rest, strict=True)]


def write_pairs(file: Path, pairs: list[tuple[str, str]]) -> Path:
    """As TSV, CSV, JSONL or Parquet, by the suffix, with a column `title` and a column `body`."""
    rows = [{"number": n, "title": title, "body": body} for n, (title, body) in enumerate(pairs)]
    if file.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), file)
    elif file.suffix == ".jsonl":
        file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    elif file.suffix == ".csv":
        with file.open("w", newline="") as out:
            writer = csv.DictWriter(out, ["number", "title", "body"])
            writer.writeheader()
            writer.writerows(rows)
    else:
        lines = ["\t".join(map(str, row.values())) for row in rows]
        file.write_text("\n".join(["number\ttitle\tbody", *lines]) + "\n")
    return file
