"""The table at the end of a run: student before and after, and teachers, side by side."""

from pipeline.report.figures import Results, averages
from stages.contract import Figure


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


def headings(results: Results) -> list[str]:
    """The figures' names, and means behind the figures that they are of."""
    columns = results.columns
    for encoder in results.encoders:
        figures = results.figures(encoder)
        for mean in averages(figures.values()):
            last = [name for name in columns if name in figures and figures[name].averaged == mean]
            if mean not in columns:
                columns.insert(columns.index(last[-1]) + 1, mean)
    return columns


def results_table(results: Results) -> str:
    """Figures by encoder; 95% intervals below the student's."""
    columns = headings(results)
    rows = [["", *columns]]
    for encoder in results.encoders:
        figures = results.figures(encoder)
        means = {name: f"{value:.2f}" for name, value in averages(figures.values()).items()}
        cells = means | {name: shown(figure) for name, figure in figures.items()}
        rows.append([encoder.title, *(cells.get(name, "") for name in columns)])
    intervals = {name: _interval(figure) for name, figure in results.student.items()}
    if any(intervals.values()):
        cells_95 = [intervals.get(name, "") for name in columns]
        while not cells_95[-1]:
            cells_95.pop()
        rows.append(["  95% interval", *cells_95])
    return "\n".join([*aligned(rows), "", *results.notes]).rstrip()


def shown(figure: Figure) -> str:
    """A figure as the table has it; `nan` where nothing could be measured."""
    return f"{figure.value:,.{figure.decimals}f}"


def _interval(figure: Figure) -> str:
    if figure.interval is None:
        return ""
    low, high = figure.interval
    return f"{low:.1f}-{high:.1f}"
