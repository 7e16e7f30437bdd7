"""What a run was asked for and what came of it, in two sentences."""

from collections.abc import Mapping

from pipeline.plan.plan import Plan
from pipeline.report.figures import Results, averages
from pipeline.report.table import shown
from stages.contract import Figure
from stages.sentences.settings import num_held_out

COSTS = "MB", "sentences/s"


def summary(plan: Plan, results: Results) -> list[str]:
    """The two sentences; the second is missing where the student has no figure x 100."""
    return [_asked(plan), *_gained(results)]


def _asked(plan: Plan) -> str:
    recipe = plan.recipe
    layers = recipe.student.layers
    count = len(layers) if isinstance(layers, list) else layers
    what = "a static table" if recipe.student.is_static else "a student"
    if count is not None and not recipe.student.is_static:
        what = f"a student of {count} layer{'s' * (count != 1)}"
    manifest = plan.store.manifest(plan.folders["sentences"])
    trained_on = ""  # unknown where the sentences were removed since
    if manifest is not None:
        rows = manifest.num_rows - num_held_out(recipe.holdout, manifest.num_rows)
        trained_on = f" on {rows:,} sentences"
    objectives = ", ".join(recipe.train.objectives.chosen).replace("_", " ")
    text = f"Asked: {what}, trained{trained_on} with {objectives}"
    if recipe.teachers:
        text += f", taught by {' and '.join(teacher.name for teacher in recipe.teachers)}"
    seeds = len(recipe.train.of_each_seed)
    return f"{text}{f', with {seeds} seeds' if seeds > 1 else ''}."


def _gained(results: Results) -> list[str]:
    own = results.student
    percent = [figure for figure in own.values() if figure.percent]
    main = next(iter([*averages(own.values()).values(), *percent]), None)
    if main is None:
        return []
    text = f"Gained: {main.name} {shown(main)}{_costs(own)}"
    for label in results.encoders:
        figures = results.figures(label)
        there = averages(figures.values()) | figures
        if main.name not in there or not label.is_plain:
            continue
        if label.role == "before":
            text += f", from {shown(there[main.name])} before training"
        elif label.role == "teacher":
            text += f"; {label.name} has {shown(there[main.name])}{_costs(figures)}"
    return [f"{text}."]


def _costs(figures: Mapping[str, Figure]) -> str:
    """What that takes, as far as it was measured."""
    told = [f"{shown(figures[name])} {name}" for name in COSTS if name in figures]
    return f" with {' and '.join(told)}" if told else ""
