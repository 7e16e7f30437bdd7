"""What runs and searches are doing, or how they ended: from their records, logs and leases; no Ray,
no torch."""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from pipeline.run.log import SECONDS_BETWEEN_FILES
from pipeline.store.history import newest_record, stamps
from pipeline.store.leases import Seen, run_lease, seen_leases
from pipeline.upkeep.contents import HISTORY, SEARCHES
from stages.errors import UserError
from stages.files import Root, masked_uri, understood
from stages.plain import printable, shortened
from stages.text import clock

# Runs of one recipe that are shown
MOST_RUNS = 10
# A holder writes its lease every five seconds
SILENT_SECONDS = 30.0


@dataclass(frozen=True)
class RunState:
    """One run, or a search. state: running, silent, finished, failed, stopped or killed. told: how
    far it is, or why it ended."""

    name: str
    started: str
    state: str
    told: str


def status(storage: str, name: str | None = None) -> str:
    """The newest run of every recipe, or the newest ones of one, and searches, as a table.

    Raises:
        UserError: there is no such run.
    """
    root = Root(storage)
    known, searches = _known(root, name)
    held = {one.folder: one for one in seen_leases(root)}
    if name is None:
        records = [record for one in known if (record := newest_record(root, one))]
    else:
        records = [f"{HISTORY}/{name}/{stamp}" for stamp in stamps(root, name)][-MOST_RUNS:]
    states = [run_state(root, record, held.get(run_lease(record))) for record in records]
    for folder in (f"{SEARCHES}/{one}" for one in searches):
        states.append(_search_state(root, folder, held.get(folder)))
    if not states:
        return f"no recipe has run in storage '{masked_uri(storage)}'"
    rows = [["run", "started", "state", ""]]
    rows += [[one.name, one.started, one.state, _line(one.told)] for one in states]
    widths = [max(len(row[place]) for row in rows) for place in range(3)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join([*cells, row[3]]).rstrip())
    return "\n".join(lines)


def _line(told: str) -> str:
    """The first line of what may be an error of many."""
    return printable(shortened(told.strip().partition("\n")[0]))


def log_lines(storage: str, name: str) -> Iterator[str]:
    """What the newest run of a recipe said, or a search in all its runs: `<UTC>  <stage>  <text>`.

    A file of the log is read at a time.

    Raises:
        UserError: there is no such run, or it left no log.
        StorageError: a file of it is damaged.
    """
    root = Root(storage)
    known, _ = _known(root, name)
    record = (newest_record(root, name) if known else None) or f"{SEARCHES}/{name}"
    files = root.list(f"{record}/log")
    if not files:
        raise UserError(f"status {name} --log: there is no log in '{root.shown(record)}'")
    for file in (f"{record}/log/{one}" for one in files):
        with understood(root.shown(file)):
            for line in map(json.loads, root.read(file).splitlines()):
                when = f"{datetime.fromisoformat(line['time']):%Y-%m-%d %H:%M:%S}"
                # of the whole run: it started, ended, or why it did not
                is_end = not line["stage"] and line["event"] != "said"
                text = f"{line['event']} {line['text']}" if is_end else line["text"]
                yield printable(f"{when}  {line['stage'] or 'run':<16}  {text}".rstrip())


def _known(root: Root, name: str | None) -> tuple[list[str], list[str]]:
    """Recipes and searches that have run; only those of that name."""
    recipes, searches = root.list(HISTORY), root.list(SEARCHES)
    if name is None:
        return recipes, searches
    if name not in (*recipes, *searches):
        there = ", ".join([*recipes, *searches]) or "none"
        raise UserError(
            f"status {name}: no recipe or search of that name has run in storage "
            f"'{masked_uri(root.uri)}' (there are: {there})"
        )
    return [name] * (name in recipes), [name] * (name in searches)


def run_state(root: Root, record: str, lease: Seen | None) -> RunState:
    """How a run is.

    Args:
        lease: that the run holds, or held when it was killed.
    """
    recipe, stamp = record.split("/")[1:]
    started = f"{datetime.strptime(stamp[:15], '%Y%m%dT%H%M%S')} UTC"
    return _state(root, recipe, started, record, lease)


def _search_state(root: Root, folder: str, lease: Seen | None) -> RunState:
    """How the newest run of a search is; its settings are written when it begins."""
    name, settings, started = f"search {folder.rpartition('/')[2]}", f"{folder}/search.yaml", ""
    if root.exists(settings):
        seconds = time.time() - root.age(settings)
        started = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    if lease is None and not root.list(f"{folder}/log") and root.exists(f"{folder}/best.yaml"):
        return RunState(name, started, "finished", "")  # before searches had a log
    return _state(root, name, started, folder, lease)


def _state(root: Root, name: str, started: str, record: str, lease: Seen | None) -> RunState:
    if lease is not None and lease.alive:
        state = "running" if lease.age < SILENT_SECONDS else "silent"
        told = f"{lease.holder.who}, heard {clock(max(0, lease.age))} ago. {lease.holder.said}"
        return RunState(name, started, state, told)
    last, age = _last_line(root, record)
    event = last.get("event", "")
    if event in ("failed", "stopped"):
        return RunState(name, started, event, str(last.get("text", "")))
    if event == "ended" or root.exists(f"{record}/results.json"):
        return RunState(name, started, "finished", "")
    told = f"last: {last['stage']}: {last['text']}" if last.get("stage") else "nothing made yet"
    # on a storage that cannot have leases only the log tells
    alive = lease is None and age < 3 * SECONDS_BETWEEN_FILES
    return RunState(name, started, "running" if alive else "killed", told)


def _last_line(root: Root, record: str) -> tuple[dict[str, str], float]:
    """Of the run's log, but for what was said of no stage; and the seconds since it was written.
    Nothing, and inf, without any."""
    files = root.list(f"{record}/log")
    for file in reversed(files):
        name = f"{record}/log/{file}"
        with understood(root.shown(name)):
            for line in map(json.loads, reversed(root.read(name).splitlines())):
                if line["stage"] or line["event"] != "said":
                    last = {key: str(line[key]) for key in ("stage", "event", "text")}
                    return last, root.age(f"{record}/log/{files[-1]}")
    return {}, math.inf
