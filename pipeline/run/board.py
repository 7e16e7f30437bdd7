"""How workers tell the driver how far they are and what went wrong, and hear that they must end."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from stages.contract import NO_FIGURES, Say
from stages.errors import UserError

# A node's name, and what was said about it: see `Say`.
News = tuple[str, str, bool, dict[str, float]]


@ray.remote(num_cpus=0)
class Board:
    """Collects what workers say until the driver takes it."""

    def __init__(self) -> None:
        self._news: list[News] = []
        self._errors: dict[str, UserError] = {}
        self._asked = False

    def post(self, *news: *News) -> None:
        self._news.append(news)

    def post_error(self, node: str, error: UserError) -> None:
        self._errors[node] = error

    def error(self, node: str) -> UserError | None:
        return self._errors.get(node)

    def stop(self) -> None:
        """Asks all to put their work away."""
        self._asked = True

    def asked_to_stop(self) -> bool:
        return self._asked

    def take(self) -> list[News]:
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

    def say(text: str, important: bool = False, figures: Mapping[str, float] = NO_FIGURES) -> None:
        board.post.remote(node, text, important, dict(figures))

    return say


def wait_until_told(board: Any) -> None:
    """Until the board has all that this process has posted: it takes calls in their order."""
    ray.get(board.asked_to_stop.remote())


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
