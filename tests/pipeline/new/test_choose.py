"""Sentences and steps that fit a budget."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.new.choose import (
    LEAST_SENTENCES,
    LEAST_STEPS,
    MOST_PASSES,
    PLANNED,
    Costs,
    Schedule,
    TooShort,
    batch_size,
    num_trained,
    schedule,
)

seconds = st.floats(1e-5, 10)


@example(start=0.0, embed=0.125, step=3.0, batch=64, available=2045, budget=1.0)
@given(st.floats(0, 100), seconds, seconds, st.sampled_from([2, 64, 512]),
       st.integers(20, 10**7), st.floats(1, 10**5))  # fmt: skip
def test_a_schedule_fits_the_budget_and_a_refusal_names_one_that_does(
    start, embed, step, batch, available, budget
):
    available = max(available, batch)
    costs = Costs(start, embed, step, batch)
    found = schedule(costs, available, budget)
    if isinstance(found, TooShort):
        assert found.seconds > budget * 0.999
        again = schedule(costs, available, found.seconds * 1.01 + 0.01)
        assert isinstance(again, Schedule)
        found, budget = again, found.seconds * 1.01 + 0.01
    assert costs.seconds(found.num_sentences, found.num_steps) <= PLANNED * budget * 1.0001
    assert found.num_sentences <= available
    assert found.num_steps * batch <= MOST_PASSES * num_trained(found.num_sentences)
    assert found.num_steps >= min(LEAST_STEPS, MOST_PASSES * num_trained(available) // batch)
    assert found.num_sentences >= min(LEAST_SENTENCES, available)


def test_a_cheap_teacher_means_one_pass_and_a_slow_one_several():
    once = schedule(Costs(30, 0.003, 0.25, 64), 10**6, 600)
    assert isinstance(once, Schedule)
    assert once.num_steps == once.num_sentences // 64
    assert once.num_sentences == int(510 / (0.003 + 0.25 / 64))
    slow = schedule(Costs(30, 0.03, 0.25, 64), 10**6, 600)
    assert isinstance(slow, Schedule)
    assert slow.num_steps * 64 / slow.num_sentences == pytest.approx(8, abs=0.1)


def test_a_small_text_is_used_whole_and_not_for_ever():
    found = schedule(Costs(30, 0.003, 0.25, 64), 3000, 36000)
    assert found == Schedule(3000, 10 * 2700 // 64)  # a tenth is held out


@pytest.mark.parametrize(
    ("wanted", "available", "batch"),
    [(64, 10**6, 64), (512, 4096, 512), (512, 4095, 256), (64, 300, 32), (64, 16, 2), (64, 3, 2)],
)
def test_a_batch_is_an_eighth_of_the_text_at_most(wanted, available, batch):
    assert batch_size(wanted, available) == batch
    assert math.log2(batch).is_integer()
