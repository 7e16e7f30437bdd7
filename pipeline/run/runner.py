"""Brings a recipe's artifacts up to date: chooses what to make, checks it, makes it, records it."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from pipeline.plan.graph import Node
from pipeline.plan.plan import Plan, make_plan
from pipeline.recipe.read import dump_recipe
from pipeline.report.figures import collect, told
from pipeline.run.commits import commits_for
from pipeline.run.log import RunLog
from pipeline.run.making import make
from pipeline.run.pools import PoolSettings
from pipeline.run.student import find_student, present_student
from pipeline.store.history import start_record
from pipeline.store.needs import needs_are_settled
from stages.contract import NO_FIGURES, Say
from stages.encoder.hub import reading
from stages.errors import UserError
from stages.recipe import Recipe

Out = Callable[[str], None]


def run(
    recipe: Recipe,
    address: str | None = None,
    start: str | None = None,
    only: str | None = None,
    force: list[str] | None = None,
    pools: Mapping[str, PoolSettings] = MappingProxyType({}),
    out: Out = lambda line: print(line, flush=True),
) -> bool:
    """Brings the recipe's artifacts up to date.

    Args:
        start: `--from`: this node and everything that depends on it is made again.
        only: `--only`: nothing but this node.
        force: `--force`: these nodes are made again.
        pools: where stages run; none: on any machine.

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
        present_student(plan, find_student(plan, told(plan)[0]))
        return False
    plan.store.check_writable()
    with reading(commits_for(plan, wanted, again)):
        check_nodes(wanted)
        with needs_are_settled(plan.store.root, told_of(recipe.name, out)):
            record = record_start(plan)
        out(f"{recipe.name}: making {', '.join(node.name for node in wanted)}; starting Ray")
        for warning in recipe.warnings():
            out(f"warning: {warning}")

        from pipeline.run.session import ray_session

        with RunLog(plan.store.root, f"{record}/log", out) as log:
            check_still_there(plan, again)
            with ray_session(address, out):
                make(plan, wanted, again, out, pools, record, log)
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
    if only is not None:
        names = named(only, nodes)
        wanted = [node for node in nodes.values() if node.name in names]
        wanted = [node for node in wanted if node.name in again or not plan.nodes[node.name].done]
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
    read = {read for name in again for read in nodes[name].inputs.values()}
    lacking = {node.name for node in plan.missing_for(read)} | again
    lacking |= {name for name, one in plan.nodes.items() if one.to_do}
    return [node for name, node in nodes.items() if name in lacking], again


def named(given: str, nodes: Mapping[str, Node]) -> list[str]:
    """Nodes called `given`, or whose names begin with it: `embed` is every `embed:...`, and
    `evaluate:after` every `evaluate:after:...` and `evaluate:after+...`."""
    begins = (f"{given}:", f"{given}+")
    found = [name for name in nodes if name == given or name.startswith(begins)]
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


def check_still_there(plan: Plan, again: set[str]) -> None:
    """That nothing of what was made was removed before the run had written down its need.

    Args:
        again: nodes that are made again.

    Raises:
        UserError: it was.
    """
    made = [name for name, one in plan.nodes.items() if one.done and name not in again]
    gone = [name for name in made if plan.store.find(plan.folders[name]) is None]
    if gone:
        raise UserError(
            f"{', '.join(gone)}: removed since this run began (by `sentray gc`?); run again to "
            "make it anew"
        )


def told_of(name: str, out: Out) -> Say:
    """Tells of something that is no node's."""

    def say(text: str, important: bool = False, figures: Mapping[str, float] = NO_FIGURES) -> None:
        out(f"{name}: {text}")

    return say


def check_nodes(nodes: Iterable[Node]) -> None:
    """Looks at models, files and packages before hours of work depend on them; no torch, no Ray.

    Raises:
        UserError: what is wrong, where, and how to mend it.
    """
    for node in nodes:
        try:
            node.stage.check()
        except UserError as error:
            section = re.split(r"\W", str(error), maxsplit=1)[0]
            if not node.where or section in Recipe.model_fields:  # it names the setting itself
                raise
            raise UserError(f"{node.where}: {error}") from None


def make_needed(
    recipe: Recipe,
    names: Iterable[str],
    out: Out,
    pools: Mapping[str, PoolSettings],
    record: str,
    log: RunLog,
) -> None:
    """Makes these nodes and what they need, where it is missing, within a Ray session.

    Args:
        record: folder of what is kept of it, which names its lease.
    """
    plan = make_plan(recipe)
    wanted = plan.missing_for(names)
    check_undamaged(plan, wanted, set())
    if wanted:
        make(plan, wanted, set(), out, pools, record, log)


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
    from pipeline.report.advice import advice_for
    from pipeline.report.differences import with_differences
    from pipeline.report.page import write_report

    results = collect(plan)
    if not results.complete:
        return
    results = replace(results, advice=advice_for(plan, results))
    results = with_differences(plan.store, results)
    root = plan.store.root
    root.write(f"{record}/results.json", results.json().encode())
    write_report(plan, results, record)
    student = find_student(plan, results)
    if student is not None:
        root.write(f"{record}/student.json", student.record())
    present_student(plan, student)
