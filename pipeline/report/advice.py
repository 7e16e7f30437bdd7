"""What would probably help a training most next, in one line with the figures that say so.

Only what this run measured counts: the last third of its curves (dev scores, where there are enough
of them, else the loss), how much of the text was seen, and how near the student came to its
teacher. Where these say nothing, the line says that.
"""

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.plan.graph import Node, rows_root
from pipeline.plan.plan import Plan
from pipeline.report.figures import Results
from stages.sentences.settings import num_held_out

# A trend is told from noise where the line's slope is so many times its standard error.
CLEAR = 3.0
LEAST_POINTS = 4
# Smaller changes of the loss (a share of it) or of dev scores (x 100) count as none.
LEAST_FALL, LEAST_POINTS_GAINED = 0.02, 0.2
# Shares of the teacher's figures, or cosines to its vectors, above which little is left.
NEAR_TEACHER = 0.99


@dataclass(frozen=True)
class Evidence:
    """What a training and its evaluation measured.

    history: metric rows, oldest first: `step`, `loss`, maybe `num_steps` (of the whole training)
        and `dev_spearman`.
    num_sentences: that training draws from; None where only those with rewrites take part.
    more_sentences: whether the source has more than `sentences.limit` let in.
    layers: the student's and, where it was cut from that teacher, the teacher's; else None.
    student, teacher: means of the figures x 100 that both have; None where there is none.
    cosine: mean cosine to the teacher's vectors over the last third, where that is what is trained.
    is_static: whether the student has no layers at all.
    """

    history: Sequence[dict[str, Any]]
    batch_size: int
    num_sentences: int | None
    more_sentences: bool = False
    layers: tuple[int, int] | None = None
    student: float | None = None
    teacher: float | None = None
    cosine: float | None = None
    is_static: bool = False


@dataclass(frozen=True)
class Trend:
    """A line through the end of a curve: its ends, and whether it is more than noise."""

    first: float
    last: float
    clear: bool

    @property
    def change(self) -> float:
        return self.last - self.first


def advice(evidence: Evidence) -> str:
    """The line; starts with `Next:`."""
    losses = [(row["step"], row["loss"]) for row in evidence.history]
    broken = [step for step, loss in losses if not math.isfinite(loss)]
    if broken:
        return (
            f"Next: a lower train.learning_rate. The loss was no number from step {broken[0]:,} on."
        )
    dev = [
        (row["step"], row["dev_spearman"])
        for row in evidence.history
        if math.isfinite(row.get("dev_spearman", math.nan))
    ]
    steps, planned = (evidence.history[-1].get(name, 0) for name in ("step", "num_steps"))
    if dev and steps < planned and not _fell(dev):
        found = _of_patience(dev, steps, planned)
    else:
        found = _of_dev(evidence, dev) if len(dev) >= LEAST_POINTS else _of_loss(evidence, losses)
    return f"Next: {found}"


def _of_patience(dev: list[tuple[int, float]], steps: int, planned: int) -> str:
    best_step, best = _best(dev)
    return (
        f"a higher train.dev.patience, or a lower train.learning_rate. Dev was best at step "
        f"{best_step:,} ({best:.2f}) and ended at {dev[-1][1]:.2f}, when patience was over after "
        f"{steps:,} of {planned:,} steps."
    )


def _of_dev(evidence: Evidence, dev: list[tuple[int, float]]) -> str:
    end = dev[-max(LEAST_POINTS, math.ceil(len(dev) / 3)) :]
    line, last_step = trend(end), dev[-1][0]
    best_step, best = _best(dev)
    steps = f"steps {end[0][0]:,} to {last_step:,}"
    if line.clear and line.change >= LEAST_POINTS_GAINED:
        return _longer(
            evidence, f"dev still rose, {line.first:.2f} to {line.last:.2f} over {steps}"
        )
    if _fell(dev):
        return (
            f"not longer. Dev was best at step {best_step:,} ({best:.2f}) and ended at "
            f"{dev[-1][1]:.2f}, {last_step:,} steps; try a lower train.learning_rate, or more text."
        )
    return _flat(evidence, f"dev changed by {line.change:+.2f} over {steps}")


def _best(dev: list[tuple[int, float]]) -> tuple[int, float]:
    return max(dev, key=lambda one: one[1])


def _fell(dev: list[tuple[int, float]]) -> bool:
    """Whether dev was best well before its end, by more than noise."""
    if len(dev) < LEAST_POINTS:
        return False
    best_step, best = _best(dev)
    by_more = best - dev[-1][1] >= max(LEAST_POINTS_GAINED, 3 * _noise(dev))
    return by_more and best_step <= dev[-1][0] * 2 / 3


def _of_loss(evidence: Evidence, losses: list[tuple[int, float]]) -> str:
    end = losses[-max(1, len(losses) // 3) :]
    if len(end) < LEAST_POINTS:
        return (
            f"nothing in this run says what would help: its curve has {len(losses)} points; train "
            "longer, or lower train.log_every_steps."
        )
    line = trend(end)
    share = line.change / line.first if line.first > 0 else 0.0
    figures = f"{abs(share):.1%} over the last third ({line.first:.4f} to {line.last:.4f})"
    if line.clear and share <= -LEAST_FALL:
        return _of_passes(evidence, end, figures)
    if line.clear and share >= LEAST_FALL:
        return f"a lower train.learning_rate. The loss rose, by {figures}."
    return _flat(evidence, f"the loss changed by {share:+.1%} over the last third")


def _of_passes(evidence: Evidence, end: list[tuple[int, float]], figures: str) -> str:
    """Of a loss that fell: longer, unless it fell because sentences came again.

    A student that learns sentences by heart has a lower loss whenever a pass begins, and none that
    falls within a pass, where sentences are no older than before.
    """
    number, batch = evidence.num_sentences, evidence.batch_size
    last = end[-1][0]
    if number is None or last * batch <= number:
        return _longer(evidence, f"the loss still fell, by {figures}")
    passes: dict[int, list[tuple[int, float]]] = {}
    steps = [0, *(row["step"] for row in evidence.history)][-len(end) - 1 :]
    for before, (step, loss) in zip(steps, end, strict=False):
        first, of = (one // (number // batch) for one in (before, step - 1))
        if first == of:  # else it is a mean over the end of one and the begin of another
            passes.setdefault(of, []).append((step, loss))
    seen = f"{number:,} sentences were seen {last * batch / number:.1f} times each"
    more = "more text"
    if evidence.more_sentences:
        more += " (the source has some: raise sentences.limit)"
    if sum(map(len, passes.values())) < 2 * len(passes) + LEAST_POINTS:
        return (
            f"{more}, or {LEAST_POINTS} dev scores (train.dev) to see whether longer helps. The "
            f"loss still fell, by {figures}, but {seen}: that may be learning by heart."
        )
    within = _trend_within(list(passes.values()))
    if within.clear and within.change <= -LEAST_FALL * within.first:
        return _longer(evidence, f"the loss still fell, by {figures}, within passes too")
    return (
        f"{more}, rather than longer. The loss fell by {figures}, but where passes begin and not "
        f"within them: {seen} and are being learned by heart."
    )


def _longer(evidence: Evidence, because: str) -> str:
    steps = evidence.history[-1]["step"]
    text = f"train longer: --set train.max_steps={2 * steps}. After {steps:,} steps {because}"
    number = evidence.num_sentences
    if number is None:
        return f"{text}."
    seen = steps * evidence.batch_size
    if number - seen >= evidence.batch_size:
        return f"{text}, and {number - seen:,} of {number:,} sentences were not seen yet."
    text += f"; {number:,} sentences were seen {seen / number:.1f} times each"
    if evidence.more_sentences:
        return f"{text}, and the source has more: raise sentences.limit too."
    return f"{text}: more text would give the further steps something new."


def _flat(evidence: Evidence, because: str) -> str:
    share = name = None
    if evidence.student is not None and evidence.teacher:
        share = evidence.student / evidence.teacher
        name = f"{share:.0%} of its teacher's ({evidence.student:.1f} of {evidence.teacher:.1f})"
        name = f"the student's figures are {name}"
    elif evidence.cosine is not None:
        share = evidence.cosine
        name = f"its vectors have a mean cosine of {share:.3f} to the teacher's"
    if share is None:
        return f"nothing in this run says what would help: {because}, and no teacher was measured."
    if share >= NEAR_TEACHER:
        fewer = "" if evidence.is_static else ", or fewer layers for speed"
        return f"a better teacher{fewer}: {name}, and {because}."
    if evidence.layers is not None and evidence.layers[0] < evidence.layers[1]:
        kept, total = evidence.layers
        return f"more layers than {kept} of {total} (student.layers): {because}, and {name}."
    return f"nothing in this run says what would help: {because}, and {name}."


def trend(points: Sequence[tuple[int, float]]) -> Trend:
    """The least-squares line through (step, value), three points or more."""
    steps, values = zip(*points, strict=True)
    slope, start = statistics.linear_regression(steps, values)
    errors = sum((value - start - slope * step) ** 2 for step, value in points)
    spread = sum((step - statistics.fmean(steps)) ** 2 for step in steps)
    error = math.sqrt(errors / (len(points) - 2) / spread)
    clear = abs(slope) > max(CLEAR * error, 1e-12)
    return Trend(start + slope * steps[0], start + slope * steps[-1], clear)


def _trend_within(groups: Sequence[list[tuple[int, float]]]) -> Trend:
    """The slope that lines through the groups have in common, each with a level of its own, as a
    line as long as all groups."""
    level = statistics.fmean(value for group in groups for _, value in group)
    centred: list[tuple[float, float]] = []
    for group in groups:
        middle = statistics.fmean(step for step, _ in group)
        mean = statistics.fmean(value for _, value in group)
        centred += [(step - middle, value - mean) for step, value in group]
    spread = sum(x * x for x, _ in centred)
    slope = sum(x * y for x, y in centred) / spread
    errors = sum((y - slope * x) ** 2 for x, y in centred)
    error = math.sqrt(errors / (len(centred) - len(groups) - 1) / spread)
    half = slope * (groups[-1][-1][0] - groups[0][0][0]) / 2
    return Trend(level - half, level + half, abs(slope) > max(CLEAR * error, 1e-12))


def _noise(points: Sequence[tuple[int, float]]) -> float:
    """Spread of values around the mean of their neighbours: what a curve jumps by from evaluation
    to evaluation."""
    jumps = [
        (a + c) / 2 - b
        for (_, a), (_, b), (_, c) in zip(points, points[1:], points[2:], strict=False)
    ]
    return statistics.median(map(abs, jumps))


def advice_for(plan: Plan, results: Results) -> str:
    """The line of a run whose artifacts are there; "" where it trained nothing."""
    recipe = plan.recipe
    for name, planned in plan.nodes.items():
        # the plan may be older than what a run has made of it
        if planned.node.recipe != recipe.name or plan.store.manifest(planned.folder) is None:
            continue
        for body in planned.node.stage.report(plan.store.open(planned.folder, name)).values():
            if isinstance(body, list) and body:
                return advice(_evidence(plan, planned.node, results, body))
    return ""


def _evidence(plan: Plan, node: Node, results: Results, history: list[dict[str, Any]]) -> Evidence:
    recipe = plan.recipe
    root = plan.store.manifest(plan.folders[rows_root(node, plan.graph)])
    num_rows = root.num_rows if root else 0
    more = bool(root and root.stats.get("rejected", {}).get("over_limit"))
    regression = recipe.train.objectives.vector_regression
    cosine = None
    alone = len(recipe.teachers) == 1 and not recipe.student.dimensions  # else a mean over several
    if regression is not None and regression.distance == "cosine" and alone:
        end = history[-max(1, len(history) // 3) :]
        cosine = 1 - statistics.fmean(row["vector_regression"] for row in end)
    student, teacher = _compared(results)
    cut_from = {one.name for one in recipe.teachers if one.model == recipe.student.model}
    return Evidence(
        history,
        recipe.train.batch_size,
        num_rows - num_held_out(recipe.holdout, num_rows) if root and not recipe.perturb else None,
        more,
        _layers(results, cut_from),
        student,
        teacher,
        cosine,
        recipe.student.is_static,
    )


def _layers(results: Results, cut_from: Collection[str]) -> tuple[int, int] | None:
    """The student's layers, and those of the teacher that it was cut from, if it was from one."""
    for label in results.encoders:
        if label.role == "teacher" and label.name in cut_from and not label.ranks:
            counts = [one.get("layers") for one in (results.student, results.figures(label))]
            if None not in counts:
                kept, total = (int(count.value) for count in counts if count is not None)
                return kept, total
    return None


def _compared(results: Results) -> tuple[float | None, float | None]:
    """Means of the percentages that the student and its best teacher share."""
    own, best = results.student, None
    for label in results.encoders:
        if label.role != "teacher" or label.ranks:
            continue
        other = results.figures(label)
        names = [n for n, figure in own.items() if figure.percent and n in other]
        values = [
            statistics.fmean(one[name].value for name in names) if names else None
            for one in (own, other)
        ]
        if best is None or (values[1] or 0) > (best[1] or 0):
            best = (values[0], values[1])
    return best or (None, None)
