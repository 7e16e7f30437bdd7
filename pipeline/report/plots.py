"""Figures as text to be put into a page."""

import io
import itertools
from collections.abc import Sequence
from typing import Any

from stages.contract import EncoderLabel

OTHER_COLOURS = ["#ff9d3c", "#d9c27a", "#a58bc0"]


def colours(encoders: Sequence[EncoderLabel]) -> dict[EncoderLabel, str]:
    """A colour for each encoder of a picture: the same for the student in all of them."""
    others = itertools.cycle(OTHER_COLOURS)
    found = {}
    for encoder in encoders:
        if encoder.role == "before":
            found[encoder] = "#bbbbbb"
        elif encoder.role == "after":
            found[encoder] = "#1f77b4" if encoder.is_student else "#0b3d66"
        else:
            found[encoder] = next(others)
    return found


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
