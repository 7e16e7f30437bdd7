"""Where the next configuration comes from. `SEARCHERS` is the list that a new searcher joins."""

from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, Protocol

from stages.errors import UserError
from tune.settings import MOST_CONFIGURATIONS, Dimension, SearchSettings
from tune.space import Configuration, Space, key_of

# Of 100 equally likely configurations the last one is missed once in 23,000 times.
MOST_DRAWN_AGAIN = 1000
# TPE moves away from what it has proposed within a few.
MOST_PROPOSED_AGAIN = 20


class Searcher(Protocol):
    """Where the next configuration comes from."""

    def next(self) -> Configuration | None:
        """The next configuration; None when there is no more."""

    def num_left(self) -> int:
        """At most so many are to come."""

    def tell(self, values: Configuration, score: float | None) -> None:
        """What became of a configuration; None: it failed."""


class Listed:
    """Configurations of a grid, or random ones: known beforehand."""

    def __init__(self, configurations: list[Configuration]) -> None:
        self._left = deque(configurations)

    def next(self) -> Configuration | None:
        return self._left.popleft() if self._left else None

    def num_left(self) -> int:
        return len(self._left)

    def tell(self, values: Configuration, score: float | None) -> None:
        return


def listed_configurations(settings: SearchSettings, space: Space) -> list[Configuration]:
    """All configurations of a grid or random search, each once: fewer than `trials` where the space
    has no more, or none that MOST_DRAWN_AGAIN draws in a row would find.

    A random search of 30 begins with the configurations of one of 20.

    Raises:
        UserError: a grid has more than can be listed.
    """
    if settings.resolved_searcher == "grid":
        every = list(islice(space.grid(), settings.trials or MOST_CONFIGURATIONS + 1))
        if len(every) > MOST_CONFIGURATIONS:
            raise UserError(
                f"search.space: the grid has more than {MOST_CONFIGURATIONS:,} configurations; "
                "say with `trials` how many of them, or draw some (searcher: random)"
            )
    else:
        return list(_drawn(settings, space).values())
    return list({key_of(values): values for values in every}.values())


def _drawn(settings: SearchSettings, space: Space) -> dict[str, Configuration]:
    assert settings.trials is not None
    found: dict[str, Configuration] = {}
    number = last_new = 0
    while len(found) < settings.trials and number - last_new < MOST_DRAWN_AGAIN:
        values = space.random(settings.sampling_seed, number)
        number += 1
        if found.setdefault(key_of(values), values) is values:
            last_new = number
    return found


class Tpe:
    """Optuna's tree-structured Parzen estimator, each configuration once.

    Args:
        tried: configurations of earlier runs. Those that lie in the space come first: what is known
            of them is told like anything else, and what is missing is trained.
    """

    def __init__(self, settings: SearchSettings, space: Space, tried: list[Configuration]) -> None:
        from optuna.samplers import TPESampler

        self._space = space
        self._tried = deque(values for values in tried if space.holds(values))
        self._random = _drawn(settings, space)
        self._left = len(self._random)  # what the space has, if that is less than `trials`
        self._proposed: set[str] = set()
        # what runs already counts as bad, so that trials side by side differ
        seed = settings.sampling_seed + len(self._tried)
        self.study = new_study(settings.maximise, TPESampler(seed=seed % 2**32, constant_liar=True))
        self._asked: dict[str, Any] = {}
        self._most_repeats = MOST_PROPOSED_AGAIN

    def next(self) -> Configuration | None:
        if self._left == 0:
            return None
        self._left -= 1
        values = self._tried.popleft() if self._tried else self._propose()
        self._proposed.add(key_of(values))
        return values

    def _propose(self) -> Configuration:
        """A configuration unlike all before: a random one where TPE keeps to what it knows."""
        from optuna.trial import TrialState

        repeats: list[Any] = []
        while len(repeats) < self._most_repeats:
            trial = self.study.ask()
            values = _suggested(trial, self._space)
            if (key := key_of(values)) not in self._proposed:
                self._asked[key] = trial
                break
            repeats.append(trial)  # "runs" until another is found, so TPE moves away from it
        else:
            values = next(self._random[key] for key in self._random if key not in self._proposed)
            # little is left that it has not proposed, and each of its proposals takes longer
            self._most_repeats = max(1, self._most_repeats // 2)
        for trial in repeats:
            self.study.tell(trial, state=TrialState.FAIL)
        return values

    def num_left(self) -> int:
        return self._left

    def tell(self, values: Configuration, score: float | None) -> None:
        from optuna.trial import TrialState

        asked = self._asked.pop(key_of(values), None)
        if asked is None:  # of an earlier run, or a random one
            add_known(self.study, self._space, values, score)
            return
        state = TrialState.FAIL if score is None else TrialState.COMPLETE
        self.study.tell(asked, score, state)


def new_study(maximise: bool, sampler: Any = None) -> Any:
    """An Optuna study."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.create_study(sampler=sampler, direction="maximize" if maximise else "minimize")


def add_known(study: Any, space: Space, values: Configuration, score: float | None) -> None:
    """Tells a study the score of a configuration, unless it failed or lies outside the space."""
    if score is None or not space.holds(values):
        return
    known = {}
    for name, value in values.items():
        listed = space.dimensions[name].values
        known[name] = value if listed is None else listed.index(value)
    study.enqueue_trial(known)
    trial = study.ask()
    _suggested(trial, space)
    study.tell(trial, score)


def _suggested(trial: Any, space: Space) -> Configuration:
    """What an Optuna trial suggests; it knows the values of a list by place."""

    def pick(name: str, dimension: Dimension) -> Any:
        if dimension.values is not None:
            places = range(len(dimension.values))
            return dimension.values[trial.suggest_categorical(name, list(places))]
        if dimension.integer is not None:
            return trial.suggest_int(name, dimension.integer[0], dimension.integer[1])
        assert dimension.bounds is not None
        low, high = dimension.bounds
        is_log = dimension.loguniform is not None
        return dimension.nearest(trial.suggest_float(name, low, high, log=is_log))

    return space.complete(pick)


def listed(settings: SearchSettings, space: Space, tried: list[Configuration]) -> Searcher:
    """A grid, or random configurations."""
    return Listed(listed_configurations(settings, space))


# A searcher is made of (settings, space, configurations of earlier runs).
SEARCHERS: Mapping[str, Callable[[SearchSettings, Space, list[Configuration]], Searcher]] = {
    "grid": listed,
    "random": listed,
    "tpe": Tpe,
}
