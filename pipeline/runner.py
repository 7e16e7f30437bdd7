"""Runs what the plan says is missing: ready nodes side by side, each in its own driver thread."""

import json
import queue
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from pipeline.artifacts import ArtifactStore
from pipeline.document import hide_values
from pipeline.graph import Node
from pipeline.history import start_record
from pipeline.job import Job, clock
from pipeline.outcome import evaluations
from pipeline.plan import Step, make_plan
from pipeline.recipe import Recipe
from stages.errors import UserError

# Lines about the same node come at most this often, so that a log file stays readable.
SECONDS_BETWEEN_LINES = 5.0


def choose(
    steps: list[Step], start: str | None, only: str | None, force: list[str]
) -> tuple[list[Step], set[str]]:
    """Which steps to run, and which of them to make again although they are done.

    Args:
        start: `--from`: this node and everything that depends on it is made again.
        only: `--only`: nothing but this node.
        force: `--force`: these nodes are made again.

    Raises:
        UserError: no such node, or `only` lacks an input.
    """
    by_name = {step.node.name: step for step in steps}
    again = {name for given in force for name in _named(given, by_name)}
    if start is not None:
        again |= set(_named(start, by_name))
        for step in steps:
            if again.intersection(step.node.inputs.values()):
                again.add(step.node.name)
    wanted = [step for step in steps if not step.done or step.node.name in again]
    if only is not None:
        names = _named(only, by_name)
        wanted = [step for step in wanted if step.node.name in names]
        again &= set(names)
        for step in wanted:
            missing = [name for name in step.node.inputs.values() if not by_name[name].done]
            if missing:
                raise UserError(
                    f"--only {only}: it reads {', '.join(missing)}, which must be made first"
                )
    return wanted, again


def _named(given: str, by_name: dict[str, Any]) -> list[str]:
    """Nodes called `given`, or of that kind (`embed` is every `embed:...`)."""
    found = [name for name in by_name if name == given or name.partition(":")[0] == given]
    if not found:
        raise UserError(f"there is no stage '{given}'; this recipe has {', '.join(by_name)}")
    return found


def check_undamaged(steps: list[Step], nodes: list[Node], again: set[str]) -> None:
    """Says before anything starts that these nodes would read an artifact that lacks something.

    Raises:
        UserError: an input lacks a shard or a file, and is not made `again`.
    """
    read = {name for node in nodes for name in node.inputs.values()} - again
    for step in steps:
        if step.damage and step.node.name in read:
            raise UserError(f"{step.node.name}: {step.folder} is {step.reason}")


def run(
    recipe: Recipe,
    address: str | None = None,
    start: str | None = None,
    only: str | None = None,
    force: list[str] | None = None,
    out: Callable[[str], None] = lambda line: print(line, flush=True),
) -> bool:
    """Brings the recipe's artifacts up to date.

    Returns:
        whether anything was to do.

    Raises:
        UserError: bad input anywhere; artifacts already published stay.
    """
    steps = make_plan(recipe)
    wanted, again = choose(steps, start, only, force or [])
    check_undamaged(steps, [step.node for step in wanted], again)
    store = ArtifactStore(recipe.storage)
    folders = {step.node.name: step.folder for step in steps}
    for step in steps:
        if step.damage and step.node.name not in again:
            out(f"warning: {step.node.name}: {step.folder} is {step.reason}")
    if not wanted:
        _link_student(recipe, store, folders["export"])
        return False
    from pipeline.preflight import check_inputs

    store.check_writable()
    check_inputs(recipe, [step.node for step in wanted])
    record = start_record(store.root, recipe, [step.node for step in steps], folders)
    out(f"{recipe.name}: {', '.join(step.node.name for step in wanted)} to make; starting Ray")
    for warning in recipe.warnings():
        out(f"warning: {warning}")

    from pipeline.hosts import ray_session

    with ray_session(address):
        _make_steps(store, folders, [step.node for step in wanted], again, out)
    finish_record(recipe, store, folders, record)
    return True


def make_nodes(recipe: Recipe, names: Iterable[str], out: Callable[[str], None]) -> None:
    """Makes these nodes and what they need, where it is missing, within a Ray session."""
    steps = make_plan(recipe)
    needed = set(names)
    for step in reversed(steps):
        if step.node.name in needed and not step.done:
            needed.update(step.node.inputs.values())
    folders = {step.node.name: step.folder for step in steps}
    wanted = [step.node for step in steps if step.node.name in needed and not step.done]
    check_undamaged(steps, wanted, set())
    _make_steps(ArtifactStore(recipe.storage), folders, wanted, set(), out)


def _make_steps(
    store: ArtifactStore,
    folders: dict[str, str],
    nodes: list[Node],
    again: set[str],
    out: Callable[[str], None],
) -> None:
    from pipeline.hosts import make_node, start_board

    if not nodes:
        return
    board = start_board()
    teller = _Teller(out)

    def make(node: Node) -> None:
        inputs = {own: folders[name] for own, name in node.inputs.items()}
        job = Job(node, folders[node.name], inputs, time.time())
        teller.say(node.name, "started", important=True)
        if node.name in again:  # not before: whatever goes wrong earlier must lose nothing
            store.forget(job.folder)
            store.root.delete(job.work_folder)
        make_node(job, board, partial(teller.say, node.name))
        _relay(board, teller)  # what its workers said last, before "done"
        seconds = clock(time.time() - job.started)
        teller.say(node.name, f"done in {seconds} -> {job.folder}", important=True)

    _run_ready(nodes, make, lambda: _relay(board, teller))


def _run_ready(nodes: list[Node], make: Callable[[Node], None], tick: Callable[[], None]) -> None:
    """Makes every node once its inputs among `nodes` are made; the first error ends the run.

    Threads are daemons: an error or Ctrl-C does not wait for hours of other work, whose finished
    shards and checkpoints count anyway.
    """
    waiting = {node.name: node for node in nodes}
    running: set[str] = set()
    finished: queue.Queue[tuple[str, BaseException | None]] = queue.Queue()

    def attempt(node: Node) -> None:
        try:
            make(node)
        except BaseException as error:  # handed to the main thread, which raises it
            finished.put((node.name, error))
        else:
            finished.put((node.name, None))

    while waiting or running:
        busy = set(waiting) | running
        for name, node in list(waiting.items()):
            if not busy.intersection(node.inputs.values()):
                running.add(name)
                threading.Thread(target=attempt, args=(waiting.pop(name),), daemon=True).start()
        try:
            name, error = finished.get(timeout=0.5)
        except queue.Empty:
            tick()
            continue
        tick()
        if error is not None:
            raise error
        running.remove(name)


def _relay(board: Any, teller: "_Teller") -> None:
    import ray

    for node, text, important in ray.get(board.take.remote()):
        teller.say(node, text, important)


class _Teller:
    """Prints progress lines with the time of day, few enough to read."""

    def __init__(self, out: Callable[[str], None]) -> None:
        self._out = out
        self._last: dict[str, float] = {}
        self._lock = threading.Lock()

    def say(self, node: str, text: str, important: bool = False) -> None:
        with self._lock:
            now = time.monotonic()
            recent = now - self._last.get(node, 0.0) < SECONDS_BETWEEN_LINES
            if important or not recent:
                self._out(f"{time.strftime('%H:%M:%S')}  {node:<16}  {hide_values(text)}")
                self._last[node] = now


def finish_record(
    recipe: Recipe, store: ArtifactStore, folders: dict[str, str], record: str
) -> None:
    """Writes results and report of a finished run, and points `students/<name>` at the export."""
    from pipeline.report import write_report

    results = collect_results(store, folders)
    if "after" not in results["evaluations"] or store.manifest(folders["train"]) is None:
        return
    store.root.write(f"{record}/results.json", json.dumps(results, indent=1).encode())
    write_report(recipe, store, folders, results, record)
    _link_student(recipe, store, folders["export"])


def collect_results(store: ArtifactStore, folders: dict[str, str]) -> dict[str, Any]:
    """Evaluations and speed as plain data."""
    speed = store.manifest(folders["speed"]) if "speed" in folders else None
    return {
        "evaluations": evaluations(folders, store),
        "speed": speed.stats if speed else None,
        "artifacts": folders,
    }


def _link_student(recipe: Recipe, store: ArtifactStore, folder: str) -> None:
    """`students/<name>` is a link to the newest export; only on a local file system."""
    link = store.root.local_path(f"students/{recipe.name}")
    if link is None or store.manifest(folder) is None:
        return
    target = store.open(folder, "export").folder_path("model")
    link.parent.mkdir(exist_ok=True)
    aside = link.with_name(f".{link.name}-{time.time_ns()}")
    aside.symlink_to(target)
    aside.replace(link)
