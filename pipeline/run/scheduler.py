"""Which nodes run when: each once its inputs are made, side by side where nothing forbids it.

Knows neither Ray nor stages by name. The driver's threads only wait; Ray does the work.
"""

import queue
import threading
from collections.abc import Callable, Collection, Sequence

from pipeline.plan.graph import Node
from stages.errors import Stopped

MOST_NAMES = 8


def batches(nodes: Sequence[Node]) -> list[list[Node]]:
    """Nodes that share what they load stand together; order kept."""
    found: dict[str, list[Node]] = {}
    for node in nodes:
        found.setdefault(node.stage.shares or f"alone {node.name}", []).append(node)
    return list(found.values())


def run_ready(
    nodes: Sequence[Node],
    make: Callable[[list[Node]], None],
    tick: Callable[[], None],
    asked: threading.Event,
    ask: Callable[[], Collection[str]],
    failed: Callable[[list[Node], Exception], Collection[str]],
) -> None:
    """Makes every batch once its inputs among `nodes` are made.

    A node that fails takes with it those that need it; all others are made before the first error
    is raised, with a note that says what is lacking.

    Args:
        tick: called a few times a second.
        failed: is told at once of each batch that cannot be made as a whole; which of its nodes are
            not.
        asked: set when the run is to end. Nothing more is started then, and those who can put their
            work away are waited for, among the nodes that `ask` names: those with a worker. A node
            that waits for a machine has nothing to put away.

    Raises:
        Stopped: it was asked to end before all was made.
    """
    waiting = batches(nodes)
    running: dict[int, list[Node]] = {}
    finished: queue.Queue[tuple[int, BaseException | None]] = queue.Queue()

    def attempt(number: int, batch: list[Node]) -> None:
        try:
            make(batch)
        except BaseException as error:  # handed to the main thread, which raises it
            finished.put((number, error))
        else:
            finished.put((number, None))

    number, stopping, stopped = 0, False, False
    begun: Collection[str] = ()
    errors: list[Exception] = []
    lacking: dict[str, None] = {}
    while waiting or running:
        if asked.is_set() and not stopping:
            stopping = True
            begun = ask()
        if stopping and not any(_puts_away(batch, begun) for batch in running.values()):
            raise Stopped
        for batch in list(waiting) if not stopping else []:
            if _may_start(batch, waiting, list(running.values())):
                waiting.remove(batch)
                running[number] = batch
                threading.Thread(target=attempt, args=(number, batch), daemon=True).start()
                number += 1
        try:
            ended, error = finished.get(timeout=0.5)
        except queue.Empty:
            tick()
            continue
        tick()
        batch = running.pop(ended)
        if error is None:
            continue
        if stopping and isinstance(error, Stopped):
            stopped = True
        elif stopping or isinstance(error, Stopped) or not isinstance(error, Exception):
            raise error
        else:
            unmade = failed(batch, error)
            errors.append(error)
            waiting, lost = _without(waiting, unmade)
            lacking |= dict.fromkeys([*unmade, *lost])
    if stopped:
        raise Stopped
    if errors:
        if lacking:
            errors[0].add_note(_what_is_lacking(list(lacking), len(errors)))
        raise errors[0]


def _without(
    waiting: list[list[Node]], unmade: Collection[str]
) -> tuple[list[list[Node]], list[str]]:
    """Batches without the nodes that need an unmade one, or one that needs one; and these."""
    lost: dict[str, None] = {}
    while True:
        gone = {*unmade, *lost}
        more = [
            node.name
            for batch in waiting
            for node in batch
            if node.name not in lost and gone.intersection(node.inputs.values())
        ]
        if not more:
            kept = [[node for node in batch if node.name not in lost] for batch in waiting]
            return [batch for batch in kept if batch], list(lost)
        lost |= dict.fromkeys(more)


def _what_is_lacking(names: list[str], num_errors: int) -> str:
    shown = ", ".join(names[:MOST_NAMES])
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    others = f" (of {num_errors} failures this is the first)" if num_errors > 1 else ""
    return f"Not made{others}: {shown}{more}. All else is; run again to go on from there."


def _puts_away(batch: list[Node], begun: Collection[str]) -> bool:
    """Whether an unfinished batch keeps what it has done when it is asked to end."""
    stage = batch[0].stage
    keeps = stage.row_wise or stage.resources().workers is not None
    return keeps and any(node.name in begun for node in batch)


def _may_start(batch: list[Node], waiting: list[list[Node]], running: list[list[Node]]) -> bool:
    unmade = {node.name for other in (*waiting, *running) for node in other}

    def lacks(other: list[Node]) -> bool:
        return any(unmade.intersection(node.inputs.values()) for node in other)

    if lacks(batch):
        return False
    wanted = batch[0].stage.resources()
    taken = [other[0].stage.resources() for other in running]
    if any(other.alone for other in taken) or (wanted.alone and taken):
        return False
    if wanted.alone and len(waiting) > 1:  # after all that can be made without it
        return all(other[0].stage.resources().alone or lacks(other) for other in waiting)
    return not wanted.exclusive or all(other.exclusive != wanted.exclusive for other in taken)
