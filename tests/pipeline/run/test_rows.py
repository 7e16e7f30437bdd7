"""How fast shards are made, as runs tell it."""

import pytest

from pipeline.run.rows import Pace


def test_the_time_before_the_first_shard_is_forgotten():
    pace = Pace()
    assert pace.after(191, 1, 100) == (1 / 191, 100 / 191)  # waited for cores, loaded a model
    for made in range(2, 8):  # then a shard takes 36 s
        found = pace.after(191 + 36 * (made - 1), made, 100 * made)
    assert found == pytest.approx((1 / 36, 100 / 36))  # from the start: 0.62 of it


def test_shards_that_come_by_twos_do_not_look_much_faster():
    pace = Pace()
    for pair in range(1, 9):
        pace.after(30 * pair, 2 * pair - 1, 10 * (2 * pair - 1))
        shards, rows = pace.after(30 * pair + 0.01, 2 * pair, 20 * pair)
        # by half too fast at most: where one of a pair is counted from
        assert 0.99 < 15 * shards < 1.51 and rows == pytest.approx(10 * shards)


def test_what_becomes_slow_is_told():
    pace = Pace()
    for made in range(1, 101):
        pace.after(made, made, made)
    for made in range(101, 111):
        shards, _ = pace.after(100 + 20 * (made - 100), made, made)
    assert shards == pytest.approx(1 / 20)  # from the start: 0.37
