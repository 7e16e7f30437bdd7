"""Checkpoints that a kill cannot spoil.

Every worker writes its files under `step-000500/`; after all have, rank 0 writes
`complete.json` there, last. A checkpoint without it does not exist. Ray Train's own registry is
not used to resume: a report just before a kill can be lost (the newest complete folder cannot).
The newest two are kept.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stages.errors import StorageError
from stages.files import Root

MARKER = "complete.json"


class Checkpoints:
    """The checkpoints of one training, in `folder` under a storage root."""

    def __init__(self, root: Root, folder: str) -> None:
        self._root = root
        self._folder = folder

    def save(
        self,
        step: int,
        rank: int,
        write: Callable[[Path], None],
        barrier: Callable[[], None],
        state: dict[str, Any],
    ) -> None:
        """Publishes the checkpoint of `step`; called by every worker.

        Args:
            write: writes this worker's files into an empty local folder.
            barrier: returns once every worker has called it.
            state: small JSON state of the loop, the same on all workers.
        """
        name = f"{self._folder}/step-{step:06d}"
        with tempfile.TemporaryDirectory() as local:
            write(Path(local))
            self._root.put_folder(Path(local), f"{name}/rank-{rank}")
        barrier()
        if rank == 0:
            self._root.write(f"{name}/{MARKER}", json.dumps(state).encode())
            for old in self._complete()[:-2]:
                self._root.delete(f"{self._folder}/step-{old:06d}")
        barrier()

    def newest_step(self) -> int:
        """Step of the newest complete checkpoint; 0 when there is none."""
        return max(self._complete(), default=0)

    def state(self, step: int, layout: dict[str, Any]) -> dict[str, Any]:
        """The loop's state at a complete checkpoint.

        Raises:
            StorageError: it was written with another layout (engine, workers, ZeRO stage).
        """
        marker = f"{self._folder}/step-{step:06d}/{MARKER}"
        state: dict[str, Any] = json.loads(self._root.read(marker))
        if state["layout"] != layout:
            raise StorageError(
                f"train: the unfinished training at step {step} was run with "
                f"{_readable(state['layout'])}; this run asks for {_readable(layout)}. Continue "
                "it with the old settings, or start afresh with --force train."
            )
        return state

    def load(self, state: dict[str, Any], read: Callable[[Path], None]) -> None:
        """Hands all workers' files of a checkpoint, in one local folder, to `read`."""
        with tempfile.TemporaryDirectory() as local:
            self._root.get_folder(f"{self._folder}/step-{state['step']:06d}", Path(local))
            read(Path(local))

    def _complete(self) -> list[int]:
        names = [name for name in self._root.list(self._folder) if name.startswith("step-")]
        steps = [int(name.removeprefix("step-")) for name in names]
        marker = f"{self._folder}/step-{{:06d}}/{MARKER}"
        return sorted(step for step in steps if self._root.exists(marker.format(step)))


def _readable(layout: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in layout.items())
