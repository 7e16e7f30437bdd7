"""What a search has found, for people: a table for the terminal, and a page with pictures."""

import html
from statistics import mean, stdev
from typing import Any

from pipeline.recipe.read import dump_recipe
from pipeline.report.page import STYLE
from pipeline.report.plots import new_figure, svg_text
from pipeline.report.table import aligned, results_table
from tune.phases import Outcome, Ranked, counted
from tune.progress import shown, shown_score, values_text
from tune.searchers import add_known, new_study
from tune.trials import Trial

MOST_ROWS = 10
# More places than this are no heat map but a cloud of points.
MOST_PLACES = 12


def outcome_text(outcome: Outcome) -> str:
    """Ranking, what fresh seeds say of its first, and the test sets."""
    search, settings = outcome.search, outcome.search.settings
    counts = {
        status: sum(t.status == status and t.phase != "confirm" for t in outcome.trials)
        for status in ("finished", "stopped", "failed")
    }
    names = values_columns(outcome)
    fresh = {search.setting_of(one.values): one for one in outcome.confirmed}
    rows = [["", *names.values(), settings.metric, *(["fresh seeds"] if fresh else [])]]
    shown_first = outcome.ranking[: max(MOST_ROWS, len(fresh))]
    for place, one in enumerate(shown_first, start=1):
        cells = [shown(one.values[path]) if path in one.values else "" for path in names]
        again = fresh.get(search.setting_of(one.values))
        rows.append([str(place), *cells, _spread(one), *([_spread(again)] if fresh else [])])
    lines = [
        f"search {search.name}: "
        + ", ".join(f"{count} {status}" for status, count in counts.items() if count),
        "",
        *aligned(rows),
        "",
    ]
    if len(outcome.ranking) > len(shown_first):
        lines.append(f"{len(outcome.ranking) - len(shown_first)} more settings are in the report.")
    if counts["stopped"]:
        lines.append(f"{counts['stopped']} trials were stopped early and are not ranked.")
    if outcome.num_left_out:
        lines.append(
            f"{outcome.num_left_out} older trials belong to another state of the recipe or another "
            "metric, and are left out."
        )
    reasons = [trial.reason for trial in outcome.trials if trial.status == "failed"]
    for reason in dict.fromkeys(reasons):
        lines.append(f"{reasons.count(reason)} failed: {reason}")
    lines += ["", _verdict(outcome)]
    for path, folder in (("recipe", "best.yaml"), ("report", "report.html")):
        lines.append(f"{path}: {search.store.root.path(f'{search.folder}/{folder}')}")
    return "\n".join([*lines, "", test_text(outcome)]).rstrip()


def _verdict(outcome: Outcome) -> str:
    best, name_of = outcome.best, outcome.search.setting_of
    tried = len({name_of(trial.values) for trial in _scored(outcome)})
    text = f"Best: {values_text(best.values)}"
    if not outcome.confirmed:
        asked = outcome.search.settings.confirm.settings
        why = "could not be trained again" if asked else "was not trained again"
        return (
            f"{text}, {_spread(best)}. It is the best of {tried} and {why} with fresh seeds, so "
            "the figure is too good to expect (search.confirm)."
        )
    searched = next(one for one in outcome.ranking if name_of(one.values) == name_of(best.values))
    return (
        f"{text}. With {len(best.trials)} fresh seed(s) {_spread(best)}; in the search, as one of "
        f"{tried}, {_spread(searched)}."
    )


def test_text(outcome: Outcome) -> str:
    """The best setting's test sets: the first seed's table, then all seeds' spread."""
    seeds = list(outcome.tests)
    first = outcome.tests[seeds[0]]
    lines = [f"Test sets, seed {seeds[0]}:", ""]
    lines.append(results_table(first))
    names = [name for name, figure in first.student.items() if figure.percent]
    if len(seeds) > 1 and names:
        every = [outcome.tests[seed].student for seed in seeds]
        cells = []
        for name in names:
            values = [figures[name].value for figures in every]
            cells.append(f"{name} {mean(values):.2f} ± {stdev(values):.2f}")
        lines += ["", f"Student over {len(seeds)} seeds: {', '.join(cells)}."]
    return "\n".join(lines)


def _spread(one: Ranked | None) -> str:
    if one is None:
        return ""
    text = shown_score(one.mean)
    if one.spread is None:
        return text
    return f"{text} ± {one.spread:{'.2f' if abs(one.mean) >= 10 else '.2g'}}"


def values_columns(outcome: Outcome) -> dict[str, str]:
    """Titles of the searched settings that anything in the ranking has, by path."""
    paths = dict.fromkeys(path for one in outcome.ranking for path in one.values)
    last = [path.rpartition(".")[2] for path in paths]
    return {
        path: path if last.count(short) > 1 else short
        for path, short in zip(paths, last, strict=True)
    }


def write_report(outcome: Outcome) -> None:
    """Writes `report.html`."""
    search = outcome.search
    parts = [f"<pre>{html.escape(outcome_text(outcome))}</pre>"]
    importance = importances(outcome)
    if importance:
        parts.append(f"<h2>Which setting matters</h2>{_importance_bars(importance, outcome)}")
    axes = list(importance) or [p for p in search.space.dimensions if not _is_tied(outcome, p)]
    if len(axes) > 1 and all(len(_places(outcome, path)) <= MOST_PLACES for path in axes[:2]):
        parts.append(f"<h2>Two settings</h2>{heat_map(outcome, axes[0], axes[1])}")
    if len(axes) != 2:
        parts.append(f"<h2>Each setting</h2>{_slices(outcome, axes)}")
    parts.append(f"<h2>Learning curves</h2>{_curves(outcome)}")
    best = search.recipe_of(outcome.best.values, outcome.best.trials[0].seed)
    parts.append(f"<h2>The best setting's recipe</h2><pre>{html.escape(dump_recipe(best))}</pre>")
    title = html.escape(f"search {search.name}")
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style><h1>{title}</h1>{''.join(parts)}</html>\n"
    )
    search.store.root.write(f"{search.folder}/report.html", page.encode())


def _is_tied(outcome: Outcome, path: str) -> bool:
    return outcome.search.space.dimensions[path].tied is not None


def _scored(outcome: Outcome) -> list[Trial]:
    """Trials of the search itself that measured anything."""
    return [t for t in counted(outcome.search, outcome.trials) if t.score is not None]


def _early(outcome: Outcome, trial: Trial) -> float | None:
    """The metric where trials may first be stopped: all of them got that far."""
    grace = 100 * outcome.search.settings.grace
    return next((value for _, share, value in trial.curve if share >= grace), None)


def importances(outcome: Outcome) -> dict[str, float]:
    """Share of the variance over settings that each one explains (Optuna's fANOVA), largest first.

    Where trials were stopped early, of the metric at the first point at which they could be; empty
    with fewer than four settings of the space, or where they do not differ. A setting that only
    some trials have has no share.
    """
    import optuna

    search = outcome.search
    any_stopped = any(trial.status == "stopped" for trial in outcome.trials)
    groups: dict[str, list[tuple[Trial, float]]] = {}
    for trial in _scored(outcome):
        score = _early(outcome, trial) if any_stopped else trial.score
        if score is not None and search.space.holds(trial.values):
            groups.setdefault(search.setting_of(trial.values), []).append((trial, score))
    known = [(group[0][0].values, mean(s for _, s in group)) for group in groups.values()]
    if len(known) < 4 or len({score for _, score in known}) == 1:
        return {}
    study = new_study(search.settings.maximise)
    for values, score in known:
        add_known(study, search.space, values, score)
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    try:
        return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))
    except RuntimeError:  # its trees found no variance
        return {}


def _importance_bars(importance: dict[str, float], outcome: Outcome) -> str:
    figure, axes = new_figure(9, 0.6 + 0.4 * len(importance))
    paths = list(importance)[::-1]
    bars = axes.barh(paths, [100 * importance[path] for path in paths], color="#1f77b4")
    axes.bar_label(bars, fmt="%.0f%%", padding=3)
    axes.set_xlim(0, 110)
    stopped = any(trial.status == "stopped" for trial in outcome.trials)
    where = f" at {100 * outcome.search.settings.grace:.0f}% of training" if stopped else ""
    axes.set_xlabel(f"% of the variance of {outcome.search.settings.metric}{where}")
    return svg_text(figure)


def _places(outcome: Outcome, path: str) -> list[Any]:
    """Distinct values of a setting, ascending where they are numbers."""
    found = list({shown(t.values[path]): t.values[path] for t in _scored(outcome)
                  if path in t.values}.values())  # fmt: skip
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in found)
    return sorted(found) if numbers else found


def heat_map(outcome: Outcome, across: str, up: str) -> str:
    """The best score for every pair of values; of stopped trials, their last."""
    import numpy as np

    columns, rows = _places(outcome, across), _places(outcome, up)
    names = [[shown(value) for value in values] for values in (columns, rows)]
    choose = max if outcome.search.settings.maximise else min
    cells: dict[tuple[int, int], list[Trial]] = {}
    for trial in _scored(outcome):
        if across in trial.values and up in trial.values:
            row = names[1].index(shown(trial.values[up]))
            column = names[0].index(shown(trial.values[across]))
            cells.setdefault((row, column), []).append(trial)
    whole = np.full((len(rows), len(columns)), np.nan)
    texts = {}
    for place, trials in cells.items():
        finished = [t for t in trials if t.status == "finished"]
        best = choose(finished or trials, key=lambda trial: trial.score or 0.0)
        whole[place] = best.score
        share = "" if finished else f"\n{best.curve[-1][1]:.0f}%"
        texts[place] = f"{shown_score(whole[place])}{share}"
    figure, axes = new_figure(2.5 + 0.95 * len(columns), 1.6 + 0.6 * len(rows))
    image = axes.imshow(whole, origin="lower", cmap="viridis", aspect="auto")
    low, high = np.nanmin(whole), np.nanmax(whole)
    for (row, column), text in texts.items():
        bright = high > low and (whole[row, column] - low) / (high - low) > 0.6
        axes.text(column, row, text, ha="center", va="center", fontsize=9,
                  color="black" if bright else "white")  # fmt: skip
    axes.set_xticks(range(len(columns)), names[0])
    axes.set_yticks(range(len(rows)), names[1])
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    figure.colorbar(image, label=outcome.search.settings.metric)
    note = "A share below a value: stopped there. "
    if len(outcome.search.space.dimensions) > 2:
        note += "The best over all other settings."
    return svg_text(figure) + f"<p>{note}</p>"


def _slices(outcome: Outcome, paths: list[str]) -> str:
    """Score by value, one panel a setting."""
    pictures = []
    for path in paths:
        figure, axes = new_figure(4.4, 3)
        places = _places(outcome, path)
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in places)
        for status, marker, colour in (("finished", "o", "#1f77b4"), ("stopped", "x", "#bbbbbb")):
            trials = [t for t in _scored(outcome) if t.status == status and path in t.values]
            x = [t.values[path] if numbers else shown(t.values[path]) for t in trials]
            axes.scatter(x, [t.score for t in trials], marker=marker, color=colour, label=status)
        if numbers and places and places[0] > 0 and places[-1] / places[0] >= 8:
            axes.set_xscale("log")
        axes.set_xlabel(path)
        axes.set_ylabel(outcome.search.settings.metric)
        axes.legend(frameon=False, fontsize=8)
        pictures.append(f'<span style="display:inline-block;width:48%">{svg_text(figure)}</span>')
    return "".join(pictures)


def _curves(outcome: Outcome) -> str:
    """The metric over training: finished trials, stopped ones with a cross, the best one on top."""
    figure, axes = new_figure(9, 4)
    name_of = outcome.search.setting_of
    best = name_of(outcome.best.values)
    labels: set[str] = set()
    for trial in sorted(outcome.trials, key=lambda t: (name_of(t.values) == best, t.phase)):
        if not trial.curve:
            continue
        label: str = trial.status
        if trial.status == "finished" and name_of(trial.values) == best:
            label = "best, fresh seeds" if trial.phase == "confirm" else "best"
        colours = {"best": "#d95f02", "best, fresh seeds": "#ff9d3c", "stopped": "#bbbbbb"}
        x = [share for _, share, _ in trial.curve]
        y = [value for _, _, value in trial.curve]
        colour = colours.get(label, "#7fb1d6")
        axes.plot(x, y, color=colour, lw=2.2 if "best" in label else 1,
                  label=None if label in labels else label)  # fmt: skip
        if trial.status != "finished":
            axes.plot(x[-1], y[-1], marker="x", color="#888888")
        labels.add(label)
    axes.set_xlabel("% of training")
    axes.set_ylabel(outcome.search.settings.metric)
    axes.legend(frameon=False, fontsize=9)
    return svg_text(figure)
