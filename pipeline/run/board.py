"""How workers tell the driver how far they are and what went wrong, and hear that they must end."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from stages import patience
from stages.contract import NO_FIGURES, Say
from stages.errors import Stopped, UserError

# What is said of work whose machine leaves with notice.
LEAVING = "its machine is taken away; it goes on elsewhere with what is finished"

SECONDS_BETWEEN_STUMBLES = 10.0

# A node's name, and what was said about it: see `Say`.
News = tuple[str, str, bool, dict[str, float]]


@ray.remote(num_cpus=0)
class Board:
    """Collects what workers say until the driver takes it."""

    def __init__(self) -> None:
        self._news: list[News] = []
        self._errors: dict[str, UserError] = {}
        self._asked = False
        self._begun: set[str] = set()
        self._once: set[tuple[str, str]] = set()
        self._stumbled: dict[tuple[str, bool], float] = {}

    def begin(self, node: str) -> bool:
        """A worker is there for a node; False: too late, all are asked to end."""
        if not self._asked:
            self._begun.add(node)
        return not self._asked

    def post(self, *news: *News) -> None:
        self._news.append(news)

    def post_once(self, *news: *News) -> None:
        """What each of a node's actors says is told once; figures are always."""
        if news[3] or news[:2] not in self._once:
            self._once.add(news[:2])
            self._news.append(news)

    def post_stumble(self, node: str, text: str) -> None:
        """A storage stumbles, or answers again, as many processes may find at once: each of the two
        is shown now and then, and all of it is in the log."""
        key, now = (node, "answers again" in text), time.monotonic()
        is_shown = now - self._stumbled.get(key, -math.inf) > SECONDS_BETWEEN_STUMBLES
        if is_shown:
            self._stumbled[key] = now
        self._news.append((node, text, is_shown, {}))

    def post_error(self, node: str, error: UserError) -> None:
        self._errors[node] = error

    def error(self, node: str) -> UserError | None:
        return self._errors.get(node)

    def forget(self, node: str) -> None:
        """Its workers are gone, and are to come again."""
        self._errors.pop(node, None)
        self._begun.discard(node)

    def stop(self) -> set[str]:
        """Asks all to put their work away; nodes that workers were there for."""
        self._asked = True
        return self._begun

    def asked_to_stop(self) -> bool:
        return self._asked

    def take(self) -> list[News]:
        news, self._news = self._news, []
        return news


def start_board() -> Any:
    """The board of the process that calls."""
    restarted = {"max_restarts": -1, "max_task_retries": -1}
    return Board.options(**near(), **restarted).remote()  # type: ignore[attr-defined]


def near() -> dict[str, Any]:
    """Options of an actor that serves this process: on its machine, no other one's loss ends it."""
    here = ray.get_runtime_context().get_node_id()
    # soft=True is not kept to where an actor takes no core (Ray 2.60: four of four went elsewhere)
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=False)}


def poster(node: str, board: Any, once: bool = False) -> Say:
    """What a worker says about a node goes to the board; `once`: whichever of them says it."""
    post = board.post_once if once else board.post

    def say(text: str, important: bool = False, figures: Mapping[str, float] = NO_FIGURES) -> None:
        post.remote(node, text, important, dict(figures))

    return say


def tell_stumbles(node: str, board: Any) -> None:
    """From now on how the storage stumbles in this process is told of this node."""

    def tell(text: str) -> None:
        board.post_stumble.remote(node, text)

    patience.listeners[:] = [tell]


def wait_until_told(board: Any) -> None:
    """Until the board has all that this process has posted: it takes calls in their order."""
    ray.get(board.asked_to_stop.remote())


def begin(node: str, board: Any) -> None:
    """A worker is there, and is waited for when all are asked to end.

    Raises:
        Stopped: they have been.
    """
    if not ray.get(board.begin.remote(node)):
        raise Stopped


def asked_of(board: Any) -> Callable[[], bool]:
    """Whether the run is to end, as a worker asks."""
    return _now_and_then(lambda: bool(ray.get(board.asked_to_stop.remote())))


def stop_of(board: Any) -> Callable[[], bool]:
    """Whether a worker is to put its work away: the run is to end, or its machine is taken away."""
    asked, leaving = asked_of(board), _now_and_then(machine_is_leaving)
    return lambda: asked() or leaving()


def machine_is_leaving() -> bool:
    """Whether this process's machine is soon taken away: `ray drain-node`, or an autoscaler.

    Ray Data and Ray Train ask so too; Ray 2.60 has no public way.
    """
    machine = ray.get_runtime_context().get_node_id()
    return machine in ray._private.state.state.get_draining_nodes()


def _now_and_then(ask: Callable[[], bool]) -> Callable[[], bool]:
    """Asks once in a second at most, and no more once it is so."""
    last, so = -1.0, False

    def is_so() -> bool:
        nonlocal last, so
        if not so and time.monotonic() - last > 1.0:
            last, so = time.monotonic(), ask()
        return so

    return is_so
