"""The search space: which settings a trial may have, and where the next one comes from.

A setting's values are a plain mapping from setting path to value, in an order in which they can be
put into the recipe: what another one depends on (`tied`, `when`) comes first.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from stages.errors import UserError
from tune.settings import Dimension, as_list

Values = dict[str, Any]


class Space:
    def __init__(self, dimensions: dict[str, Dimension]) -> None:
        """Raises UserError when settings depend on each other in a circle."""
        self.dimensions: dict[str, Dimension] = {}
        waiting = dict(dimensions)
        while waiting:
            ready = [
                name
                for name in waiting
                if not any(other in waiting for other in self._depends_on(name, dimensions))
            ]
            if not ready:
                raise UserError(f"search.space: {', '.join(waiting)} depend on each other")
            for name in ready:
                self.dimensions[name] = waiting.pop(name)

    def depends_on(self, name: str) -> list[str]:
        """Searched settings of which the others' values and presence depend."""
        return self._depends_on(name, self.dimensions)

    @staticmethod
    def _depends_on(name: str, dimensions: dict[str, Dimension]) -> list[str]:
        one = dimensions[name]
        tied = [one.tied] if one.tied else []
        return [*one.when, *tied, *_above(name, dimensions)]

    def complete(self, pick: Callable[[str, Dimension], Any]) -> Values:
        """One setting: `pick` chooses the values that are free."""
        values: Values = {}
        for name, dimension in self.dimensions.items():
            if self._is_active(name, values):
                tied = self._tied(dimension, values)
                values[name] = pick(name, dimension) if tied is None else tied
        return values

    def grid(self) -> Iterator[Values]:
        """Every combination of the listed values, the first setting's changing slowest."""
        yield from self._grid(list(self.dimensions.items()), {})

    def random(self, seed: int, number: int) -> Values:
        """Random setting `number`: a function of the space, `seed` and `number` alone."""
        generator = np.random.default_rng([seed, number])

        def pick(name: str, dimension: Dimension) -> Any:
            if dimension.values is not None:
                return dimension.values[int(generator.integers(len(dimension.values)))]
            if dimension.integer is not None:
                return int(generator.integers(dimension.integer[0], dimension.integer[1] + 1))
            if dimension.loguniform is not None:
                low, high = map(math.log, dimension.loguniform)
                return dimension.nearest(math.exp(generator.uniform(low, high)))
            assert dimension.uniform is not None
            low, high = dimension.uniform
            return dimension.nearest(generator.uniform(low, high))

        return self.complete(pick)

    def example(self, name: str, last: bool = False) -> Values:
        """A setting in which `name` is searched, with its first (or last) value."""
        values: Values = {}
        dimension = self.dimensions[name]
        for other, wanted in dimension.when.items():
            values |= self.example(other) | {other: as_list(wanted)[0]}
        for other in _above(name, self.dimensions):
            present = [v for v in self.dimensions[other].values or [] if v is not None]
            values |= self.example(other) | {other: present[0] if present else None}
        if dimension.tied:
            values = self.example(dimension.tied, last) | values
        listed: Sequence[Any] = dimension.values or dimension.bounds or []
        tied = self._tied(dimension, values)
        values[name] = listed[-1 if last else 0] if tied is None else tied
        return values

    def holds(self, values: Values) -> bool:
        """Whether a setting lies in the space."""

        def fits(name: str) -> bool:
            dimension, value = self.dimensions[name], values[name]
            if dimension.bounds is None:
                return dimension.tied is not None or value in (dimension.values or [])
            return dimension.bounds[0] <= value <= dimension.bounds[1]

        if not values.keys() <= self.dimensions.keys() or not all(map(fits, values)):
            return False
        return self.complete(lambda name, _: values.get(name)) == values

    def within(self, values: Values) -> Values:
        """The setting with numbers brought back into their bounds, and ties drawn again."""

        def pick(name: str, dimension: Dimension) -> Any:
            return values[name] if dimension.bounds is None else dimension.nearest(values[name])

        return self.complete(pick)

    def _grid(self, left: list[tuple[str, Dimension]], values: Values) -> Iterator[Values]:
        if not left:
            yield values
            return
        (name, dimension), *rest = left
        if not self._is_active(name, values):
            yield from self._grid(rest, values)
            return
        tied = self._tied(dimension, values)
        for value in (dimension.values or []) if tied is None else [tied]:
            yield from self._grid(rest, values | {name: value})

    def _is_active(self, name: str, values: Values) -> bool:
        dimension = self.dimensions[name]
        sections = [values.get(other) for other in _above(name, self.dimensions)]
        return (
            None not in sections
            and all(other in values for other in self.depends_on(name))
            and all(values[other] in as_list(want) for other, want in dimension.when.items())
        )

    @staticmethod
    def _tied(dimension: Dimension, values: Values) -> Any:
        if dimension.tied is None:
            return None
        other = values[dimension.tied]
        if isinstance(other, bool) or not isinstance(other, int | float):
            raise UserError(f"search.space: {dimension.tied} is {other!r}, no number to be tied to")
        product = float(f"{other * dimension.factor:.12g}")
        whole = isinstance(other, int) and product == int(product)
        return int(product) if whole else product


def _above(name: str, others: Iterable[str]) -> list[str]:
    """Searched settings that are sections around this one: null there means that it is not."""
    return [other for other in others if name.startswith(f"{other}.")]


def key_of(values: Values) -> str:
    """The setting as text, whatever the order of its values."""
    return json.dumps(values, sort_keys=True)
