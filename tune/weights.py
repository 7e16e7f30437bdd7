"""Which trained weights a search keeps."""

from pipeline.store.history import artifacts_in_history
from tune.definition import Search
from tune.ranking import own_trials, rank
from tune.trials import Trial, TrialLog


class Keeper:
    """Sees to it that only the best configurations keep their weights.

    Weights that another run made, or that a run of a recipe refers to, are not its to drop.
    """

    def __init__(self, search: Search, log: TrialLog) -> None:
        self._search = search
        self._runs: dict[str, set[str]] = {}
        self._held: dict[str, Trial] = {}
        for trial in own_trials(search, log):
            self.add(trial)

    def add(self, trial: Trial) -> None:
        """Counts a trial's weights in; drops the worst configuration's if there are too many."""
        if trial.status != "finished":
            return
        manifest = self._search.store.manifest(trial.folder)
        if manifest is None or manifest.stats.get("search") != self._search.name:
            return
        self._held[trial.folder] = trial
        searched = [held for held in self._held.values() if held.phase == "search"]
        for ranked in rank(self._search, searched)[self._search.settings.keep :]:
            for worse in ranked.trials:
                self._drop(worse)

    def drop_all_but(self, folders: set[str]) -> None:
        """Drops confirmations, except these."""
        for trial in list(self._held.values()):
            if trial.phase == "confirm" and trial.folder not in folders:
                self._drop(trial)

    def _drop(self, trial: Trial) -> None:
        del self._held[trial.folder]
        # asked anew each time: a run may have begun to use it while the search went on
        if trial.folder not in artifacts_in_history(self._search.store.root, self._runs):
            self._search.store.remove(trial.folder)
