"""The line about what would help next, on made-up curves whose answer is known."""

import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from pipeline.report.advice import Evidence, _compared, _evidence, _layers, advice, trend
from pipeline.report.figures import Results
from stages.contract import EncoderLabel, Figure, Measurement


def curve(value, num_rows=60, noise=0.002, seed=0, dev=None):
    """Metric rows every ten steps: `value(step)` with noise; dev scores every 50 steps."""
    source = random.Random(seed)
    rows = []
    for step in range(10, 10 * num_rows + 1, 10):
        row = {"step": step, "loss": value(step) * (1 + source.gauss(0, noise))}
        if dev is not None and step % 50 == 0:
            row["dev_spearman"] = dev(step)
        rows.append(row)
    return rows


def evidence(history, **more):
    return replace(Evidence(history, batch_size=64, num_sentences=10_000), **more)


def falling(step):
    return 2 * step**-0.3


def flat(step):
    return 0.2 + math.exp(-step / 20)


def test_a_falling_loss_asks_for_more_steps_and_says_what_was_seen():
    line = advice(evidence(curve(falling)))
    assert line.startswith("Next: train longer: --set train.max_steps=1200. After 600 steps")
    first, last = falling(410), falling(600)
    found = float(line.partition("still fell, by ")[2].partition("%")[0])
    assert found == pytest.approx(100 * (1 - last / first), abs=0.5)
    assert "within passes too; 10,000 sentences were seen 3.8 times each: more text" in line
    assert "raise sentences.limit" in advice(evidence(curve(falling), more_sentences=True))
    fresh = advice(evidence(curve(falling), num_sentences=50_000))
    assert "11,600 of 50,000 sentences were not seen yet" in fresh
    assert "seen" not in advice(evidence(curve(falling), num_sentences=None))


def by_heart(step):
    """Lower with each pass of 3,000 sentences, flat within; a mean over the last ten steps."""
    return sum(0.2 * 0.8 ** ((step - back) // (3000 // 64)) for back in range(1, 11)) / 10


def test_a_loss_that_falls_where_passes_begin_asks_for_more_text():
    line = advice(evidence(curve(by_heart), num_sentences=3000))
    assert "Next: more text, rather than longer" in line
    assert "3,000 sentences were seen 12.8 times each and are being learned by heart" in line
    more = advice(evidence(curve(by_heart), num_sentences=3000, more_sentences=True))
    assert "raise sentences.limit), rather than longer" in more
    both = advice(evidence(curve(lambda step: by_heart(step) / step), num_sentences=3000))
    assert "train longer" in both and "within passes too" in both
    short = advice(evidence(curve(by_heart), num_sentences=1000))
    assert "that may be learning by heart" in short
    dev = curve(by_heart, dev=lambda step: 80 + step / 300)
    assert "dev still rose" in advice(evidence(dev, num_sentences=3000))


def test_noise_is_no_trend():
    for seed in range(20):
        line = advice(evidence(curve(lambda step: 0.2, noise=0.05, seed=seed)))
        assert line.startswith("Next: nothing in this run says what would help"), seed


def test_a_small_change_is_none_however_clear():
    line = advice(evidence(curve(lambda step: 0.2 - 1e-6 * step, noise=0)))
    assert "nothing in this run says" in line and "-0.1%" in line


def test_a_flat_loss_looks_at_the_teacher():
    one = evidence(curve(flat), layers=(3, 6), student=80.0, teacher=90.0)
    assert "more layers than 3 of 6" in advice(one)
    assert "89% of its teacher's (80.0 of 90.0)" in advice(one)
    near = replace(one, student=89.5)
    assert "a better teacher, or fewer layers" in advice(near) and "99%" in advice(near)
    assert "fewer layers" not in advice(replace(near, is_static=True))
    assert "nothing in this run says" in advice(replace(one, layers=(6, 6)))
    assert "nothing in this run says" in advice(replace(one, layers=None))
    unlabelled = advice(replace(one, student=None, teacher=None, cosine=0.912))
    assert "more layers than 3 of 6" in unlabelled and "mean cosine of 0.912" in unlabelled
    assert "no teacher was measured" in advice(evidence(curve(flat)))


def test_a_rising_loss_asks_for_a_lower_rate():
    line = advice(evidence(curve(lambda step: 0.1 + 1e-4 * step)))
    assert "Next: a lower train.learning_rate. The loss rose, by" in line


def test_dev_scores_count_before_the_loss():
    rising = curve(flat, dev=lambda step: 80 + step / 300)
    assert "dev still rose" in advice(evidence(rising))
    still = curve(falling, dev=lambda step: 85 - math.exp(-step / 50))
    assert "nothing in this run says" in advice(evidence(still))
    assert "dev changed by +0.00" in advice(evidence(still))


def test_a_dev_score_that_fell_again_says_where_it_was_best():
    peaked = curve(falling, dev=lambda step: 85 - abs(step - 200) / 100)
    line = advice(evidence(peaked))
    assert "not longer. Dev was best at step 200 (85.00) and ended at 81.00, 600 steps" in line
    jumping = curve(falling, dev=lambda step: 85 + 2 * (step // 50 % 2))
    assert "not longer" not in advice(evidence(jumping))


def test_what_is_no_number_is_no_evidence():
    nowhere = curve(falling, dev=lambda step: math.nan)
    assert "the loss still fell" in advice(evidence(nowhere))
    broken = curve(lambda step: falling(step) if step < 300 else math.nan)
    assert "no number from step 300" in advice(evidence(broken))


def test_a_short_curve_says_nothing():
    line = advice(evidence(curve(falling, num_rows=9)))
    assert "nothing in this run says" in line and "9 points" in line


def test_the_line_through_points():
    found = trend([(0, 1.0), (1, 3.0), (2, 5.0)])
    assert (found.first, found.last, found.clear) == (1.0, 5.0, True)
    assert not trend([(0, 1.0), (1, -1.0), (2, 1.0), (3, -1.0)]).clear
    assert not trend([(0, 2.0), (1, 2.0), (2, 2.0)]).clear


def test_a_student_whose_size_is_not_measured_yet():
    """After `--only`: a test of the student is there, its size is not."""
    test = Figure("STS13", 80.0, percent=True)
    teacher = Measurement(EncoderLabel("teacher", "t"), [Figure("layers", 6), test])
    student = Measurement(EncoderLabel("after", "student"), [test])
    results = Results([teacher, student], [], {})
    assert _compared(results) == (80.0, 80.0) and _layers(results, {"t"}) is None


def test_layers_are_compared_with_the_teacher_that_the_student_was_cut_from():
    """With another one's, more layers than there are would be advised, or none where there are."""

    def measured(role, name, layers, score):
        figures = [Figure("layers", layers), Figure("STS13", score, percent=True)]
        return Measurement(EncoderLabel(role, name), figures)

    results = Results(
        [
            measured("teacher", "own", 6, 80.0),
            measured("teacher", "better", 24, 85.0),
            measured("after", "student", 3, 79.0),
        ],
        [],
        {},
    )
    assert _compared(results) == (79.0, 85.0)
    assert _layers(results, {"own"}) == (3, 6) and _layers(results, set()) is None


@pytest.mark.parametrize("scores", [[60.0, 58.0], [50, 52, 54, 56, 58, 57.9]])
def test_a_training_that_patience_ended_is_not_told_to_train_longer(scores):
    history = [
        {"step": 100 * n, "loss": falling(100 * n), "num_steps": 10_000, "dev_spearman": score}
        for n, score in enumerate(scores, start=1)
    ]
    line = advice(evidence(history))
    steps = len(scores)
    assert line == (
        "Next: a higher train.dev.patience, or a lower train.learning_rate. Dev was best at step "
        f"{100 * steps - 100} ({scores[-2]:.2f}) and ended at {scores[-1]:.2f}, when patience was "
        f"over after {100 * steps} of 10,000 steps."
    )
    whole = [row | {"num_steps": 100 * steps} for row in history]
    assert "patience" not in advice(evidence(whole))


def test_patience_is_no_answer_where_dev_fell_for_long():
    history = [
        {"step": 100 * n, "loss": falling(100 * n), "num_steps": 10_000, "dev_spearman": score}
        for n, score in enumerate([50, 60, 59, 57, 54, 50, 46, 40], start=1)
    ]
    assert advice(evidence(history)).startswith("Next: not longer. Dev was best at step 200 (60")


def test_what_a_training_says_of_itself(tmp_path, monkeypatch):
    """The cosine is that of whole vectors to one teacher's; held-out sentences are not seen."""
    regression = SimpleNamespace(distance="cosine")
    recipe = SimpleNamespace(
        perturb=[], holdout=30,
        teachers=[SimpleNamespace(name="t", model="m")],
        student=SimpleNamespace(model="m", dimensions=[], is_static=False),
        train=SimpleNamespace(
            objectives=SimpleNamespace(vector_regression=regression), batch_size=16
        ),
    )  # fmt: skip
    rows = SimpleNamespace(num_rows=300, stats={"rejected": {"over_limit": 7}})
    plan = SimpleNamespace(
        recipe=recipe, store=SimpleNamespace(manifest=lambda folder: rows), folders={"s": ""},
        graph={},
    )  # fmt: skip
    monkeypatch.setattr("pipeline.report.advice.rows_root", lambda *_: "s")
    history = [{"step": step, "vector_regression": 0.1} for step in range(9)]

    def found():
        return _evidence(plan, None, Results([], [], {}), history)

    assert found().cosine == pytest.approx(0.9)
    assert (found().num_sentences, found().more_sentences) == (270, True)
    plan.store.manifest = lambda folder: None  # they were removed since
    assert (found().num_sentences, found().more_sentences) == (None, False)
    plan.store.manifest = lambda folder: rows
    rows.stats = {"rejected": {"too_short": 7}}  # as many as asked for, and there are no more
    assert not found().more_sentences
    recipe.student.is_static = True
    assert found().is_static and not found().layers
    recipe.student.dimensions = [8]
    assert found().cosine is None
    recipe.student.dimensions, recipe.teachers = [], [*recipe.teachers, *recipe.teachers]
    assert found().cosine is None
    recipe.teachers = recipe.teachers[:1]
    regression.distance = "mse"
    assert found().cosine is None


def test_where_advice_changes():
    """A best score late in training, a student at 96% of its teacher, text seen one and a half
    times."""
    late = [(step, 85 - abs(step - 480) / 60) for step in range(50, 601, 50)]
    rows = [{"step": step, "loss": flat(step), "dev_spearman": score} for step, score in late]
    assert "nothing in this run says" in advice(evidence(rows))
    one = evidence(curve(flat), layers=(3, 6), student=86.4, teacher=90.0)
    assert "more layers than 3 of 6" in advice(one)
    once_and_a_half = advice(evidence(curve(falling), num_sentences=600 * 64 * 2 // 3))
    assert "sentences were seen 1.5 times each" in once_and_a_half
