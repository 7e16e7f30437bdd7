"""How workers tell the driver how far they are and what went wrong, and hear that they must end."""

import time
from collections.abc import Callable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from stages.contract import Say
from stages.errors import UserError


@ray.remote(num_cpus=0)
class Board:
    """Collects what workers say until the driver takes it."""

    def __init__(self) -> None:
        self._news: list[tuple[str, str, bool]] = []
        self._errors: dict[str, UserError] = {}
        self._asked = False

    def post(self, node: str, text: str, important: bool) -> None:
        self._news.append((node, text, important))

    def post_error(self, node: str, error: UserError) -> None:
        self._errors[node] = error

    def error(self, node: str) -> UserError | None:
        return self._errors.get(node)

    def stop(self) -> None:
        """Asks all to put their work away."""
        self._asked = True

    def asked_to_stop(self) -> bool:
        return self._asked

    def take(self) -> list[tuple[str, str, bool]]:
        news, self._news = self._news, []
        return news


def start_board() -> Any:
    """The board, on the driver's machine while that lives, and started again if it is lost."""
    here = ray.get_runtime_context().get_node_id()
    near = NodeAffinitySchedulingStrategy(here, soft=True)
    options = {"scheduling_strategy": near, "max_restarts": -1, "max_task_retries": -1}
    return Board.options(**options).remote()  # type: ignore[attr-defined]


def poster(node: str, board: Any) -> Say:
    """What a worker says about a node goes to the board."""

    def say(text: str, important: bool = False) -> None:
        board.post.remote(node, text, important)

    return say


def stop_of(board: Any) -> Callable[[], bool]:
    """Whether the run is to end, as a worker asks; it asks the board once in a second at most."""
    last, asked = -1.0, False

    def stopping() -> bool:
        nonlocal last, asked
        if not asked and time.monotonic() - last > 1.0:
            last = time.monotonic()
            asked = bool(ray.get(board.asked_to_stop.remote()))
        return asked

    return stopping
