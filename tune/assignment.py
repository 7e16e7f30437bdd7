"""What an actor is to train: made by the queue or a population, carried by Tune."""

from dataclasses import dataclass
from typing import Any

from pipeline.recipe.document import Document
from pipeline.run.work import NodeWork
from tune.space import Configuration, Space


@dataclass(frozen=True)
class Member:
    """One of a population, whose configuration changes while it trains: Tune's `config` then holds
    the values, by path.

    document: the recipe, without ${VARIABLES}.
    """

    name: str
    space: Space
    document: Document


@dataclass(frozen=True, repr=False)
class Assignment:
    """A trial that is to run or runs; `repr` is short since Tune puts it into names.

    result: the work whose publication says that the trial is finished.
    search: the name of the search.
    may_be_stopped: whether the scheduler judges it.
    """

    work: NodeWork
    result: NodeWork
    values: Configuration
    seed: int
    metric: str
    search: str
    may_be_stopped: bool = True
    member: Member | None = None

    def __repr__(self) -> str:
        return self.work.node.fingerprint[:8]

    def __deepcopy__(self, memo: Any) -> "Assignment":
        return self  # Tune copies configurations often
