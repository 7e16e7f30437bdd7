"""Figures of several seeds as text. Not a benchmark itself."""

import statistics


def over_seeds(rows: list[dict[str, float]]) -> str:
    """Mean and standard deviation of every column over the rows, one row a seed."""
    cells = []
    for name in rows[0]:
        values = [row[name] for row in rows]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        cells.append(f"{name} {statistics.mean(values):.2f}±{spread:.2f}")
    return "   ".join(cells)
