"""The report page of a search: its text, and pictures of what the settings do."""

from statistics import mean
from typing import Any

import numpy as np

from pipeline.plan.plan import make_plan
from pipeline.recipe.read import dump_recipe
from pipeline.report.figures import read_results
from pipeline.report.html import document, preformatted, section
from pipeline.report.page import write_report as write_run_report
from pipeline.report.page import write_searched
from pipeline.report.plots import new_figure, svg_text
from pipeline.store.history import newest_record
from tune.phases import Outcome
from tune.progress import shown, shown_score
from tune.report import outcome_text
from tune.searchers import add_known, new_study
from tune.space import Configuration
from tune.trials import Trial

# More places than this are no heat map but a cloud of points.
MOST_PLACES = 12


def write_report(outcome: Outcome) -> None:
    """Writes `report.html`, and what settings do once more for the page of the best one's run."""
    search, best = outcome.search, outcome.best
    recipe = search.best_recipe(best.values, best.trials[0].seed)
    drawn = _settings(outcome)
    parts = [
        preformatted(outcome_text(outcome)),
        *(section(*one) for one in drawn),
        section("Learning curves", _curves(outcome)),
        section("The best configuration's recipe", preformatted(dump_recipe(recipe))),
    ]
    root = search.store.root
    root.write(f"{search.folder}/report.html", document(f"search {search.name}", parts).encode())
    plan = make_plan(recipe)
    text = "".join(section(f"{heading}: search {search.name}", body) for heading, body in drawn)
    write_searched(plan, search.name, text)
    record = newest_record(root, recipe.name, plan.folders)
    if record is not None and (results := read_results(root, record)).sources:
        write_run_report(plan, results, record)


def _settings(outcome: Outcome) -> list[tuple[str, str]]:
    """Headings and pictures."""
    found = []
    importance = importances(outcome)
    if importance:
        found.append(("Which setting matters", _importance_bars(importance, outcome)))
    dimensions = outcome.search.space.dimensions
    axes = list(importance) or [path for path in dimensions if dimensions[path].tied is None]
    if len(axes) > 1 and all(len(_places(outcome, path)) <= MOST_PLACES for path in axes[:2]):
        found.append(("Two settings", heat_map(outcome, axes[0], axes[1])))
    if len(axes) != 2:
        slices = "".join(_slice(outcome, path) for path in axes)
        found.append(("Each setting", slices))
    return found


def importances(outcome: Outcome) -> dict[str, float]:
    """Share of the variance over configurations that each setting explains (Optuna's fANOVA),
    largest first.

    Where trials were stopped early, of the metric at the first point at which they could be; empty
    with fewer than four configurations of the space, or where they do not differ. A setting that
    only some trials have has no share.
    """
    import optuna

    search = outcome.search
    groups: dict[str, tuple[Configuration, list[float]]] = {}
    for trial in outcome.scored:
        score = _early(outcome, trial) if _any_stopped(outcome) else trial.score
        if score is not None and search.space.holds(trial.values):
            name = search.configuration_id(trial.values)
            groups.setdefault(name, (trial.values, []))[1].append(score)
    known = [(values, mean(scores)) for values, scores in groups.values()]
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


def _any_stopped(outcome: Outcome) -> bool:
    return any(trial.status == "stopped" for trial in outcome.trials)


def _early(outcome: Outcome, trial: Trial) -> float | None:
    """The metric where trials may first be stopped: all of them got that far."""
    grace = 100 * outcome.search.settings.grace
    return next((value for _, share, value in trial.curve if share >= grace), None)


def _importance_bars(importance: dict[str, float], outcome: Outcome) -> str:
    figure, axes = new_figure(9, 0.6 + 0.4 * len(importance))
    paths = list(importance)[::-1]
    bars = axes.barh(paths, [100 * importance[path] for path in paths], color="#1f77b4")
    axes.bar_label(bars, fmt="%.0f%%", padding=3)
    axes.set_xlim(0, 110)
    settings = outcome.search.settings
    where = f" at {100 * settings.grace:.0f}% of training" if _any_stopped(outcome) else ""
    axes.set_xlabel(f"% of the variance of {settings.metric}{where}")
    return svg_text(figure)


def _places(outcome: Outcome, path: str) -> list[Any]:
    """Distinct values of a setting, ascending where they are numbers."""
    values = [trial.values[path] for trial in outcome.scored if path in trial.values]
    distinct = list({shown(value): value for value in values}.values())
    return sorted(distinct) if _are_numbers(distinct) else distinct


def _are_numbers(values: list[Any]) -> bool:
    return all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)


def heat_map(outcome: Outcome, across: str, up: str) -> str:
    """The best score for every pair of values; of stopped trials, their last."""
    columns = [shown(value) for value in _places(outcome, across)]
    rows = [shown(value) for value in _places(outcome, up)]
    cells: dict[tuple[int, int], list[Trial]] = {}
    for trial in outcome.scored:
        if across in trial.values and up in trial.values:
            place = rows.index(shown(trial.values[up])), columns.index(shown(trial.values[across]))
            cells.setdefault(place, []).append(trial)
    choose = max if outcome.search.settings.maximise else min
    scores = np.full((len(rows), len(columns)), np.nan)
    texts = {}
    for place, trials in cells.items():
        finished = [trial for trial in trials if trial.status == "finished"]
        best = choose(finished or trials, key=lambda trial: trial.score or 0.0)
        scores[place] = best.score
        share = "" if finished else f"\n{best.curve[-1][1]:.0f}%"
        texts[place] = f"{shown_score(scores[place])}{share}"
    figure, axes = new_figure(2.5 + 0.95 * len(columns), 1.6 + 0.6 * len(rows))
    image = axes.imshow(scores, origin="lower", cmap="viridis", aspect="auto")
    for (row, column), text in texts.items():
        bright = image.norm(scores[row, column]) > 0.6
        axes.text(column, row, text, ha="center", va="center", fontsize=9,
                  color="black" if bright else "white")  # fmt: skip
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    figure.colorbar(image, label=outcome.search.settings.metric)
    note = "A share below a value: stopped there. "
    if len(outcome.search.space.dimensions) > 2:
        note += "The best over all other settings."
    return svg_text(figure) + f"<p>{note}</p>"


def _slice(outcome: Outcome, path: str) -> str:
    """Score by value of one setting."""
    figure, axes = new_figure(4.4, 3)
    places = _places(outcome, path)
    is_number = _are_numbers(places)
    for status, marker, colour in (("finished", "o", "#1f77b4"), ("stopped", "x", "#bbbbbb")):
        trials = [t for t in outcome.scored if t.status == status and path in t.values]
        x = [t.values[path] if is_number else shown(t.values[path]) for t in trials]
        axes.scatter(x, [t.score for t in trials], marker=marker, color=colour, label=status)
    if is_number and places and places[0] > 0 and places[-1] / places[0] >= 8:
        axes.set_xscale("log")
    axes.set_xlabel(path)
    axes.set_ylabel(outcome.search.settings.metric)
    axes.legend(frameon=False, fontsize=8)
    return f'<span style="display:inline-block;width:48%">{svg_text(figure)}</span>'


def _curves(outcome: Outcome) -> str:
    """The metric over training: finished trials, stopped ones with a cross, the best one on top."""
    figure, axes = new_figure(9, 4)
    colours = {"best": "#d95f02", "best, fresh seeds": "#ff9d3c", "stopped": "#bbbbbb"}

    def is_best(trial: Trial) -> bool:
        return outcome.search.configuration_id(trial.values) == outcome.best.id

    labels: set[str] = set()
    for trial in sorted(outcome.trials, key=lambda trial: (is_best(trial), trial.phase)):
        if not trial.curve:
            continue
        label: str = trial.status
        if trial.status == "finished" and is_best(trial):
            label = "best, fresh seeds" if trial.phase == "confirm" else "best"
        _, x, y = zip(*trial.curve, strict=True)
        axes.plot(x, y, color=colours.get(label, "#7fb1d6"), lw=2.2 if "best" in label else 1,
                  label=None if label in labels else label)  # fmt: skip
        if trial.status != "finished":
            axes.plot(x[-1], y[-1], marker="x", color="#888888")
        labels.add(label)
    axes.set_xlabel("% of training")
    axes.set_ylabel(outcome.search.settings.metric)
    axes.legend(frameon=False, fontsize=9)
    return svg_text(figure)
