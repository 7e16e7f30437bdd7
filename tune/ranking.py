"""Which trials of a search count, and the order of its configurations."""

from dataclasses import dataclass
from statistics import mean, stdev

from tune.definition import Search
from tune.space import Configuration
from tune.trials import Trial, TrialLog


@dataclass(frozen=True)
class Ranked:
    """A configuration and its trials in one phase."""

    id: str
    values: Configuration
    trials: list[Trial]

    @property
    def scores(self) -> list[float]:
        return [trial.score for trial in self.trials if trial.score is not None]

    @property
    def mean(self) -> float:
        return mean(self.scores)

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds; None with one."""
        return stdev(self.scores) if len(self.scores) > 1 else None


def own_trials(search: Search, log: TrialLog) -> list[Trial]:
    """Trials of the recipe as it is."""
    return [trial for trial in log if search.owns(trial)]


def counted(search: Search, trials: list[Trial]) -> list[Trial]:
    """Trials that the ranking is made of: of the search's seeds, or the members of a population."""
    if search.settings.scheduler == "population":
        return [trial for trial in trials if trial.phase == "population"]
    return [t for t in trials if t.phase != "population" and t.seed in search.seeds]


def rank(search: Search, trials: list[Trial]) -> list[Ranked]:
    """Configurations whose trials all finished, by their mean score, best first; behind them those
    that lack seeds, since the best of many single scores is mostly luck."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(search.configuration_id(trial.values), []).append(trial)
    ranking = [
        Ranked(name, group[0].values, group)
        for name, group in groups.items()
        if all(trial.status == "finished" and trial.score is not None for trial in group)
    ]
    ranking.sort(key=lambda ranked: ranked.mean, reverse=search.settings.maximise)
    return sorted(ranking, key=lambda ranked: lacks_seeds(search, ranked))


def lacks_seeds(search: Search, ranked: Ranked) -> bool:
    """Whether a configuration is still to be trained with seeds of the search, or was to be before
    the budget was spent."""
    return not {trial.seed for trial in ranked.trials}.issuperset(search.seeds)


def fresh_seeds(search: Search, trials: list[Trial]) -> list[int]:
    """Seeds of confirmations: above all that ever had a part in choosing."""
    used = [*search.seeds, *(trial.seed for trial in trials if trial.phase != "confirm")]
    return [max(used) + 1 + number for number in range(search.settings.confirm.seeds)]
