"""Nodes made in this process, one after the other, without Ray."""

from pipeline.plan.plan import make_plan
from pipeline.run.runner import check_nodes
from pipeline.run.work import works_of
from stages.contract import RowWise


def make_here(recipe, *kinds):
    """Makes what a recipe lacks, of these kinds of artifacts or all; returns their names."""
    plan = make_plan(recipe)
    missing = [one.node for one in plan.nodes.values() if not one.done]
    missing = [node for node in missing if not kinds or node.kind in kinds]
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
