"""What every source of rewrites gives, and how a shard of them is stored.

    rewrites.parquet   row (int32: the sentence's place in its shard), text, negative (or null);
                       by row, several for a sentence or none
    rejects.parquet    row, reason, text: what was given and dropped, or why there is nothing
    stats.json         rewrites, sentences_with_rewrite, rejected by reason

Every sentence of the shard is in one of the two tables at least.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import pyarrow as pa

from stages.rewrite.filters import Filters
from stages.sentences.build import parquet_bytes


@dataclass(frozen=True)
class Outcome:
    """What became of one sentence: a rewrite (and maybe a negative), or the reason why not.

    text: the rewrite; with a reason, what was given.
    """

    text: str
    negative: str | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Rewrite:
    """An outcome with the place of its sentence in the shard (`row`)."""

    row: int
    text: str
    negative: str | None = None
    reason: str | None = None


REWRITES = pa.schema([("row", pa.int32()), ("text", pa.string()), ("negative", pa.string())])
REJECTS = pa.schema([("row", pa.int32()), ("reason", pa.string()), ("text", pa.string())])


def shard_files(
    sentences: Sequence[str], rewrites: Iterable[Rewrite], filters: Filters
) -> dict[str, bytes]:
    """Filters the rewrites of one shard and lays them out.

    A negative is checked on its own, and dropped from its rewrite where it fails.
    """
    kept: list[Rewrite] = []
    rejected: list[Rewrite] = []
    seen: set[tuple[int, str]] = set()
    for one in sorted(map(_storable, rewrites), key=lambda rewrite: rewrite.row):
        reason = one.reason or filters.fault(sentences[one.row], one.text)
        if reason is None and (one.row, one.text) in seen:
            reason = "duplicate"
        if reason is not None:
            rejected.append(replace(one, reason=reason))
            continue
        seen.add((one.row, one.text))
        negative = one.negative
        if negative is not None and (fault := filters.fault(sentences[one.row], negative)):
            rejected.append(Rewrite(one.row, negative, reason=f"negative_{fault}"))
            negative = None
        kept.append(replace(one, negative=negative))
    named = {one.row for one in [*kept, *rejected]}
    rejected += [
        Rewrite(row, "", reason="no_rewrite") for row in range(len(sentences)) if row not in named
    ]
    stats = {
        "rewrites": len(kept),
        "negatives": sum(one.negative is not None for one in kept),
        "sentences_with_rewrite": len({one.row for one in kept}),
        "rejected": dict(Counter(one.reason for one in rejected)),
    }
    return {
        "rewrites.parquet": _table(kept, REWRITES),
        "rejects.parquet": _table(sorted(rejected, key=lambda one: one.row), REJECTS),
        "stats.json": json.dumps(stats).encode(),
    }


def _table(rows: list[Rewrite], schema: pa.Schema) -> bytes:
    return parquet_bytes(pa.Table.from_pylist([asdict(one) for one in rows], schema))


def _storable(one: Rewrite) -> Rewrite:
    """Lone surrogates (from JSON escapes) cannot be encoded."""
    text, negative = (
        None if text is None else text.encode("utf-8", "replace").decode("utf-8")
        for text in (one.text, one.negative)
    )
    return replace(one, text=text or "", negative=negative)


def added(stats: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Statistics of several shards as one."""
    total: Counter[str] = Counter()
    rejected: Counter[str] = Counter()
    for one in stats:
        rejected.update(one["rejected"])
        total.update({key: value for key, value in one.items() if key != "rejected"})
    return dict(total) | {"rejected": dict(rejected)}
