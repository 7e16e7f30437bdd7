"""Search spaces: grids, random configurations, and what TPE proposes."""

import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.errors import UserError
from tests.support.trials import trial
from tune.population import mutations_of
from tune.searchers import Tpe, listed_configurations
from tune.settings import Dimension, SearchSettings
from tune.space import Space, key_of


def space(**dimensions):
    return Space({name: Dimension(**one) for name, one in dimensions.items()})


def test_a_grid_has_every_combination_once_and_ties_follow():
    grid = list(
        space(b={"tied": "a", "factor": 2}, a={"grid": [0.1, 0.3]}, c={"grid": ["x", None]}).grid()
    )
    assert grid == [
        {"a": 0.1, "c": "x", "b": 0.2}, {"a": 0.1, "c": None, "b": 0.2},
        {"a": 0.3, "c": "x", "b": 0.6}, {"a": 0.3, "c": None, "b": 0.6},
    ]  # fmt: skip


def test_a_setting_that_is_not_searched_costs_no_combinations():
    conditional = space(
        method={"grid": ["listnet", "listmle", "none"]},
        tau={"grid": [1, 2], "when": {"method": ["listnet", "listmle"]}},
        twice={"tied": "tau", "factor": 2},
    )
    grid = list(conditional.grid())
    assert len(grid) == 5 and {"method": "none"} in grid
    assert all(one["twice"] == 2 * one["tau"] for one in grid if "tau" in one)
    drawn = [conditional.random(0, number) for number in range(50)]
    assert {"method": "none"} in drawn
    assert conditional.example("twice") == {"method": "listnet", "tau": 1, "twice": 2}


@given(st.integers(0, 50), st.integers(0, 50))
def test_random_configurations_lie_in_their_bounds_and_depend_on_seed_and_number(seed, number):
    whole = space(
        a={"uniform": [-1, 2]}, b={"loguniform": [1e-5, 1e-1]}, c={"integer": [3, 5]},
        d={"choice": ["p", "q"]},
    )  # fmt: skip
    one = whole.random(seed, number)
    assert one == whole.random(seed, number)
    assert -1 <= one["a"] <= 2 and 1e-5 <= one["b"] <= 1e-1
    assert one["c"] in (3, 4, 5) and type(one["c"]) is int and one["d"] in ("p", "q")


def test_a_grid_that_nobody_can_list_is_refused_unless_trials_says_how_much():
    space = {f"s{n}": {"grid": list(range(20))} for n in range(8)}
    settings = SearchSettings.model_validate({"space": space})
    with pytest.raises(UserError, match="more than 100,000 configurations; say with `trials`"):
        listed_configurations(settings, Space(settings.space))
    few = settings.model_copy(update={"trials": 21})
    assert listed_configurations(few, Space(settings.space))[-1] == {
        **{f"s{n}": 0 for n in range(6)}, "s6": 1, "s7": 0,
    }  # fmt: skip


def test_random_numbers_are_spread_as_asked():
    whole = space(b={"loguniform": [1e-5, 1e-1]}, c={"integer": [3, 5]})
    drawn = [whole.random(0, number) for number in range(400)]
    below = sum(one["b"] < 1e-3 for one in drawn)
    assert 160 < below < 240  # half lie below the geometric mean
    assert {one["c"] for one in drawn} == {3, 4, 5}


def test_more_trials_begin_with_the_trials_of_fewer():
    few = SearchSettings(space={"a": Dimension(uniform=[0, 1])}, trials=5)
    more = few.model_copy(update={"trials": 9})
    both = Space(few.space)
    assert listed_configurations(more, both)[:5] == listed_configurations(few, both)


def test_so_many_trials_differ_as_were_asked_for_and_as_the_space_has():
    space = {"a": {"choice": [1, 2, 3]}, "b": {"choice": [True, False, None]}}
    settings = SearchSettings.model_validate({"space": space, "trials": 9})
    whole = Space(settings.space)
    found = listed_configurations(settings, whole)
    assert len({(one["a"], one["b"]) for one in found}) == 9
    for trials in (1, 4, 8):
        fewer = settings.model_copy(update={"trials": trials})
        assert listed_configurations(fewer, whole) == found[:trials]
    assert listed_configurations(settings.model_copy(update={"trials": 20}), whole) == found


def test_circles_are_refused():
    with pytest.raises(UserError, match="a, b depend on each other"):
        space(a={"tied": "b"}, b={"tied": "a"})


def test_members_of_a_population_stay_within_bounds():
    whole = space(a={"uniform": [1, 2]}, n={"integer": [1, 3]}, b={"tied": "a", "factor": 10})
    assert whole.within({"a": 2.4, "n": 4, "b": 0}) == {"a": 2.0, "n": 3, "b": 20.0}


def test_what_a_member_of_a_population_may_change_to():
    whole = space(
        a={"loguniform": [1e-5, 1e-2]}, n={"integer": [1, 3]}, kind={"choice": ["x", None]},
        b={"tied": "a", "factor": 10},
    )  # fmt: skip
    mutations = mutations_of(whole)
    assert mutations.keys() == {"a", "n", "kind"} and mutations["kind"] == ["x", None]
    drawn = [(mutations["a"](), mutations["n"]()) for _ in range(200)]
    assert all(1e-5 <= a <= 1e-2 for a, _ in drawn) and {n for _, n in drawn} == {1, 2, 3}
    assert len({a for a, _ in drawn}) > 150 and statistics.median(a for a, _ in drawn) < 1e-3


def tpe_settings(trials, **dimensions):
    return SearchSettings(
        space={name: Dimension(**one) for name, one in dimensions.items()},
        searcher="tpe", trials=trials,
    )  # fmt: skip


def test_tpe_comes_nearer_to_what_it_is_told_is_good():
    settings = tpe_settings(
        40, x={"uniform": [0, 1]}, kind={"choice": ["good", "bad"]},
        extra={"integer": [1, 3], "when": {"kind": "bad"}},
    )  # fmt: skip
    searcher = Tpe(settings, Space(settings.space), [])
    distances, kinds = [], []
    while (values := searcher.next()) is not None:
        assert ("extra" in values) == (values["kind"] == "bad")
        distances.append(abs(values["x"] - 0.8))
        kinds.append(values["kind"])
        searcher.tell(values, 1 - distances[-1] - (values["kind"] == "bad"))
    assert len(distances) == 40 and searcher.num_left() == 0
    assert statistics.mean(distances[-10:]) < 0.6 * statistics.mean(distances[:10])
    assert kinds[-10:].count("good") >= 8


def test_tpe_goes_on_with_earlier_configurations_and_learns_from_them():
    settings = tpe_settings(34, x={"uniform": [0, 1]}, kind={"choice": ["a", "b"]})
    tried = [{"x": i / 30, "kind": "a"} for i in range(30)]
    outside = [{"x": 0.5, "kind": "gone"}, {"x": 5.0, "kind": "a"}]
    outside += [{"x": 0.5}, {"x": 0.5, "kind": "a", "y": 1}]  # of other settings
    searcher = Tpe(settings, Space(settings.space), tried[:15] + outside + tried[15:])
    for values in tried:
        assert searcher.next() == values
        searcher.tell(values, -abs(values["x"] - 0.2))
    proposed = [searcher.next() for _ in range(4)]
    assert searcher.next() is None  # 30 of 34 were tried
    assert all(abs(values["x"] - 0.2) < 0.25 for values in proposed)
    few = Tpe(settings.model_copy(update={"trials": 3}), Space(settings.space), tried)
    assert [few.next() for _ in range(4)] == [*tried[:3], None]


def test_a_configuration_of_an_earlier_space_that_had_other_kinds_of_values_is_left_out():
    settings = tpe_settings(2, rate={"uniform": [0, 3]}, layers={"integer": [1, 8]})
    whole = Space(settings.space)
    fits = {"rate": 1, "layers": 2}
    others = [fits | {"rate": value} for value in (None, "1", True, [1], {})]
    others += [fits | {"layers": value} for value in (2.5, None, True)]
    assert whole.holds(fits) and not any(map(whole.holds, others))
    assert Tpe(settings, whole, [*others, fits]).next() == fits


def test_tpe_proposes_each_configuration_once_and_as_many_as_there_are():
    settings = tpe_settings(12, a={"choice": [1, 2, 3, 4]}, n={"integer": [1, 3]})
    whole = Space(settings.space)

    def proposed(searcher):
        while (values := searcher.next()) is not None:
            searcher.tell(values, -((values["a"] - 3) ** 2) - (values["n"] - 2) ** 2)
            yield values

    first = list(proposed(Tpe(settings, whole, [])))
    assert len({key_of(values) for values in first}) == len(first) == 12
    again = Tpe(settings, whole, first)
    assert [again.next() for _ in range(13)] == [*first, None]  # nothing is left to train
    more = Tpe(settings.model_copy(update={"trials": 20}), whole, first[:5])
    assert more.num_left() == 12  # what a search says to be too few
    assert len({key_of(values) for values in proposed(more)}) == 12
    running = Tpe(settings, whole, [])
    assert len({key_of(running.next()) for _ in range(12)}) == 12  # side by side, none has ended


def test_numbers_stay_within_their_bounds():
    narrow = Dimension(uniform=[0.99996, 0.99999])
    assert narrow.nearest(0.999973) == 0.99999 and narrow.nearest(2.0) == 0.99999
    assert Dimension(uniform=[0, 1]).nearest(0.123456) == 0.1235
    assert Dimension(integer=[1, 3]).nearest(2.0) == 2


def test_keys_do_not_depend_on_order():
    assert key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})
    assert replace(trial("a"), score=1.0) != trial("a")
