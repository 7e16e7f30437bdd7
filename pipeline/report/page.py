"""The report page of a run: figures, pictures, provenance. One self-contained HTML file.

And the page of encoders side by side, which has the figures and pictures only.
"""

from typing import Any

from pipeline.plan.plan import Plan
from pipeline.recipe.read import dump_recipe
from pipeline.report.examples import examples
from pipeline.report.figures import Results
from pipeline.report.html import document, figures_table, paragraphs, preformatted, section
from pipeline.report.lineage import lineage
from pipeline.report.pictures import pictures
from pipeline.report.plots import colours, legend_above, new_figure, svg_text
from pipeline.report.summary import summary
from pipeline.report.table import differences_text, results_notes, results_rows
from pipeline.store.artifacts import ArtifactStore

# More bars than this have no room for their numbers beside each other, which are in the table too.
MOST_LABELS = 36


def write_report(plan: Plan, results: Results, record: str) -> None:
    """Writes `report.html` into the run's record."""
    parts = [
        paragraphs(summary(plan, results), "asked"),
        _table(results),
        paragraphs(results_notes(results), "quiet"),
        paragraphs([results.advice]),
        section("What was gained", _bars(results) or "<p>Nothing was tested.</p>"),
        *_subsets(results),
    ]
    parts += [section(*one) for one in pictures(plan.store, results)]
    told: dict[str, list[tuple[str, str | list[dict[str, Any]]]]] = {}
    for name, planned in plan.nodes.items():
        if planned.node.recipe == plan.recipe.name and plan.store.manifest(planned.folder):
            artifact = plan.store.open(planned.folder, name)
            for title, body in planned.node.stage.report(artifact).items():
                told.setdefault(title, []).append((name, body))
    for title, several in told.items():
        for name, body in several:
            which = f", {name}" if len(several) > 1 else ""
            parts.append(section(title + which, _body(body)))
    parts += [section(*one) for one in examples(plan.store, results)]
    parts.append(_searched(plan))
    folders = [f"{name}: {folder}" for name, folder in results.artifacts.items()]
    parts += [
        section("Where it comes from", lineage(plan)),
        section("Artifacts", preformatted("\n".join(folders))),
        section("Recipe", preformatted(dump_recipe(plan.recipe))),
    ]
    page = document(plan.recipe.name, parts)
    plan.store.root.write(f"{record}/report.html", page.encode())


def write_searched(plan: Plan, search: str, text: str) -> None:
    """Keeps what a search showed of its settings, for pages of this plan, which has the best.

    Args:
        text: HTML.
    """
    whole = f"<!--{plan.graph['train'].fingerprint}-->{text}"
    plan.store.root.write(f"tune/{search}/settings.html", whole.encode())


def _searched(plan: Plan) -> str:
    """What `write_searched` kept, if it was for this training."""
    file = f"tune/{plan.recipe.name.removesuffix('-best')}/settings.html"
    text = plan.store.root.read(file).decode() if plan.store.root.exists(file) else ""
    return text if text.startswith(f"<!--{plan.graph['train'].fingerprint}-->") else ""


def comparison(store: ArtifactStore, results: Results) -> str:
    """The page of encoders side by side."""
    apart, bars = differences_text(results), _bars(results)
    parts = [_table(results), paragraphs(results_notes(results), "quiet")]
    parts += [section("Differences", preformatted(apart))] if apart else []
    parts += [section("Side by side", bars)] if bars else []
    parts += [*_subsets(results), *(section(*one) for one in pictures(store, results))]
    return document(", ".join(encoder.title for encoder in results.encoders), parts)


def _table(results: Results) -> str:
    rows = results_rows(results)
    styles = {None: "below", results.reference: "main"}
    return figures_table([(styles.get(label, ""), cells) for label, cells in rows])


def _subsets(results: Results) -> list[str]:
    """STS within each subset, where sets have some. Bands of agreement are drawn instead."""
    encoders = [encoder for encoder in results.encoders if not encoder.variant]
    columns = [
        {
            f"{name}, {part}": f"{value:.2f}"
            for name, figure in results.figures(encoder).items()
            for part, value in figure.parts.items()
            if name != "agreement"
        }
        for encoder in encoders
    ]
    names = dict.fromkeys(name for column in columns for name in column)
    heading = ("", ["", *(encoder.title for encoder in encoders)])
    rows = [("", [name, *(column.get(name, "") for column in columns)]) for name in names]
    return [section("By subset", figures_table([heading, *rows]))] if rows else []


def _body(body: str | list[dict[str, Any]]) -> str:
    """A text as a paragraph; rows of metrics by step as curves."""
    return paragraphs([body]) if isinstance(body, str) else _curves(body) + _paths(body)


def _bars(results: Results) -> str:
    """Every figure in percent as a group of bars, encoders in the table's order; the student's
    variants, which hardly differ from it, are in the table only. "" without any."""
    encoders = [encoder for encoder in results.encoders if not encoder.variant]
    groups = [
        name
        for name in results.columns
        if any(f.percent for e in encoders for f in results.figures(e).values() if f.name == name)
    ]
    if not groups:
        return ""
    figure, axes = new_figure(9, 3.4)
    colour_of = colours(encoders)
    width, few = 0.8 / len(encoders), len(groups) * len(encoders) <= MOST_LABELS
    for number, encoder in enumerate(encoders):
        figures = results.figures(encoder)
        present = [(place, figures[name].value) for place, name in enumerate(groups)
                   if name in figures]  # fmt: skip
        offset = (number - (len(encoders) - 1) / 2) * width
        places, heights = [place + offset for place, _ in present], [value for _, value in present]
        bars = axes.bar(
            places, heights, width * 0.94, label=encoder.title, color=colour_of[encoder]
        )
        if few:
            axes.bar_label(bars, fmt="%.1f", fontsize=8, padding=1)
    turned = dict(rotation=40, ha="right", rotation_mode="anchor") if not few else {}
    axes.set_xticks(range(len(groups)), groups, **turned)
    axes.set_ylim(0, 108)
    axes.set_ylabel("x 100")
    legend_above(figure, encoders)
    return svg_text(figure)


def _paths(history: list[dict[str, Any]]) -> str:
    """Alignment against uniformity while it trained (SimCSE, Fig. 2), a picture for each dev set;
    "" where they were not measured."""
    keys = dict.fromkeys(key for row in history for key in row if key.startswith("uniformity/"))
    return "".join(_path(history, key.partition("/")[2]) for key in keys)


def _path(history: list[dict[str, Any]], name: str) -> str:
    keys = ("step", f"uniformity/{name}", f"alignment/{name}")
    steps, across, up = zip(
        *([row[key] for key in keys] for row in history if keys[1] in row), strict=True
    )
    figure, axes = new_figure(6, 3.4)
    axes.plot(across, up, color="#8a919c", linewidth=0.8, zorder=1)
    drawn = axes.scatter(across, up, c=steps, cmap="viridis", s=30)
    figure.colorbar(drawn, label="step")
    axes.set_xlabel(f"uniformity of all sentences, {name}")
    axes.set_ylabel("alignment of like pairs")
    return svg_text(figure)


def _curves(history: list[dict[str, Any]]) -> str:
    """Loss by step, the dev score where there is one, and how fast it went."""
    figure, (axes, speeds) = new_figure(9, 4, (3, 1))
    steps = [row["step"] for row in history]
    axes.plot(steps, [row["loss"] for row in history], color="#d95f02", label="loss")
    axes.set_ylabel("loss")
    dev = [(row["step"], row["dev_spearman"]) for row in history if "dev_spearman" in row]
    if dev:
        other = axes.twinx()
        what = "near pairs" if "dev/near pairs" in history[-1] else "dev"
        other.plot(*zip(*dev, strict=True), color="#1f77b4", marker="o", label=what)
        other.set_ylabel(f"{what} x 100")
        other.spines[["top"]].set_visible(False)
    fast = [(row["step"], row["tokens_per_second"] / 1000) for row in history
            if "tokens_per_second" in row]  # fmt: skip
    speeds.plot([step for step, _ in fast], [speed for _, speed in fast], color="#8a919c")
    speeds.set_ylim(0)
    speeds.set_ylabel("k tokens/s")
    speeds.set_xlabel("step")
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return svg_text(figure)
