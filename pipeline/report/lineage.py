"""Where a run's student and figures come from: its artifacts as a picture of boxes and lines."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.plan.graph import Node
from pipeline.plan.plan import Plan

# Units of the picture: a box, and from one to the next
WIDTH, HEIGHT, ACROSS, DOWN = 168, 44, 208, 60
LONGEST = 23  # characters in a box


@dataclass
class Box:
    """An artifact, or all tests of an encoder."""

    nodes: list[Node]
    column: int
    place: float = 0.0

    @property
    def inputs(self) -> list[str]:
        return list(dict.fromkeys(name for node in self.nodes for name in node.inputs.values()))


def lineage(plan: Plan) -> str:
    """An SVG: what is read on the left, what is made of it to the right. Where a box stands for
    several artifacts, and in what folders they are, is told by its tooltip."""
    boxes = _boxes(plan)
    columns: dict[int, list[Box]] = {}
    of_node = {node.name: box for box in boxes for node in box.nodes}
    for box in boxes:
        columns.setdefault(box.column, []).append(box)
    for _, column in sorted(columns.items()):
        column.sort(key=lambda box: _middle(box, of_node))
        for place, box in enumerate(column):
            box.place = place
    lines, drawn = [], []
    for box in boxes:
        drawn.append(_drawn(plan, box))
        for name in box.inputs:
            lines.append(_line(of_node[name], box))
    width = ACROSS * max(columns) + WIDTH + 2
    height = DOWN * max(map(len, columns.values()))
    return (
        f'<div class="scroll"><svg viewBox="-1 -1 {width} {height}" width="{width}" '
        f'style="max-width:none" font-size="12">{"".join(lines)}{"".join(drawn)}</svg></div>'
    )


def _boxes(plan: Plan) -> list[Box]:
    found: dict[Any, Box] = {}
    column_of: dict[str, int] = {}
    for node in plan.graph.values():
        column = 1 + max((column_of[name] for name in node.inputs.values()), default=-1)
        column_of[node.name] = column
        box = found.setdefault(node.stage.measures or node.name, Box([], column))
        box.nodes.append(node)
        box.column = max(box.column, column)
    return list(found.values())


def _middle(box: Box, of_node: dict[str, Box]) -> float:
    """Where the boxes that it reads are, on average."""
    places = [of_node[name].place for name in box.inputs]
    return sum(places) / len(places) if places else 0.0


def _line(start: Box, end: Box) -> str:
    x1, y1 = start.column * ACROSS + WIDTH, start.place * DOWN + HEIGHT / 2
    x2, y2 = end.column * ACROSS, end.place * DOWN + HEIGHT / 2
    middle = (x1 + x2) / 2
    path = f"M{x1} {y1}C{middle} {y1} {middle} {y2} {x2} {y2}"
    return f'<path d="{path}" fill="none" stroke="currentColor" opacity=".35"/>'


def _drawn(plan: Plan, box: Box) -> str:
    x, y = box.column * ACROSS, box.place * DOWN
    manifests = [plan.store.manifest(plan.folders[node.name]) for node in box.nodes]
    there = [one for one in manifests if one is not None]
    told = [f"{len(box.nodes)} tests"] if len(box.nodes) > 1 else []
    told += [f"{there[0].num_rows:,} rows"] if there and there[0].shards else []
    told += [f"{sum(one.seconds for one in there):,.0f} s"] if there else ["not made"]
    lines = [f"{node.name}: {plan.folders[node.name]}" for node in box.nodes]
    return (
        f"<g><title>{html.escape(chr(10).join(lines))}</title>"
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6" '
        f'style="fill:var(--soft);stroke:var(--line)"/>'
        f'<text x="{x + 9}" y="{y + 18}">{html.escape(_name(box.nodes))}</text>'
        f'<text x="{x + 9}" y="{y + 35}" opacity=".65">{", ".join(told)}</text></g>'
    )


def _name(nodes: Sequence[Node]) -> str:
    """The node's name, or what the names of several begin with."""
    name = nodes[0].name
    if len(nodes) > 1:
        name = name.rpartition(":")[0]
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"
