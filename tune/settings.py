"""Settings of a search. Imports neither torch nor Ray.

search:
  space:
    train.learning_rate: {grid: [2e-5, 3e-5]}
    train.objectives.listnet.teacher_temperature: {grid: [0.0125, 0.025]}
    train.objectives.listnet.student_temperature:
      {tied: train.objectives.listnet.teacher_temperature, factor: 2}
"""

import re
from typing import Any, Literal

from pydantic import Field, FiniteFloat, model_validator

from stages.fields import Seed, Slug
from stages.settings import Settings, late

# Settings that a training reads at every step.
CHANGEABLE = (
    r"train\.(learning_rate|clip_norm|weight_decay)|teachers\.\d+\.weight|"
    r"train\.objectives\.\w+\.(weight|\w*temperature|low|high)"
)
NOT_SEARCHED = {
    "name": "it names the recipe",
    "storage": "all trials share one",
    "train.seed": "name several `search.seeds`",
    "train.seeds": "name several `search.seeds`",
}
# Of grid and random search all are listed (1 KB each) and their recipes checked (11 ms each) before
# the first begins
MOST_CONFIGURATIONS = 100_000
KINDS = ("grid", "choice", "uniform", "loguniform", "integer", "tied")


def as_list(value: Any) -> list[Any]:
    """What `when` gives for a setting, as a list."""
    return value if isinstance(value, list) else [value]


class Dimension(Settings):
    """The values of one setting: exactly one of `grid` to `tied`."""

    grid: list[Any] | None = Field(
        None, description="Every one of these values, with every combination of the others."
    )
    choice: list[Any] | None = Field(None, description="One of these values.")
    uniform: list[FiniteFloat] | None = Field(
        None, description="A number between [least, greatest]."
    )
    loguniform: list[FiniteFloat] | None = Field(
        None, description="A number between [least, greatest], uniform in its logarithm."
    )
    integer: list[int] | None = Field(
        None, description="A whole number between [least, greatest], both included."
    )
    tied: str | None = Field(
        None, min_length=1, description="Follow this other searched setting, times `factor`."
    )
    factor: FiniteFloat = Field(1.0, description="Multiplier of `tied`.")
    when: dict[str, Any] = Field(
        {},
        description="Search the setting only where other searched settings have these values (one, "
        "or a list). Elsewhere the recipe's own value stays.",
    )

    @model_validator(mode="after")
    def _one_kind(self) -> "Dimension":
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(KINDS)}")
        if self.values is not None and not self.values:
            raise ValueError(f"{given[0]} has no values; name at least one")
        if self.factor != 1.0 and self.tied is None:
            raise ValueError(f"factor belongs to tied, not to {given[0]}")
        if [] in self.when.values():
            raise ValueError("when: an empty list of values is never met")
        if given[0] in ("uniform", "loguniform", "integer"):
            bounds = self.bounds
            if bounds is None or len(bounds) != 2:
                raise ValueError(f"{given[0]} is [least, greatest]")
            if self.integer is not None and max(map(abs, self.integer)) > 2**53:
                raise ValueError("integer: bounds beyond 2^53 are too large")
            if bounds[0] >= bounds[1]:
                raise ValueError(f"{given[0]}: the least, {bounds[0]}, is not below {bounds[1]}")
        if self.loguniform is not None and self.loguniform[0] <= 0:
            raise ValueError(
                f"loguniform needs positive bounds, not {self.loguniform[0]}: use uniform, or a "
                "small positive number"
            )
        return self

    @property
    def values(self) -> list[Any] | None:
        """The values of a grid or choice."""
        return self.grid if self.grid is not None else self.choice

    @property
    def bounds(self) -> list[float] | list[int] | None:
        return self.uniform or self.loguniform or self.integer

    def nearest(self, value: float) -> float | int:
        """The number within the bounds, of four significant digits where there is room for it.

        What is searched is written into recipes and tables.
        """
        assert self.bounds is not None
        low, high = self.bounds
        kept = min(max(float(value) if self.integer else float(f"{value:.4g}"), low), high)
        return int(kept) if self.integer else float(kept)


class SearchBudget(Settings):
    """Limits of a search. Once one is reached no new trial begins; running ones finish."""

    steps: int | None = Field(
        None,
        ge=1,
        description="Training steps of all trials together, over all runs of the search.",
    )
    minutes: float | None = Field(None, gt=0, description="Minutes of one run of the search.")


class Confirmation(Settings):
    """The best configurations are trained again, with seeds that had no part in the search."""

    settings: int = Field(3, ge=0, description="How many of the best configurations; 0: none.")
    seeds: int = Field(
        3, ge=1, le=1000, description="Fresh seeds for each; every seed is a whole training."
    )


class SearchSettings(Settings):
    name: Slug | None = Field(
        None, description="Folder under `tune/` of the storage; null: the recipe's name."
    )
    space: dict[str, Dimension] = late(
        min_length=1,
        description="Values to try, by setting path. Files and logs show ${VARIABLES} by name.",
    )
    searcher: str | None = Field(
        None,
        description="grid, random, tpe (Optuna's), or one of a plug-in. null: grid if every "
        "setting has one, else random.",
    )
    trials: int | None = Field(
        None,
        ge=1,
        le=MOST_CONFIGURATIONS,
        description="Number of configurations to try; null: the whole grid.",
    )
    seeds: list[int] | None = Field(
        None,
        min_length=1,
        description="Values of train.seed to try every configuration with; null: the recipe's.",
    )
    sampling_seed: Seed = Field(0, description="Seed of random and tpe.")
    metric: str = Field(
        "dev_spearman",
        description="What to optimise: dev_spearman (the mean over the sets of `train.dev`), "
        "dev/NAME (one set; 'dev/near pairs' where the checkpoint is chosen by agreement with the "
        "teachers), or loss (the mean over at least the last train.log_every_steps steps).",
    )
    direction: Literal["maximum", "minimum"] | None = Field(
        None, description="null: minimum for loss, maximum for anything else."
    )
    scheduler: Literal["asha", "median", "population", "none"] = Field(
        "asha",
        description="asha, median: stop poor trials early. population: replace them by good ones.",
    )
    grace: float = Field(
        0.25, gt=0, le=1, description="No trial is stopped before this share of its training."
    )
    reduction: float = Field(
        2.0,
        gt=1,
        description="asha: at each rung one trial in this many goes on; the next rung is this many "
        "times as far.",
    )
    interval: float = Field(
        0.2, gt=0, lt=1, description="population: share of the training between two exchanges."
    )
    budget: SearchBudget = Field(SearchBudget(), description="Limits of the search.")
    concurrency: int | None = Field(
        None, ge=1, description="Trials that run at once; null: as many as fit."
    )
    cpus_per_trial: int | None = Field(
        None, ge=1, description="Cores of a one-device trial; null: train.cpus_per_worker, or 1."
    )
    gpus_per_trial: float | None = Field(
        None,
        ge=0,
        description="GPUs of a one-device trial; 0.5 shares one. null: 1 if there is any, else 0.",
    )
    keep: int = Field(
        3, ge=0, description="How many of the best configurations keep their weights."
    )
    confirm: Confirmation = Field(
        Confirmation(), description="Training the best configurations again with fresh seeds."
    )

    @model_validator(mode="after")
    def _consistent(self) -> "SearchSettings":
        if len(set(self.seeds or [])) < len(self.seeds or []):
            raise ValueError(f"seeds {self.seeds}: one of them is there twice")
        free = [name for name, dimension in self.space.items() if dimension.bounds is not None]
        if self.searcher == "grid" and free:
            raise ValueError(
                f"searcher grid needs lists of values, and {free[0]} has none; give it a grid, or "
                "use random or tpe"
            )
        if self.resolved_searcher != "grid" and self.trials is None:
            raise ValueError(f"searcher {self.resolved_searcher} needs `trials`: how many to try")
        for name, dimension in self.space.items():
            for other in [*dimension.when, *([dimension.tied] if dimension.tied else [])]:
                if other not in self.space or other == name:
                    raise ValueError(
                        f"space.{name} depends on {other}, which is not another searched setting"
                    )
            for other, wanted in dimension.when.items():
                listed = self.space[other].values
                missing = [v for v in as_list(wanted) if listed is not None and v not in listed]
                if missing:
                    raise ValueError(f"space.{name}: {other} never is {missing[0]!r}")
            if name in NOT_SEARCHED:
                raise ValueError(f"space.{name} cannot be searched: {NOT_SEARCHED[name]}")
        if self.scheduler == "population":
            self._check_population()
        return self

    def _check_population(self) -> None:
        for name, dimension in self.space.items():
            if dimension.when:
                raise ValueError(f"population: space.{name} has a `when`; all members need it")
            if not re.fullmatch(CHANGEABLE, name):
                raise ValueError(
                    f"population: {name} cannot change while a student trains; search learning "
                    "rate, clip_norm, weight_decay, teachers' weights, or weights, temperatures "
                    "and thresholds of objectives"
                )
        if not self.lists_configurations:
            raise ValueError(
                f"population: members begin at random or on a grid; {self.searcher} proposes none"
            )
        if self.budget != SearchBudget():
            raise ValueError("population: it has no budget; give `trials` and train.max_steps")
        if self.concurrency is not None:
            raise ValueError("population: all members train by turns; leave out `concurrency`")
        if self.seeds is not None and len(self.seeds) > 1:
            raise ValueError("population: every member is one training; give one of `seeds`")

    @property
    def lists_configurations(self) -> bool:
        """Whether all configurations are known beforehand."""
        return self.resolved_searcher in ("grid", "random")

    @property
    def resolved_searcher(self) -> str:
        """grid, random, or what is named."""
        if self.searcher is not None:
            return self.searcher
        is_grid = all(dim.grid is not None or dim.tied for dim in self.space.values())
        return "grid" if is_grid else "random"

    @property
    def rule(self) -> str:
        """What a trial was stopped by; another rule might have let it go on."""
        order = "maximum" if self.maximise else "minimum"
        return f"{self.scheduler} {order} grace {self.grace:g} reduction {self.reduction:g}"

    @property
    def maximise(self) -> bool:
        return self.direction == "maximum" or (self.direction is None and self.metric != "loss")
