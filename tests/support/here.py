"""Nodes made in this process, one after the other, without Ray."""

from pipeline.plan.graph import needed_for
from pipeline.plan.plan import make_plan
from pipeline.run.runner import check_nodes
from pipeline.run.work import works_of
from stages.contract import RowWise


def make_here(recipe, *names):
    """Makes what a recipe lacks, or what these nodes need; returns the names of what it made."""
    plan = make_plan(recipe)
    needed = needed_for(plan.graph, names or plan.graph)
    missing = [one.node for one in plan.nodes.values() if one.node.name in needed and not one.done]
    check_nodes(missing)
    for work in works_of(missing, recipe.storage, plan.folders).values():
        stage = work.node.stage
        if isinstance(stage, RowWise):
            for open_pass in stage.passes():
                todo = work.missing_shards()
                make = open_pass(work)
                for number in todo:
                    shard = make(number)
                    if shard is not None:
                        work.put_shard(number, shard)
            stage.finish(work)
        else:
            stage.make(work, stage.load(work))
    return [node.name for node in missing]
