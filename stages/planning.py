"""How a recipe becomes nodes: what the rooms' `plan` functions are handed.

Settings stand below the recipe, `plan` functions above it: a room's settings do not import this.
"""

from collections.abc import Iterable
from typing import Any, Protocol

from stages.contract import Stage
from stages.encoder.settings import EncoderSettings
from stages.encoder.source import EncoderSource
from stages.plugins import Extensions
from stages.recipe import Recipe

# Nodes that a node reads, with another name for it where its stage has one: (own name, node).
Inputs = Iterable[str | tuple[str, str]]


class Graph(Protocol):
    """The nodes of a recipe, as its rooms' `plan` functions build them, inputs first."""

    # node with the factors of each teacher, by the teacher's name
    factors: dict[str, str]
    # nodes that train the recipe's student, one for each seed; the first one's student is exported
    trainings: list[str]

    @property
    def recipe(self) -> Recipe: ...
    @property
    def extensions(self) -> Extensions: ...
    def __contains__(self, name: object) -> bool: ...
    def stage(self, name: str) -> Stage: ...
    def add(
        self,
        name: str,
        stage: Stage,
        inputs: Inputs,
        title: str | None = None,
        where: str = "",
    ) -> str: ...
    def fingerprint(self, stage: Stage, inputs: Inputs) -> str: ...
    def encoder(self, settings: EncoderSettings) -> EncoderSource[Any]: ...
    def student(self) -> EncoderSource[Any]: ...
    def trained_student(self, training: str | None = None) -> EncoderSource[Any]: ...
