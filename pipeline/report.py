"""The report page of a run: figures, pictures, provenance. One self-contained HTML file."""

import html
import io
import itertools
import json
from typing import Any

from pipeline.artifacts import ArtifactStore
from pipeline.recipe import Recipe, dump_recipe
from pipeline.table import results_table, rows_in_order, title_of

STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;"
    "color:#222}pre{background:#f5f5f5;padding:1rem;overflow-x:auto;font-size:13px}"
    "svg{max-width:100%;height:auto}h1,h2{line-height:1.2}"
)

COLOURS = {"before": "#bbbbbb", "after": "#1f77b4", "after+ranks": "#0b3d66"}


def write_report(
    recipe: Recipe,
    store: ArtifactStore,
    folders: dict[str, str],
    results: dict[str, Any],
    record: str,
) -> None:
    """Writes `report.html` into the run's record."""
    table = results_table(results["evaluations"], results["speed"])
    metrics = store.open(folders["train"]).file_path("metrics/metrics.jsonl").read_text()
    history = [json.loads(line) for line in metrics.splitlines()]
    sentences = store.manifest(folders["sentences"])
    assert sentences is not None
    dropped = sentences.stats["rejected"]
    lines = [f"{name}: {folder}" for name, folder in folders.items()]
    page = f"""<!doctype html><html lang="en"><meta charset="utf-8">
<title>{recipe.name}</title><style>{STYLE}</style>
<h1>{recipe.name}</h1>
<pre>{html.escape(table)}</pre>
<h2>What was gained</h2>{_bars(results["evaluations"])}
<h2>Training</h2>{_curves(history)}
<h2>Sentences</h2><p>{sentences.stats["kept"]:,} sentences from {sentences.stats["read"]:,} texts.
Dropped: {", ".join(f"{count:,} {reason}" for reason, count in dropped.items()) or "none"}.</p>
<h2>Artifacts</h2><pre>{html.escape(chr(10).join(lines))}</pre>
<h2>Recipe</h2><pre>{html.escape(dump_recipe(recipe))}</pre></html>
"""
    store.root.write(f"{record}/report.html", page.encode())


def _bars(evaluations: dict[str, Any]) -> str:
    """Every figure as a group of bars, encoders in the table's order."""
    order = rows_in_order(evaluations)
    groups: dict[str, list[float]] = {}
    for name in order:
        result = evaluations[name]
        for title, entry in result["sts"].items():
            groups.setdefault(title, []).append(entry["spearman"])
        if "retrieval" in result:
            for key, title in (("mrr_at_10", "MRR@10"), ("recall_at_1", "recall@1"),
                               ("recall_at_10", "recall@10")):  # fmt: skip
                groups.setdefault(title, []).append(result["retrieval"][key])
    if not groups:
        return "<p>The recipe evaluates nothing.</p>"
    figure, axes = new_figure(9, 3.4)
    others = itertools.cycle(["#ff9d3c", "#d9c27a", "#a58bc0"])
    width = 0.8 / len(order)
    for number, name in enumerate(order):
        places = [group + (number - (len(order) - 1) / 2) * width for group in range(len(groups))]
        heights = [values[number] for values in groups.values()]
        colour = COLOURS.get(name) or next(others)
        bars = axes.bar(places, heights, width * 0.94, label=title_of(name), color=colour)
        axes.bar_label(bars, fmt="%.1f", fontsize=8, padding=1)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_ylim(0, 108)
    axes.set_ylabel("x 100")
    figure.legend(loc="outside upper center", ncols=len(order), frameon=False)
    return svg_text(figure)


def _curves(history: list[dict[str, Any]]) -> str:
    """Loss per step, and the dev score where there is one."""
    figure, axes = new_figure(9, 3)
    steps = [row["step"] for row in history]
    axes.plot(steps, [row["loss"] for row in history], color="#1f77b4", label="loss")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    dev = [(row["step"], row["dev_spearman"]) for row in history if "dev_spearman" in row]
    if dev:
        other = axes.twinx()
        other.plot(*zip(*dev, strict=True), color="#d95f02", marker="o", label="dev")
        other.set_ylabel("dev Spearman x 100")
        other.spines[["top"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return svg_text(figure)


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
