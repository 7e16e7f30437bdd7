"""Figures as text to be put into a page."""

import io
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from stages.contract import EncoderLabel

OTHER_COLOURS = [
    "#ff9d3c",
    "#d9c27a",
    "#a58bc0",
    "#5fa777",
    "#c96a6a",
    "#6f8fb5",
    "#b08968",
    "#3f9c9c",
    "#8a8a3c",
    "#d08ab8",
]


def colours(encoders: Sequence[EncoderLabel]) -> dict[EncoderLabel, str]:
    """A colour for each encoder of a picture: the same for the student in all of them."""
    others = itertools.cycle(OTHER_COLOURS)
    found = {}
    for encoder in encoders:
        if encoder.role == "before":
            found[encoder] = "#a3a8b0"
        elif encoder.role == "after":
            found[encoder] = "#1f77b4" if encoder.is_student else "#6a5acd"
        else:
            found[encoder] = next(others)
    return found


def legend_above(figure: Any, encoders: Sequence[EncoderLabel]) -> None:
    """A legend of the encoders' titles, in as many columns as there is room for."""
    columns = legend_columns(figure, [encoder.title for encoder in encoders])
    figure.legend(loc="outside upper center", ncols=columns, frameon=False)


def legend_columns(figure: Any, texts: Sequence[str]) -> int:
    """In how many columns a legend has room."""
    most = int(figure.get_figwidth() * 12) // (max(map(len, texts)) + 5)
    return max(1, min(len(texts), most))


def new_figure(
    width: float, height: float, rows: Sequence[float] = (1,), columns: int = 1
) -> tuple[Any, Any]:
    """A figure of that many inches, and its only axes; or axes below or beside each other.

    Args:
        rows: their shares of the height; they share what is across. columns: with axes of their
            own.
    """
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["text.parse_math"] = False  # a `$` in a template is none
    rcParams["svg.fonttype"] = "none"  # text as text
    rcParams["figure.facecolor"] = rcParams["axes.facecolor"] = "none"  # the page's
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(len(rows), columns, sharex=columns == 1, height_ratios=rows)
    for one in np.atleast_1d(axes).flat:
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def svg_text(figure: Any) -> str:
    """A figure as text to be put into a page, whose own colour it has where it is black."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :].replace("#000000", "currentColor")
