"""What runs are doing, or how they ended: from their records, logs and leases; no Ray, no torch."""

import json
import math
from dataclasses import dataclass

from pipeline.run.log import SECONDS_BETWEEN_FILES
from pipeline.store.history import newest_record
from pipeline.store.leases import Seen, run_lease, seen_leases
from pipeline.upkeep.contents import HISTORY
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
    """One run. state: running, silent, finished, failed, stopped or killed. told: how far it is, or
    why it ended."""

    recipe: str
    started: str
    state: str
    told: str


def status(storage: str, name: str | None = None) -> str:
    """The newest run of every recipe, or the newest ones of one, as a table.

    Raises:
        UserError: there is no such run.
    """
    root = Root(storage)
    known = root.list(HISTORY)
    if name is not None and name not in known:
        raise UserError(
            f"status {name}: no recipe of that name has run in storage '{masked_uri(storage)}' "
            f"(there are: {', '.join(known) or 'none'})"
        )
    held = {one.folder: one for one in seen_leases(root)}
    if name is None:
        records = [record for one in known if (record := newest_record(root, one))]
    else:
        stamps = root.list(f"{HISTORY}/{name}")[-MOST_RUNS:]
        records = [f"{HISTORY}/{name}/{stamp}" for stamp in stamps]
    if not records:
        return f"no recipe has run in storage '{masked_uri(storage)}'"
    states = [run_state(root, record, held.get(run_lease(record))) for record in records]
    rows = [["run", "started", "state", ""]]
    rows += [[one.recipe, one.started, one.state, shortened(one.told)] for one in states]
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
    day, time = stamp[:8], stamp[9:15]
    started = f"{day[:4]}-{day[4:6]}-{day[6:]} {time[:2]}:{time[2:4]}:{time[4:]} UTC"
    if lease is not None and lease.alive:
        state = "running" if lease.age < SILENT_SECONDS else "silent"
        told = f"{lease.holder.who}, heard {clock(lease.age)} ago. {lease.holder.said}"
        return RunState(recipe, started, state, told)
    last, age = _last_line(root, record)
    event = last.get("event", "")
    if event in ("failed", "stopped"):
        return RunState(recipe, started, event, str(last.get("text", "")))
    if event == "ended" or root.exists(f"{record}/results.json"):
        return RunState(recipe, started, "finished", "")
    told = f"last: {last['stage']}: {last['text']}" if last.get("stage") else "nothing made yet"
    # on a storage that cannot have leases only the log tells
    alive = lease is None and age < 3 * SECONDS_BETWEEN_FILES
    return RunState(recipe, started, "running" if alive else "killed", told)


def _last_line(root: Root, record: str) -> tuple[dict[str, str], float]:
    """Of the run's log, and the seconds since it was written; nothing, and inf, without any."""
    files = root.list(f"{record}/log")
    if not files:
        return {}, math.inf
    name = f"{record}/log/{files[-1]}"
    with understood(root.shown(name)):
        last = json.loads(root.read(name).splitlines()[-1])
        return {key: str(last[key]) for key in ("stage", "event", "text")}, root.age(name)
