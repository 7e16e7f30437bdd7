"""`sentray gc`: removes what no run needs any more. Safe beside runs that are at work.

Needed are the artifacts that a run of the history names, that a search has in its log, what these
were made of, and whatever a lease is held for. A run names all its artifacts before it makes any, a
search what its trials read, and one that was killed finds its unfinished work again.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.store.history import folders_of, newest_record
from pipeline.store.leases import seen_leases
from pipeline.store.needs import NEEDS, needs_are_settled, needs_of
from pipeline.upkeep.contents import (
    HISTORY,
    LEASES,
    SCRATCH,
    SEARCHES,
    Contents,
    alive,
    contents,
    key_of,
    needed_by_runs,
    needed_by_searches,
    with_inputs,
)
from pipeline.upkeep.status import run_state
from pipeline.upkeep.usage import shown
from stages.contract import NO_FIGURES
from stages.files import Root, storage_errors

# A file that a writer has open is not older.
TORN_SECONDS = 3600.0
MOST_LINES = 20


@dataclass(frozen=True)
class Garbage:
    """Something that can go: its path under the root, and why."""

    path: str
    num_bytes: int
    why: str


def garbage(storage: str, keep: Sequence[str] = ()) -> tuple[Contents, list[Garbage]]:
    """What nobody needs, largest first.

    Args:
        keep: recipes and searches that are needed, each by its newest runs; none: all there are.

    Raises:
        UserError: it is no storage root, or one of `keep` has never run.
    """
    there = contents(storage)
    root, held = there.store.root, alive(there.store.root)
    held.pop(NEEDS, None)
    running = {folder.removeprefix("runs/") for folder in held if folder.startswith("runs/")}
    for name in root.list(HISTORY):  # on a storage that cannot have leases only logs tell
        record = newest_record(root, name)
        if record is not None and run_state(root, record, None).state == "running":
            running.add(record.removeprefix(f"{HISTORY}/"))
    published = [folder for folder, one in there.artifacts.items() if one.published]
    needed = _kept(there, keep) | set(held)
    for run in running:  # also of recipes that are not to be kept
        needed |= _named_by(root, run)
    needed = with_inputs(there.store, needed, published)
    made = {key_of(folder) for folder in published}
    found = []
    for folder, one in there.artifacts.items():
        if key_of(folder) not in needed:
            why = "no run needs it" if one.published else "unfinished, and no run needs it"
            found.append(Garbage(folder, one.num_bytes, why))
        elif one.published and not (held or running):  # who is at work may read it as it was
            found += [
                Garbage(f"{folder}/{path}", one.files[path], "of what was made again")
                for path in there.store.superseded(folder, one.files)
            ]
    for folder, one in there.scratch.items():
        key = key_of(folder)
        if folder.startswith("ray/"):
            over = not (held or running)
        elif f"{SCRATCH}/{folder}" in running:  # what a `sentray evaluate` at work needs
            over = False
        else:  # of what is needed and not made, a later run goes on with it
            over = key not in held and (key in made or key not in needed)
        if over:
            found.append(Garbage(f"{SCRATCH}/{folder}", one.num_bytes, "of a run that is over"))
    for lease in seen_leases(root):
        # a run's has one holder ever; its state is told by its log when that is old enough
        if lease.folder.startswith("runs/") and not lease.alive and lease.age > TORN_SECONDS:
            path = f"{LEASES}/{lease.folder}"
            found.append(Garbage(path, sum(root.sizes(path).values()), "of a run that was killed"))
    for path, num_bytes in there.torn.items():
        if root.age(path) > TORN_SECONDS:
            found.append(Garbage(path, num_bytes, "half-written, and its writer is gone"))
    return there, sorted(found, key=lambda one: -one.num_bytes)


def _kept(there: Contents, keep: Sequence[str]) -> set[str]:
    root = there.store.root
    if not keep:
        return needed_by_runs(root) | needed_by_searches(there)
    searches = [name for name in keep if name in root.list(SEARCHES)]
    recipes = [name for name in keep if name not in searches or name in root.list(HISTORY)]
    return needed_by_runs(root, recipes) | needed_by_searches(there, searches)


def _named_by(root: Root, run: str) -> set[str]:
    record = f"{HISTORY}/{run}"
    if root.exists(f"{record}/run.json"):
        return {key_of(folder) for folder in folders_of(root, record).values()}
    return set(map(key_of, needs_of(root, run)))  # of a search


def clear(storage: str, keep: Sequence[str], delete: bool) -> str:
    """Says what can go, and removes it if asked to.

    Raises:
        UserError: as `garbage`.
    """
    there, found = garbage(storage, keep)
    if not found:
        return f"nothing can go: all of {shown(there.num_bytes)} is needed"
    whole = sum(one.num_bytes for one in found)
    lines = [f"{shown(one.num_bytes):>12}  {one.path}  {one.why}" for one in found[:MOST_LINES]]
    if len(found) > MOST_LINES:
        rest = sum(one.num_bytes for one in found[MOST_LINES:])
        lines.append(f"{shown(rest):>12}  {len(found) - MOST_LINES:,} more")
    if not delete:
        lines.append(f"{shown(whole)} of {shown(there.num_bytes)} can go, with --delete")
        return "\n".join(lines)
    gone = 0
    with needs_are_settled(there.store.root, _say) as are_settled:
        # what somebody began to need since is not touched
        still = {one.path for one in garbage(storage, keep)[1]}
        for one in found:
            if one.path in still and are_settled():
                there.store.remove(one.path)
                gone += one.num_bytes
    _remove_dangling(there.store.root)
    return "\n".join([*lines, f"removed {shown(gone)} of {shown(there.num_bytes)}"])


def _say(text: str, important: bool = False, figures: Mapping[str, float] = NO_FIGURES) -> None:
    print(f"gc: {text}", flush=True)


def _remove_dangling(root: Root) -> None:
    """Students whose files are gone."""
    students = root.local_path("students")
    if students is None or not students.is_dir():
        return
    with storage_errors(root.uri):
        for link in students.iterdir():
            if link.is_symlink() and any(not file.exists() for file in link.rglob("*")):
                target = link.resolve()
                link.unlink()
                if target.parent == students.resolve():
                    shutil.rmtree(target)
