"""Teachers of a recipe: each becomes a factor matrix, wherever that comes from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stages.planning import Graph

if TYPE_CHECKING:
    from stages.recipe import TeacherSettings


@dataclass(frozen=True)
class TeacherSource:
    """Where the factors of a teacher come from, by `similarity` of its settings.

    plan: adds what the teacher needs, given where it is in the recipe and whether an objective
        reads its factors; returns the node that publishes `factors.npy` (unit rows (N, D) fp16 in
        each shard; reduced rows are shorter than 1), or "" where none does.
    encodes: whether it is an encoder that can be evaluated and timed beside the student.
    """

    plan: "Callable[[Graph, TeacherSettings, str, bool], str]"
    encodes: bool = True


def plan(graph: Graph) -> None:
    """Adds what every teacher needs, and fills `graph.factors` where an objective reads it."""
    recipe = graph.recipe
    teaches = recipe.train.objectives.needs_teacher
    for number, teacher in enumerate(recipe.teachers):
        source = graph.extensions.similarities[teacher.similarity]
        factors = source.plan(graph, teacher, f"teachers[{number}]", teaches)
        if teaches:
            graph.factors[teacher.name] = factors


def encoding_teachers(graph: Graph) -> "list[tuple[int, TeacherSettings]]":
    """Teachers that are encoders, with their places in the recipe."""
    sources = graph.extensions.similarities
    everyone = enumerate(graph.recipe.teachers)
    return [
        (place, one)
        for place, one in everyone
        if one.is_encoder and sources[one.similarity].encodes
    ]
