"""Figures as text to be put into a page."""

import io
from typing import Any


def new_figure(width: float, height: float) -> tuple[Any, Any]:
    """A figure of that many inches, and its only axes."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["text.parse_math"] = False  # a `$` in a template is none
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def svg_text(figure: Any) -> str:
    """A figure as text to be put into a page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    text = buffer.getvalue()
    return text[text.index("<svg") :]
