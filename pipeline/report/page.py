"""The report page of a run: figures, pictures, provenance. One self-contained HTML file."""

import html
from typing import Any

from pipeline.plan.plan import Plan
from pipeline.recipe.read import dump_recipe
from pipeline.report.figures import Results
from pipeline.report.pictures import pictures
from pipeline.report.plots import colours, new_figure, svg_text
from pipeline.report.table import results_table

STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;"
    "color:#222}pre{background:#f5f5f5;padding:1rem;overflow-x:auto;font-size:13px}"
    "svg{max-width:100%;height:auto}h1,h2{line-height:1.2}"
)


def write_report(plan: Plan, results: Results, record: str) -> None:
    """Writes `report.html` into the run's record."""
    parts = [f"<h2>What was gained</h2>{_bars(results)}"]
    for title, picture in pictures(plan.store, results):
        parts.append(f"<h2>{title}</h2>{picture}")
    told: dict[str, list[tuple[str, str | list[dict[str, Any]]]]] = {}
    for name, planned in plan.nodes.items():
        if planned.node.recipe == plan.recipe.name and plan.store.manifest(planned.folder):
            artifact = plan.store.open(planned.folder, name)
            for title, body in planned.node.stage.report(artifact).items():
                told.setdefault(title, []).append((name, body))
    for title, several in told.items():
        for name, body in several:
            which = f", {name}" if len(several) > 1 else ""
            parts.append(f"<h2>{html.escape(title + which)}</h2>{_body(body)}")
    lines = [f"{name}: {folder}" for name, folder in results.artifacts.items()]
    page = f"""<!doctype html><html lang="en"><meta charset="utf-8">
<title>{plan.recipe.name}</title><style>{STYLE}</style>
<h1>{plan.recipe.name}</h1>
<pre>{html.escape(results_table(results))}</pre>
<p>{html.escape(results.advice)}</p>
{"".join(parts)}
<h2>Artifacts</h2><pre>{html.escape(chr(10).join(lines))}</pre>
<h2>Recipe</h2><pre>{html.escape(dump_recipe(plan.recipe))}</pre></html>
"""
    plan.store.root.write(f"{record}/report.html", page.encode())


def _body(body: str | list[dict[str, Any]]) -> str:
    """A text as a paragraph; rows of metrics by step as curves."""
    return f"<p>{html.escape(body)}</p>" if isinstance(body, str) else _curves(body)


def _bars(results: Results) -> str:
    """Every figure in percent as a group of bars, encoders in the table's order; the student's
    variants, which hardly differ from it, are in the table only."""
    encoders = [encoder for encoder in results.encoders if not encoder.variant]
    groups = [
        name
        for name in results.columns
        if any(f.percent for e in encoders for f in results.figures(e).values() if f.name == name)
    ]
    if not groups:
        return "<p>The recipe evaluates nothing.</p>"
    figure, axes = new_figure(9, 3.4)
    colour_of = colours(encoders)
    width = 0.8 / len(encoders)
    for number, encoder in enumerate(encoders):
        figures = results.figures(encoder)
        present = [(place, figures[name].value) for place, name in enumerate(groups)
                   if name in figures]  # fmt: skip
        offset = (number - (len(encoders) - 1) / 2) * width
        places, heights = [place + offset for place, _ in present], [value for _, value in present]
        bars = axes.bar(
            places, heights, width * 0.94, label=encoder.title, color=colour_of[encoder]
        )
        axes.bar_label(bars, fmt="%.1f", fontsize=8, padding=1)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylim(0, 108)
    axes.set_ylabel("x 100")
    figure.legend(loc="outside upper center", ncols=len(encoders), frameon=False)
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
        what = "near pairs" if "dev/near pairs" in history[-1] else "dev Spearman"
        other.plot(*zip(*dev, strict=True), color="#d95f02", marker="o", label=what)
        other.set_ylabel(f"{what} x 100")
        other.spines[["top"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return svg_text(figure)
