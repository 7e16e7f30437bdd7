"""What a search came to, as text: ranking, what fresh seeds say of its first, test sets."""

from statistics import mean, stdev

from pipeline.report.table import aligned, results_table
from tune.phases import Outcome
from tune.progress import short_names, shown, shown_score, status_counts, values_text
from tune.ranking import Ranked, lacks_seeds

MOST_ROWS = 10


def outcome_text(outcome: Outcome) -> str:
    """What the terminal shows at the end."""
    search, ranking = outcome.search, outcome.ranking
    names = short_names(dict.fromkeys(path for ranked in ranking for path in ranked.values))
    fresh = {ranked.id: _spread(ranked) for ranked in outcome.confirmed}
    rows = [["", *names.values(), search.settings.metric, *(["fresh seeds"] if fresh else [])]]
    shown_first = ranking[: max(MOST_ROWS, len(fresh))]
    for place, ranked in enumerate(shown_first, start=1):
        cells = [shown(ranked.values[path]) if path in ranked.values else "" for path in names]
        again = [fresh.get(ranked.id, "")] if fresh else []
        rows.append([str(place), *cells, _searched(outcome, ranked), *again])
    searched = [trial for trial in outcome.trials if trial.phase != "confirm"]
    counts = ", ".join(status_counts(searched))
    lines = [f"search {search.name}: {counts}", "", *aligned(rows), ""]
    if len(ranking) > len(shown_first):
        lines.append(f"{len(ranking) - len(shown_first)} more configurations are in the report.")
    num_stopped = sum(trial.status == "stopped" for trial in searched)
    if num_stopped:
        lines.append(f"{num_stopped} trials were stopped early and are not ranked.")
    if outcome.num_left_out:
        lines.append(
            f"{outcome.num_left_out} older trials belong to another state of the recipe or another "
            "metric, and are left out."
        )
    reasons = [trial.reason for trial in outcome.trials if trial.status == "failed"]
    for reason in dict.fromkeys(reasons):
        lines.append(f"{reasons.count(reason)} failed: {reason}")
    lines += ["", _verdict(outcome)]
    found = (search.store.manifest(trial.folder) for trial in outcome.best.trials)
    warnings = [one.stats["warning"] for one in found if one and "warning" in one.stats]
    lines += [f"WARNING: {warning}" for warning in dict.fromkeys(warnings)]
    for what, file in (("recipe", "best.yaml"), ("report", "report.html")):
        lines.append(f"{what}: {search.store.root.shown(f'{search.folder}/{file}')}")
    return "\n".join([*lines, "", *_tests(outcome)]).rstrip()


def _verdict(outcome: Outcome) -> str:
    best = outcome.best
    tried = len({outcome.search.configuration_id(trial.values) for trial in outcome.scored})
    text = f"Best: {values_text(best.values)}"
    if not outcome.confirmed:
        asked = outcome.search.settings.confirm.settings
        why = "could not be trained again" if asked else "was not trained again"
        return (
            f"{text}, {_searched(outcome, best)}. It is the best of {tried} and {why} with fresh "
            "seeds, so the figure is too good to expect (search.confirm)."
        )
    searched = next(ranked for ranked in outcome.ranking if ranked.id == best.id)
    return (
        f"{text}. With {len(best.trials)} fresh seed(s) {_spread(best)}; in the search, as one of "
        f"{tried}, {_searched(outcome, searched)}."
    )


def _searched(outcome: Outcome, ranked: Ranked) -> str:
    """What the search found of a configuration."""
    lacking = f" ({len(ranked.trials)} of {len(outcome.search.seeds)} seeds)"
    return _spread(ranked) + lacking * lacks_seeds(outcome.search, ranked)


def _spread(ranked: Ranked) -> str:
    text = shown_score(ranked.mean)
    if ranked.spread is None:
        return text
    return f"{text} ± {ranked.spread:{'.2f' if abs(ranked.mean) >= 10 else '.2g'}}"


def _tests(outcome: Outcome) -> list[str]:
    """The best configuration's test sets: the first seed's table, then all seeds' spread."""
    seeds = list(outcome.tests)
    first = outcome.tests[seeds[0]]
    lines = [f"Test sets, seed {seeds[0]}:", "", results_table(first)]
    students = [results.student for results in outcome.tests.values()]
    cells = []
    for name, figure in first.student.items():
        if len(seeds) > 1 and figure.percent:
            values = [student[name].value for student in students]
            cells.append(f"{name} {mean(values):.2f} ± {stdev(values):.2f}")
    if cells:
        lines += ["", f"Student over {len(seeds)} seeds: {', '.join(cells)}."]
    return lines
