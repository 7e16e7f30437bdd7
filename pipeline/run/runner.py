"""Brings a recipe's artifacts up to date: chooses what to make, checks it, makes it, records it."""

import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from pipeline.plan.graph import Node
from pipeline.plan.plan import Plan, make_plan
from pipeline.recipe.read import dump_recipe
from pipeline.report.figures import Results, collect
from pipeline.run.work import works_of
from pipeline.store.artifacts import Artifact
from pipeline.store.history import start_record
from stages.errors import UserError
from stages.recipe import Recipe

Out = Callable[[str], None]


def run(
    recipe: Recipe,
    address: str | None = None,
    start: str | None = None,
    only: str | None = None,
    force: list[str] | None = None,
    out: Out = lambda line: print(line, flush=True),
) -> bool:
    """Brings the recipe's artifacts up to date.

    Args:
        start: `--from`: this node and everything that depends on it is made again.
        only: `--only`: nothing but this node.
        force: `--force`: these nodes are made again.

    Returns:
        whether anything was to do.

    Raises:
        UserError: bad input anywhere; artifacts already published stay.
    """
    plan = make_plan(recipe)
    wanted, again = choose(plan, start, only, force or [])
    check_undamaged(plan, wanted, again)
    for planned in plan.nodes.values():
        if planned.damage and planned.node.name not in again:
            out(f"warning: {planned.node.name}: {planned.folder} is {planned.reason}")
    if not wanted:
        present_student(plan, collect(plan))
        return False
    plan.store.check_writable()
    check_nodes(wanted)
    record = record_start(plan)
    out(f"{recipe.name}: making {', '.join(node.name for node in wanted)}; starting Ray")
    for warning in recipe.warnings():
        out(f"warning: {warning}")

    from pipeline.run.session import ray_session

    with ray_session(address):
        make(plan, wanted, again, out)
    finish(plan, record)
    return True


def choose(
    plan: Plan, start: str | None, only: str | None, force: list[str]
) -> tuple[list[Node], set[str]]:
    """Which nodes to make, and which of them again although they are done; see `run`.

    Raises:
        UserError: no such node, or `only` lacks an input.
    """
    nodes = plan.graph
    again = {name for given in force for name in named(given, nodes)}
    if start is not None:
        again |= set(named(start, nodes))
        for node in nodes.values():
            if again.intersection(node.inputs.values()):
                again.add(node.name)
    wanted = [one.node for one in plan.nodes.values() if not one.done or one.node.name in again]
    if only is not None:
        names = named(only, nodes)
        wanted = [node for node in wanted if node.name in names]
        again &= set(names)
        for node in wanted:
            missing = [
                name
                for name in node.inputs.values()
                if not plan.nodes[name].done and name not in names
            ]
            if missing:
                raise UserError(
                    f"--only {only}: it reads {', '.join(missing)}, which must be made first"
                )
    return wanted, again


def named(given: str, nodes: Mapping[str, Node]) -> list[str]:
    """Nodes called `given`, or whose names begin with it (`embed` is every `embed:...`)."""
    found = [name for name in nodes if name == given or name.startswith(f"{given}:")]
    if not found:
        raise UserError(f"there is no stage '{given}'; this recipe has {', '.join(nodes)}")
    return found


def check_undamaged(plan: Plan, nodes: Iterable[Node], again: set[str]) -> None:
    """Says before anything starts that these nodes would read an artifact that lacks something.

    Raises:
        UserError: an input lacks a shard or a file, and is not made `again`.
    """
    read = {name for node in nodes for name in node.inputs.values()} - again
    for planned in plan.nodes.values():
        if planned.damage and planned.node.name in read:
            raise UserError(f"{planned.node.name}: {planned.folder} is {planned.reason}")


def check_nodes(nodes: Iterable[Node]) -> None:
    """Looks at models, files and packages before hours of work depend on them; no torch, no Ray.

    Raises:
        UserError: what is wrong, where, and how to mend it.
    """
    for node in nodes:
        node.stage.check()


def make_needed(recipe: Recipe, names: Iterable[str], out: Out) -> None:
    """Makes these nodes and what they need, where it is missing, within a Ray session."""
    plan = make_plan(recipe)
    needed = set(names)
    for planned in reversed(plan.nodes.values()):
        if planned.node.name in needed and not planned.done:
            needed.update(planned.node.inputs.values())
    wanted = [one.node for one in plan.nodes.values() if one.node.name in needed and not one.done]
    check_undamaged(plan, wanted, set())
    make(plan, wanted, set(), out)


def make(plan: Plan, wanted: list[Node], again: set[str], out: Out) -> None:
    """Makes nodes of a plan, within a Ray session.

    Args:
        again: those that are forgotten first.
    """
    if not wanted:
        return
    from pipeline.run.board import start_board
    from pipeline.run.hosts import check_plugins, make_nodes
    from pipeline.run.progress import Progress
    from pipeline.run.scheduler import run_ready
    from stages.text import clock

    check_plugins(list(dict.fromkeys(p for one in plan.recipes.values() for p in one.plugins)))
    board, progress = start_board(), Progress(out)
    store, folders, graph = plan.store, plan.folders, plan.graph
    roots = {node.name: _rows_root(node, graph) for node in wanted}

    def check_rows(root: str) -> None:
        manifest = store.manifest(folders[root])
        assert manifest is not None
        for node in wanted:
            if roots[node.name] == root:
                node.stage.check_rows(manifest.num_rows)

    for root in {roots[node.name] for node in wanted} - {node.name for node in wanted}:
        check_rows(root)

    def make_batch(batch: list[Node]) -> None:
        works = list(works_of(batch, plan.recipe.storage, folders).values())
        for work in works:
            progress.say(work.name, "started", important=True)
            if work.name in again:  # not before: whatever goes wrong earlier must lose nothing
                work.remove()
                store.root.delete(work.scratch)
        make_nodes(works, board, progress.of)
        progress.relay(board)  # what its workers said last, before "done"
        for work in works:
            seconds = clock(time.time() - work.started)
            progress.say(work.name, f"done in {seconds} -> {work.folder}", important=True)
            if not work.inputs:
                check_rows(work.name)

    run_ready(wanted, make_batch, lambda: progress.relay(board))


def _rows_root(node: Node, graph: Mapping[str, Node]) -> str:
    """The node whose rows are this one's: at the end of the chain of first inputs."""
    while node.inputs:
        node = graph[next(iter(node.inputs.values()))]
    return node.name


def record_start(plan: Plan) -> str:
    """Writes what the history keeps of a run that begins; returns the record's folder."""
    return start_record(
        plan.store.root,
        plan.recipe.name,
        {name: dump_recipe(one) for name, one in plan.recipes.items()},
        plan.folders,
        {name: node.identity for name, node in plan.graph.items()},
    )


def finish(plan: Plan, record: str) -> None:
    """Writes results and report of a finished run, and lays out the student."""
    from pipeline.report.page import write_report

    results = collect(plan)
    if not results.complete:
        return
    plan.store.root.write(f"{record}/results.json", results.json().encode())
    write_report(plan, results, record)
    present_student(plan, results)


def present_student(plan: Plan, results: Results) -> None:
    """`students/NAME`: links to the newest export's files, and a model card with the figures.

    Only on a local file system. The folder is swapped in whole: whoever loads it meanwhile has the
    old one.
    """
    from pipeline.report.table import results_table

    store = plan.store
    link = store.root.local_path(f"students/{plan.recipe.name}")
    if link is None or not results.complete:
        return
    for planned in plan.nodes.values():
        if store.manifest(planned.folder) is None:
            continue
        artifact = store.open(planned.folder, planned.node.name)
        card = planned.node.stage.student_card(artifact, results_table(results))
        if card is not None and planned.node.recipe == plan.recipe.name:
            _lay_out(link, artifact, card)


def _lay_out(link: Path, artifact: Artifact, card: str) -> None:
    config = artifact.local_path("model/config.json")
    readme = link / "README.md"
    is_here = readme.is_file() and (link / "config.json").resolve() == config
    if is_here and readme.read_text(encoding="utf-8") == card:
        return
    source = artifact.folder_path("model")
    target = link.with_name(f".{link.name}-{time.time_ns()}")
    for file in sorted(path for path in source.rglob("*") if path.is_file()):
        place = target / file.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        if file.name != "README.md":
            place.symlink_to(os.path.relpath(file, place.parent))  # the storage may be moved
    (target / "README.md").write_text(card, encoding="utf-8")
    aside = link.with_name(f"{target.name}-link")
    aside.symlink_to(target.name)
    old = link.resolve() if link.is_symlink() else None
    aside.replace(link)
    if old is not None and old.parent == target.parent.resolve() and old.name != target.name:
        shutil.rmtree(old)
