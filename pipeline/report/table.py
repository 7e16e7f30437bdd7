"""The table at the end of a run: student before and after, and teachers, side by side."""

import statistics

from pipeline.report.differences import is_clear
from pipeline.report.figures import Results, averages
from stages.contract import EncoderLabel, Figure


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
    """Figures by encoder; below the reference's their 95% intervals. Others' that differ clearly
    from the reference's are marked."""
    rows = [cells for _, cells in results_rows(results)]
    return "\n".join([*aligned(rows), "", *results_notes(results)]).rstrip()


def results_rows(results: Results) -> list[tuple[EncoderLabel | None, list[str]]]:
    """The heading, and every encoder's row; None where there is none, as below the reference."""
    columns, reference = headings(results), results.reference
    marked = {
        (one.encoder, figure.name)
        for one in results.differences
        for figure in one.figures
        if is_clear(figure)
    }
    wide = {name for _, name in marked}
    heading = ["", *(f"{name} " if name in wide else name for name in columns)]
    rows: list[tuple[EncoderLabel | None, list[str]]] = [(None, heading)]
    for encoder in results.encoders:
        figures = results.figures(encoder)
        figures = averages(figures.values()) | figures
        for one in results.means:
            if one.encoder == encoder:
                figures |= {mean.name: mean for mean in one.figures}
        cells = {name: shown(figure) for name, figure in figures.items()}
        for name in wide & cells.keys():
            cells[name] += "*" if (encoder, name) in marked else " "
        rows.append((encoder, [encoder.title, *(cells.get(name, "") for name in columns)]))
        if encoder == reference:
            below = {
                "  95% interval": [_interval(figures.get(name)) for name in columns],
                "  over seeds": [_spread(figures.get(name)) for name in columns],
            }
            rows += [(None, [name, *_filled(cells)]) for name, cells in below.items() if any(cells)]
    return rows


def results_notes(results: Results) -> list[str]:
    """Lines below the table: what its figures and marks mean."""
    notes = list(results.notes)
    if results.differences and results.reference is not None:
        notes.append(
            f"* differs from {results.reference.title}: the 95% interval of the difference, by "
            "paired bootstrap over the same items, is without 0."
        )
    return notes


def _filled(cells: list[str]) -> list[str]:
    """Without the empty ones at the end."""
    return cells[: max(place for place, cell in enumerate(cells, start=1) if cell)]


def differences_text(results: Results) -> str:
    """Every other row less the reference, with 95% intervals; "" without any."""
    if not results.differences or results.reference is None:
        return ""
    columns = [n for n in headings(results) if any(
        n == figure.name for one in results.differences for figure in one.figures
    )]  # fmt: skip
    rows = [[f"less {results.reference.title}", *columns]]
    for one in results.differences:
        figures = {figure.name: figure for figure in one.figures}
        cells = [
            f"{figures[n].value:+.{figures[n].decimals}f}" if n in figures else "" for n in columns
        ]
        limits = [_interval(figures.get(n), "+") for n in columns]
        rows += [[one.encoder.title, *cells], ["  95% interval", *limits]]
    return "\n".join(aligned(rows))


def shown(figure: Figure) -> str:
    """A figure as the table has it; `nan` where nothing could be measured."""
    return f"{figure.value:,.{figure.decimals}f}"


def _interval(figure: Figure | None, sign: str = "") -> str:
    if figure is None or figure.interval is None:
        return ""
    low, high = figure.interval
    form = f"{sign}.{figure.decimals if figure.decimals > 2 else 1}f"
    between = " to " if sign or low < 0 else "-"
    return f"{low:{form}}{between}{high:{form}}"


def _spread(figure: Figure | None) -> str:
    """Standard deviation over seeds, where they differ."""
    if figure is None or len(set(figure.by_seed)) < 2:
        return ""
    return f"±{statistics.stdev(figure.by_seed):.2f}"
