"""Which trained weights a search keeps."""

from pipeline.store.history import artifacts_in_history
from tune.definition import Search
from tune.ranking import lacks_seeds, own_trials, rank
from tune.trials import Trial, TrialLog


class Keeper:
    """Sees to it that only the best configurations keep their weights, and as many of those that
    lack seeds: they may be on their way.

    Weights that another run made, or that a run of a recipe refers to, are not its to drop.
    """

    def __init__(self, search: Search, log: TrialLog) -> None:
        self._search = search
        self._runs: dict[str, set[str]] = {}
        self._searched: dict[str, Trial] = {}  # finished ones, by fingerprint
        self._held: dict[str, Trial] = {}  # those whose weights are there, by folder
        for trial in own_trials(search, log):
            self._count(trial)
        self._drop_worse()

    def add(self, trial: Trial) -> None:
        """Counts a trial's weights in; drops the worst configuration's if there are too many."""
        num_held = len(self._held)
        self._count(trial)
        if len(self._held) > num_held:
            self._drop_worse()

    def _count(self, trial: Trial) -> None:
        if trial.status != "finished":
            return
        if trial.phase == "search":
            self._searched[trial.fingerprint] = trial
        manifest = self._search.store.manifest(trial.folder)
        if manifest is not None and manifest.stats.get("search") == self._search.name:
            self._held[trial.folder] = trial

    def _drop_worse(self) -> None:
        ranking, keep = rank(self._search, [*self._searched.values()]), self._search.settings.keep
        whole = [ranked for ranked in ranking if not lacks_seeds(self._search, ranked)]
        for worse in [*whole[keep:], *ranking[len(whole) + keep :]]:
            for trial in worse.trials:
                if trial.folder in self._held:
                    self._drop(trial)

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
