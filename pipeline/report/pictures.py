"""Pictures of figures and of what they were computed from."""

import itertools
import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.report.differences import items_of
from pipeline.report.figures import Results
from pipeline.report.plots import (
    OTHER_COLOURS,
    colours,
    legend_above,
    legend_columns,
    new_figure,
    svg_text,
)
from pipeline.store.artifacts import ArtifactStore
from stages.contract import EncoderLabel
from stages.evaluate.agreement import BANDS
from stages.evaluate.clustering import PLANE
from stages.plain import shortened

# Ranges of gold scores that a set is cut into, and sets that are drawn: all of SentEval's seven
GROUPS, MOST_SETS = 5, 8
MOST_BESIDE = 3  # planes


def pictures(store: ArtifactStore, results: Results) -> Sequence[tuple[str, str]]:
    """Headings and pictures for the report page, where there is anything to draw."""
    found = [
        ("Similarities by gold score", by_gold_score(store, results)),
        ("Agreement by band", by_band(results)),
        ("Alignment and uniformity", by_geometry(results)),
        ("Sentences in the plane", in_planes(store, results)),
    ]
    return [(heading, picture) for heading, picture in found if picture]


def by_gold_score(store: ArtifactStore, results: Results) -> str:
    """Similarities of STS pairs in groups of gold score (RankCSE, Fig. 5), a picture for each set;
    "" without such a set. Of several seeds the first."""
    items = items_of(store, results)
    found: dict[str, dict[EncoderLabel, np.ndarray]] = {}
    for label in filter(_is_drawn, results.encoders):
        for name, several in items.get(label, {}).items():
            if several[0].statistic == "spearman":
                found.setdefault(name, {})[label] = several[0].values
    return "".join(_violins(name, found[name]) for name in list(found)[:MOST_SETS])


def _is_drawn(label: EncoderLabel) -> bool:
    return label.role != "baseline" and label.is_plain


def _violins(name: str, values: Mapping[EncoderLabel, np.ndarray]) -> str:
    """One set. values: prediction and gold score (N, 2) by encoder."""
    figure, axes = new_figure(9, 2.6)
    gold = next(iter(values.values()))[:, 1]
    edges = np.linspace(gold.min(), gold.max(), GROUPS + 1)
    group_of = np.clip(np.digitize(gold, edges) - 1, 0, GROUPS - 1)
    width, colour_of = 0.8 / len(values), colours(list(values))
    for place, (label, pairs) in enumerate(values.items()):
        offset = (place - (len(values) - 1) / 2) * width
        for group in range(GROUPS):
            _violin(axes, pairs[group_of == group, 0], group + offset, width, colour_of[label])
        axes.plot([], [], color=colour_of[label], linewidth=6, label=label.title)
    names = [f"{low:.3g} to {high:.3g}" for low, high in itertools.pairwise(edges)]
    axes.set_xticks(range(GROUPS), names)
    axes.set_xlabel(f"gold score, {name}")
    axes.set_ylabel("similarity")
    legend_above(figure, list(values))
    return svg_text(figure)


def _violin(axes: Any, values: np.ndarray, place: float, width: float, colour: str) -> None:
    if len(values) < 2 or np.ptp(values) == 0:
        return  # no density
    drawn = axes.violinplot(
        values, [place], widths=0.9 * width, showmedians=True, showextrema=False
    )
    for body in drawn["bodies"]:
        body.set(facecolor=colour, alpha=0.8)
    drawn["cmedians"].set_color("#000000")


def by_band(results: Results) -> str:
    """Agreement with the teachers by band of their similarity; "" without any."""
    rows = {
        label: results.figures(label)["agreement"].parts
        for label in filter(_is_drawn, results.encoders)
        if "agreement" in results.figures(label)
    }
    if not rows:
        return ""
    figure, axes = new_figure(9, 2.6)
    width, colour_of = 0.8 / len(rows), colours(list(rows))
    for place, (label, parts) in enumerate(rows.items()):
        places = np.arange(len(BANDS)) + (place - (len(rows) - 1) / 2) * width
        heights = [parts[band] for band in BANDS]
        bars = axes.bar(places, heights, width * 0.94, label=label.title, color=colour_of[label])
        axes.bar_label(bars, fmt="%.1f", fontsize=8, padding=1)
    axes.set_xticks(range(len(BANDS)), [f"{band} of the pairs" for band in BANDS])
    axes.set_ylabel("Spearman x 100")
    legend_above(figure, list(rows))
    return svg_text(figure)


def by_geometry(results: Results) -> str:
    """Alignment of pairs that mean the same against uniformity of all (SimCSE, Fig. 3): better is
    lower in both; "" without such a test."""
    places = {
        label: (figures["uniformity"].value, figures["alignment"].value)
        for label in results.encoders
        if not (label.variant or label.dimensions or label.documents)
        and {"uniformity", "alignment"} <= (figures := results.figures(label)).keys()
    }
    if not places:
        return ""
    figure, axes = new_figure(6, 3.4)
    for label, colour in colours(list(places)).items():
        axes.scatter(*places[label], color=colour, s=60)
        axes.annotate(label.title, places[label], xytext=(7, 4), textcoords="offset points")
    axes.margins(0.25)
    axes.set_xlabel("uniformity of all sentences")
    axes.set_ylabel("alignment of like pairs")
    return svg_text(figure)


def in_planes(store: ArtifactStore, results: Results) -> str:
    """Where sentences of each label lie, on the two principal components of each encoder's vectors;
    a picture for each clustering set, "" without any. Of several seeds the first."""
    found: dict[str, dict[EncoderLabel, Any]] = {}
    for one, folders in zip(results.measurements, results.sources, strict=True):
        others = one.encoder.variant, one.encoder.dimensions
        artifact = store.open(folders[0])
        if PLANE in artifact.files and not any(others):
            plane = json.loads(artifact.file_path(PLANE).read_text())
            found.setdefault(one.figures[0].name, {})[one.encoder] = plane
    order = results.encoders
    return "".join(
        _planes(name.removeprefix("V "), {label: of[label] for label in order if label in of})
        for name, of in list(found.items())[:MOST_SETS]
    )


def _planes(name: str, planes: Mapping[EncoderLabel, Any]) -> str:
    """One set: encoders beside each other, labels in colours."""
    columns = min(len(planes), MOST_BESIDE)
    rows = [1] * -(-len(planes) // columns)
    figure, axes = new_figure(max(5, 3 * columns), 3 * len(rows) + 0.8, rows, columns)
    places = list(np.atleast_1d(axes).flat)
    for place, (encoder, plane) in zip(places, planes.items(), strict=False):
        points_N3 = np.array(plane["points"])
        for number in range(len(plane["names"])):
            xy = points_N3[points_N3[:, 2] == number, :2].T
            place.scatter(*xy, s=5, color=OTHER_COLOURS[number], linewidths=0)
        title = textwrap.fill(encoder.title, 36)
        place.set_title(f"{title}\n{plane['share']:.0f}% of the variance", fontsize=9)
        place.set_aspect("equal", "datalim")
        place.set(xticks=[], yticks=[])
    for place in places[len(planes) :]:
        place.remove()
    more = plane["num_labels"] - len(plane["names"])
    without = f", labels left out as less frequent: {more}" if more else ""
    figure.suptitle(name + without, fontsize=10)
    names = [shortened(label, 32) for label in plane["names"]]
    figure.legend(
        places[0].collections, names, loc="outside lower center", frameon=False, markerscale=3,
        ncols=legend_columns(figure, names),
    )  # fmt: skip
    return svg_text(figure)
