"""The table at the end of a run: student before and after, and teachers, side by side."""

from typing import Any


def rows_in_order(evaluations: dict[str, Any]) -> list[str]:
    """Before, teachers, after; each followed by itself with ranks. After --only some may miss."""
    base = [name for name in evaluations if not name.endswith("+ranks")]
    base.sort(key=lambda name: (name == "after", name != "before"))
    names = [name for one in base for name in (one, f"{one}+ranks")]
    return [name for name in names if name in evaluations]


def title_of(name: str) -> str:
    """Row title of an encoder."""
    who, _, ranks = name.partition("+")
    title = {"before": "student before", "after": "student after"}.get(who, who)
    return f"{title} + ranks" if ranks else title


def aligned(rows: list[list[str]]) -> list[str]:
    """Rows as lines, the first of them a heading; later rows may be shorter."""
    width = [max(len(row[i]) for row in rows if i < len(row)) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(width[0])]
        cells += [cell.rjust(width[i]) for i, cell in enumerate(row[1:], start=1)]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * max(map(len, lines)))
    return lines


def results_table(evaluations: dict[str, Any], speed: dict[str, Any] | None) -> str:
    """Figures x 100 by row of encoder; 95% intervals below the student's.

    Args:
        evaluations: results by `before`, `after` and teacher name, `+ranks` behind it for
            similarities of ranks.
        speed: the speed comparison, when there is one.
    """
    names = rows_in_order(evaluations)
    first = evaluations["after"]
    columns = ["", "layers", "MB"]
    columns += [*first["sts"]]
    if len(first["sts"]) > 1:
        columns.append("mean")
    if "retrieval" in first:
        columns += ["MRR@10", "R@1", "R@10"]
    if "geometry" in first:
        columns += ["alignment", "uniformity"]
    if speed:
        columns.append("sentences/s")
    rows = [columns]
    for name in names:
        result = evaluations[name]
        row = [title_of(name), str(result["size"]["layers"])]
        row.append(f"{result['size']['megabytes_float32']:.0f}")
        scores = [entry["spearman"] for entry in result["sts"].values()]
        row += [f"{score:.2f}" for score in scores]
        if len(scores) > 1:
            row.append(f"{sum(scores) / len(scores):.2f}")
        if "retrieval" in result:
            found = result["retrieval"]
            row += [f"{found[key]:.1f}" for key in ("mrr_at_10", "recall_at_1", "recall_at_10")]
        if "geometry" in result:
            row += [f"{result['geometry'][key]:.3f}" for key in ("alignment", "uniformity")]
        if speed:
            rate = speed["sentences_per_second"].get("student" if name == "after" else name)
            row.append(f"{rate:,.0f}" if rate else "")
        rows.append(row)
    intervals = [entry.get("interval_95") for entry in first["sts"].values()]
    if any(intervals):
        cells = [
            f"{low:.1f}-{high:.1f}" if (low := i[0]) and (high := i[1]) else "" for i in intervals
        ]
        rows.append(["  95% interval", "", "", *cells])
    lines = aligned(rows)
    notes = []
    if first["sts"]:
        notes.append("STS: Spearman x 100.")
    if "retrieval" in first:
        notes.append(
            f"Retrieval x 100: a held-out function's description from its summary line, "
            f"among {first['retrieval']['num_pairs']:,}."
        )
    if "geometry" in first:
        notes.append("Alignment of pairs that mean the same, uniformity of all: lower is better.")
    if speed:
        for name, ratio in speed["times_faster"].items():
            notes.append(
                f"The student is {ratio['median']:.2f} times as fast as {name} "
                f"({ratio['low']:.2f} to {ratio['high']:.2f}, {speed['threads']} thread(s))."
            )
    return "\n".join([*lines, "", *notes]).rstrip()
