"""The search space: which configurations a trial may have.

A `Configuration` is a plain mapping from setting path to value, in an order in which they can be
put into the recipe: what another setting depends on (`tied`, `when`) comes first. Variables and
fields that hold one are called `values`.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from stages.errors import UserError
from tune.settings import Dimension, as_list

Configuration = dict[str, Any]


class Space:
    def __init__(self, dimensions: dict[str, Dimension]) -> None:
        """Raises UserError when settings depend on each other in a circle."""
        self.dimensions, waiting = dimensions, dict(dimensions)
        ordered: dict[str, Dimension] = {}
        while waiting:
            ready = [name for name in waiting if waiting.keys().isdisjoint(self.depends_on(name))]
            if not ready:
                raise UserError(f"search.space: {', '.join(waiting)} depend on each other")
            ordered |= {name: waiting.pop(name) for name in ready}
        self.dimensions = ordered

    def depends_on(self, name: str) -> list[str]:
        """Searched settings on which its value and presence depend."""
        dimension = self.dimensions[name]
        tied = [dimension.tied] if dimension.tied else []
        return [*dimension.when, *tied, *self._sections_around(name)]

    def complete(self, pick: Callable[[str, Dimension], Any]) -> Configuration:
        """A configuration: `pick` chooses the values that are free."""
        values: Configuration = {}
        for name, dimension in self.dimensions.items():
            if self._is_active(name, values):
                free = dimension.tied is None
                values[name] = pick(name, dimension) if free else self._tied(name, values)
        return values

    def grid(self) -> Iterator[Configuration]:
        """Every combination of the listed values, the first setting's changing slowest."""
        combinations: Iterator[Configuration] = iter([{}])
        for name in self.dimensions:
            combinations = self._extended(combinations, name)
        return combinations

    def _extended(self, shorter: Iterator[Configuration], name: str) -> Iterator[Configuration]:
        """Every configuration with each value that the setting has there."""
        dimension = self.dimensions[name]
        for values in shorter:
            if not self._is_active(name, values):
                yield values
            elif dimension.tied:
                yield values | {name: self._tied(name, values)}
            else:
                yield from (values | {name: value} for value in dimension.values or [])

    def random(self, seed: int, number: int) -> Configuration:
        """Random configuration `number`: a function of the space, `seed` and `number` alone."""
        generator = np.random.default_rng([seed, number])
        return self.complete(lambda _, dimension: draw(dimension, generator))

    def example(self, name: str, last: bool = False) -> Configuration:
        """A configuration in which `name` is searched, with its first (or last) value."""
        values: Configuration = {}
        dimension = self.dimensions[name]
        for other, wanted in dimension.when.items():
            values |= self.example(other) | {other: as_list(wanted)[0]}
        for other in self._sections_around(name):
            present = [v for v in self.dimensions[other].values or [] if v is not None]
            values |= self.example(other) | {other: present[0] if present else None}
        if dimension.tied:
            values = self.example(dimension.tied, last) | values
            return values | {name: self._tied(name, values)}
        listed: Sequence[Any] = dimension.values or dimension.bounds or []
        return values | {name: listed[-1 if last else 0]}

    def holds(self, values: Configuration) -> bool:
        """Whether a configuration lies in the space."""

        def fits(name: str) -> bool:
            dimension, value = self.dimensions[name], values[name]
            if dimension.bounds is None:
                return dimension.tied is not None or value in (dimension.values or [])
            kinds = int if dimension.integer is not None else (int, float)
            is_number = isinstance(value, kinds) and not isinstance(value, bool)
            return is_number and dimension.bounds[0] <= value <= dimension.bounds[1]

        if not values.keys() <= self.dimensions.keys() or not all(map(fits, values)):
            return False
        return self.complete(lambda name, _: values.get(name)) == values

    def within(self, values: Configuration) -> Configuration:
        """The configuration with numbers brought back into their bounds, and ties drawn again."""

        def pick(name: str, dimension: Dimension) -> Any:
            return values[name] if dimension.bounds is None else dimension.nearest(values[name])

        return self.complete(pick)

    def _is_active(self, name: str, values: Configuration) -> bool:
        dimension = self.dimensions[name]
        sections = [values.get(other) for other in self._sections_around(name)]
        return (
            None not in sections
            and all(other in values for other in self.depends_on(name))
            and all(values[other] in as_list(want) for other, want in dimension.when.items())
        )

    def _sections_around(self, name: str) -> list[str]:
        """Searched settings that are sections around this one: null there means that it is not."""
        return [other for other in self.dimensions if name.startswith(f"{other}.")]

    def _tied(self, name: str, values: Configuration) -> float | int:
        dimension = self.dimensions[name]
        assert dimension.tied is not None
        other = values[dimension.tied]
        if isinstance(other, bool) or not isinstance(other, int | float):
            raise UserError(f"search.space: {dimension.tied} is {other!r}, no number to be tied to")
        product = float(f"{other * dimension.factor:.12g}")
        whole = isinstance(other, int) and product == int(product)
        return int(product) if whole else product


def draw(dimension: Dimension, generator: np.random.Generator) -> Any:
    """A random value of a dimension that is not tied."""
    if dimension.values is not None:
        return dimension.values[int(generator.integers(len(dimension.values)))]
    assert dimension.bounds is not None
    low, high = dimension.bounds
    if dimension.integer is not None:
        return int(generator.integers(int(low), int(high) + 1))
    if dimension.loguniform is not None:
        return dimension.nearest(math.exp(generator.uniform(math.log(low), math.log(high))))
    return dimension.nearest(generator.uniform(low, high))


def key_of(values: Configuration) -> str:
    """The configuration as text, whatever the order of its values."""
    return json.dumps(values, sort_keys=True)
