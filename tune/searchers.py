"""Where the next setting of a search comes from. `SEARCHERS` is the list that a new one joins."""

from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, Protocol

from tune.settings import Dimension, SearchSettings
from tune.space import Space, Values, key_of


class Source(Protocol):
    """Where the next setting comes from."""

    def next(self) -> Values | None:
        """The next setting; None when there is no more."""

    def num_left(self) -> int:
        """At most so many are to come."""

    def tell(self, values: Values, score: float | None) -> None:
        """What became of a setting; None: it failed."""


class Listed:
    """A grid or random settings: known beforehand."""

    def __init__(self, settings: list[Values]) -> None:
        self._left = deque(settings)

    def next(self) -> Values | None:
        return self._left.popleft() if self._left else None

    def num_left(self) -> int:
        return len(self._left)

    def tell(self, values: Values, score: float | None) -> None:
        return


def listed_settings(settings: SearchSettings, space: Space) -> list[Values]:
    """All settings of a grid or random search, each once.

    A random search of 30 begins with the settings of one of 20.
    """
    if settings.resolved_searcher == "grid":
        every = list(islice(space.grid(), settings.trials))
    else:
        assert settings.trials is not None
        every = [space.random(settings.sampling_seed, i) for i in range(settings.trials)]
    return list({key_of(values): values for values in every}.values())


class Tpe:
    """Optuna's tree-structured Parzen estimator.

    Args:
        tried: settings of earlier runs. Those that lie in the space come first: what is known of
            them is told like anything else, and what is missing is trained.
    """

    def __init__(self, settings: SearchSettings, space: Space, tried: list[Values]) -> None:
        import optuna

        self._optuna = optuna
        self._space = space
        assert settings.trials is not None
        self._tried = deque(values for values in tried if space.holds(values))
        self._left = settings.trials
        # what runs already counts as bad, so that trials side by side differ
        sampler = optuna.samplers.TPESampler(
            seed=settings.sampling_seed + len(self._tried), constant_liar=True
        )
        self.study = new_study(settings.maximise, sampler)
        self._asked: dict[str, list[Any]] = {}

    def next(self) -> Values | None:
        if self._left == 0:
            return None
        self._left -= 1
        if self._tried:
            return self._tried.popleft()
        trial = self.study.ask()

        def pick(name: str, dimension: Dimension) -> Any:
            if dimension.values is not None:
                listed = range(len(dimension.values))
                return dimension.values[trial.suggest_categorical(name, list(listed))]
            if dimension.integer is not None:
                return trial.suggest_int(name, dimension.integer[0], dimension.integer[1])
            assert dimension.bounds is not None
            low, high = dimension.bounds
            is_log = dimension.loguniform is not None
            return dimension.nearest(trial.suggest_float(name, low, high, log=is_log))

        values = self._space.complete(pick)
        self._asked.setdefault(key_of(values), []).append(trial)
        return values

    def num_left(self) -> int:
        return self._left

    def tell(self, values: Values, score: float | None) -> None:
        asked = self._asked.get(key_of(values))
        if not asked:  # of an earlier run
            add_known(self.study, self._space, values, score)
            return
        state = self._optuna.trial.TrialState
        # the newest: what is proposed while it runs already is told at once that it failed
        self.study.tell(asked.pop(), score, state.FAIL if score is None else state.COMPLETE)


def new_study(maximise: bool, sampler: Any = None) -> Any:
    """An Optuna study."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.create_study(sampler=sampler, direction="maximize" if maximise else "minimize")


def add_known(study: Any, space: Space, values: Values, score: float | None) -> None:
    """Tells a study of a setting and its score, unless it failed or lies outside the space.

    Lists count by place.
    """
    import optuna
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    if score is None or not space.holds(values):
        return
    params: dict[str, Any] = {}
    distributions: dict[str, Any] = {}
    for name, dimension in space.dimensions.items():
        if dimension.tied or name not in values:
            continue
        params[name] = values[name]
        if dimension.values is not None:
            distributions[name] = CategoricalDistribution(list(range(len(dimension.values))))
            params[name] = dimension.values.index(values[name])
        elif dimension.integer is not None:
            distributions[name] = IntDistribution(dimension.integer[0], dimension.integer[1])
        else:
            assert dimension.bounds is not None
            low, high = dimension.bounds
            is_log = dimension.loguniform is not None
            distributions[name] = FloatDistribution(low, high, log=is_log)
    study.add_trial(
        optuna.trial.create_trial(params=params, distributions=distributions, value=score)
    )


def listed(settings: SearchSettings, space: Space, tried: list[Values]) -> Source:
    """A grid, or random settings."""
    return Listed(listed_settings(settings, space))


# A searcher: (settings, space, settings of earlier runs) to a source.
SEARCHERS: Mapping[str, Callable[[SearchSettings, Space, list[Values]], Source]] = {
    "grid": listed,
    "random": listed,
    "tpe": Tpe,
}
