"""Machines and processes that are lost: Ray's own failures, not the user's code's."""

import ray

from stages.errors import UserError

LOST = (
    ray.exceptions.RayActorError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.ObjectLostError,
    ray.exceptions.OutOfMemoryError,
)
SHOWN = 400  # characters of what Ray says


def first_line(error: Exception) -> str:
    """What Ray says of a loss."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def too_many(node: str, error: Exception) -> UserError:
    """What to tell where what makes a node is lost again and again."""
    said = " ".join(str(error).split()) or type(error).__name__
    return UserError(
        f"{node}: its processes or machines were lost more than train.max_failures times. Ray "
        f"says: {said[:SHOWN]}. What is finished is kept; run again to go on. Where memory was "
        "short, let fewer processes share it (more cores for each: --pools), or make batches "
        "smaller"
    )
