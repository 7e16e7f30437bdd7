"""A schedule of faults, drawn from a seed."""

import random
from dataclasses import dataclass

EVERYWHERE = (
    "kill driver", "stop driver", "kill worker", "freeze driver", "freeze worker", "move clock",
    "second run", "kill both runs", "kill overtaker", "lose node", "lose cluster",
)  # fmt: skip
ON_S3 = ("stumble", "outage")
ON_DISK = ("full disk", "read-only disk")


@dataclass(frozen=True)
class Fault:
    """kind: see above. after: share of the node's writes that are done, then seconds."""

    kind: str
    after: tuple[float, float]


@dataclass(frozen=True)
class Subject:
    """What a schedule makes: a node of the recipe, maybe with other settings; or a search.

    Args:
        started: what its run says once it is at work.
        made: folders of the artifacts that it makes, and `lacking` of those that it begins without.
        node: empty for a search. settings: overrides of the recipe.
        weight: how often it is drawn.
    """

    started: str
    made: frozenset[str]
    lacking: frozenset[str]
    node: str = ""
    settings: tuple[str, ...] = ()
    weight: int = 1


@dataclass(frozen=True)
class Schedule:
    """storage: disk or s3. subject: what is to be made. again: although it is there. whole: and
    all that depends on it."""

    seed: int
    storage: str
    subject: str
    again: bool
    whole: bool
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        faults = ", ".join(
            f"{one.kind} at {100 * one.after[0]:.0f}% + {one.after[1]:.1f} s" for one in self.faults
        )
        what = f"{self.subject}{' again' * self.again}{' and on' * self.whole}"
        return f"seed {self.seed}: {what} on {self.storage}: {faults}"


def draw(seed: int, subjects: dict[str, Subject], kinds: list[str], can_mount: bool) -> Schedule:
    """The schedule of a seed.

    Args:
        subjects: one of which is to be made; kinds: of storage; can_mount: whether disks can be
            full.
    """
    draws = random.Random(seed)
    storage = kinds[seed % len(kinds)]
    here = ON_S3 * 2 if storage == "s3" else ON_DISK if can_mount else ()
    faults = [
        Fault(draws.choice(EVERYWHERE + here), (draws.random(), draws.choice((0.0, 0.1, 0.3, 1.0))))
        for _ in range(draws.choice((1, 1, 2, 3)))
    ]
    faults.sort(key=lambda one: one.after[0])
    (name,) = draws.choices(list(subjects), [one.weight for one in subjects.values()])
    again, whole = draws.random() < 0.25, draws.random() < 0.2
    if not subjects[name].node:  # of a search
        again = whole = False
    return Schedule(seed, storage, name, again, whole and not again, tuple(faults))
