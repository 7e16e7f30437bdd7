"""What nobody may remove: what searches and `sentray evaluate` say that they need (of runs the
history tells it), and the lease that keeps those who begin to need something apart from those who
remove what nobody does.

    tune/<search>/needs.json          artifacts that it, and its trials, read
    work/compared/<id>/needs.json     those of a command, while it is at work
    leases/needs/                     held by `sentray gc`, and for a moment by a run that begins
"""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from pipeline.store.leases import Leases
from stages.contract import Say
from stages.files import Root, understood

# Whoever removes what nobody needs, or begins to need something
NEEDS = "needs"


@contextmanager
def needs_are_settled(root: Root, say: Say) -> Iterator[Callable[[], bool]]:
    """Within it nobody else writes down what a run or a search needs, or removes what none does.

    Yields whether that is still so: who was frozen may have been taken for dead.

    Args:
        say: is told who is waited for. A storage without leases settles nothing.
    """
    with Leases(root, warn=lambda text: None) as leases:
        lease = leases.take(NEEDS, lambda: False, say, lambda: "sentray gc, or a run that begins")
        assert lease is not None  # it is never made
        yield lambda: not leases.is_lost(lease)


def write_needs(root: Root, folder: str, artifacts: Iterable[str]) -> None:
    """Writes what a search needs, below its folder: what trials read, before any of them runs; or
    what a command needs that leaves no record."""
    root.write(f"{folder}/needs.json", json.dumps(sorted(artifacts), indent=1).encode())


def needs_of(root: Root, folder: str) -> list[str]:
    """Artifacts that a search has said it needs, in all its runs."""
    file = f"{folder}/needs.json"
    if not root.exists(file):
        return []
    with understood(root.shown(file)):
        return [str(one) for one in json.loads(root.read(file))]
