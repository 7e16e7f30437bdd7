"""What runs and searches are doing, or how they ended: from their records, logs and leases; no Ray,
no torch."""

import json
import math
import time
from dataclasses import dataclass
from datetime import UTC, datetime

from pipeline.run.log import SECONDS_BETWEEN_FILES
from pipeline.store.history import newest_record
from pipeline.store.leases import Seen, run_lease, seen_leases
from pipeline.upkeep.contents import HISTORY, RUN, SEARCHES
from stages.errors import UserError
from stages.files import Root, masked_uri, understood
from stages.plain import shortened
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
    known, searches = root.list(HISTORY), root.list(SEARCHES)
    if name is not None:
        if name not in (*known, *searches):
            there = ", ".join([*known, *searches]) or "none"
            raise UserError(
                f"status {name}: no recipe or search of that name has run in storage "
                f"'{masked_uri(storage)}' (there are: {there})"
            )
        searches = [one for one in searches if one == name]
    held = {one.folder: one for one in seen_leases(root)}
    if name is None:
        records = [record for one in known if (record := newest_record(root, one))]
    else:
        records = [f"{HISTORY}/{name}/{stamp}" for stamp in root.list(f"{HISTORY}/{name}")]
        records = [one for one in records if RUN.match(f"{one}/")][-MOST_RUNS:]
    states = [run_state(root, record, held.get(run_lease(record))) for record in records]
    for folder in (f"{SEARCHES}/{one}" for one in searches):
        states.append(_search_state(root, folder, held.get(folder)))
    if not states:
        return f"no recipe has run in storage '{masked_uri(storage)}'"
    rows = [["run", "started", "state", ""]]
    rows += [[one.name, one.started, one.state, shortened(one.told)] for one in states]
    widths = [max(len(row[place]) for row in rows) for place in range(3)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join([*cells, row[3]]).rstrip())
    return "\n".join(lines)


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
        told = f"{lease.holder.who}, heard {clock(lease.age)} ago. {lease.holder.said}"
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
    """Of the run's log, and the seconds since it was written; nothing, and inf, without any."""
    files = root.list(f"{record}/log")
    if not files:
        return {}, math.inf
    name = f"{record}/log/{files[-1]}"
    with understood(root.shown(name)):
        last = json.loads(root.read(name).splitlines()[-1])
        return {key: str(last[key]) for key in ("stage", "event", "text")}, root.age(name)
