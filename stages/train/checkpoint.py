"""Checkpoints that a kill cannot spoil.

Every worker writes its files under `step-000500-3f9a1c2b/`, whose last digits are the attempt's, so
that a process that was thought dead cannot write into another's. After all workers have written,
rank 0 writes `complete.json` there, last. A checkpoint without it does not exist. Ray Train's own
registry is not used to resume: a report just before a kill can be lost (the newest complete folder
cannot). The newest two are kept.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from stages.errors import StorageError
from stages.files import Root

MARKER = "complete.json"


class Saved(NamedTuple):
    """Which checkpoint: its step, and the attempt that wrote it (0: one that had no name)."""

    step: int
    attempt: int


class Checkpoints:
    """The checkpoints of one training, in `folder` under a storage root.

    Args:
        attempt: eight hexadecimal digits of who writes; any attempt's checkpoints are read.
    """

    def __init__(self, root: Root, folder: str, attempt: str = "") -> None:
        self._root = root
        self._folder = folder
        self._attempt = int(attempt or "0", 16)

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
        name = self._name(Saved(step, self._attempt))
        with tempfile.TemporaryDirectory() as local:
            write(Path(local))
            self._root.put_folder(Path(local), f"{name}/rank-{rank}")
        barrier()
        if rank == 0:
            self._root.write(f"{name}/{MARKER}", json.dumps(state).encode())
            for old in self._complete()[:-2]:
                self._root.delete(self._name(old))
        barrier()

    def newest(self) -> "Saved":
        """The newest complete checkpoint; of step 0 when there is none."""
        return max(self._complete(), default=Saved(0, 0))

    def state(self, saved: "Saved", layout: dict[str, Any]) -> dict[str, Any]:
        """The loop's state at a complete checkpoint.

        Raises:
            StorageError: it was written with another layout (engine, workers, ZeRO stage).
        """
        state: dict[str, Any] = json.loads(self._root.read(f"{self._name(saved)}/{MARKER}"))
        if state["layout"] != layout:
            raise StorageError(
                f"train: the unfinished training at step {saved.step} was run with "
                f"{_readable(state['layout'])}; this run asks for {_readable(layout)}. Continue "
                "it with the old settings, or start afresh with --force train."
            )
        return state

    def load(self, saved: "Saved", read: Callable[[Path], None]) -> None:
        """Hands all workers' files of a checkpoint, in one local folder, to `read`."""
        with tempfile.TemporaryDirectory() as local:
            self._root.get_folder(self._name(saved), Path(local))
            read(Path(local))

    def _name(self, saved: "Saved") -> str:
        attempt = f"-{saved.attempt:08x}" if saved.attempt else ""
        return f"{self._folder}/step-{saved.step:06d}{attempt}"

    def _complete(self) -> list["Saved"]:
        names = [name for name in self._root.list(self._folder) if name.startswith("step-")]
        parts = [name.split("-") for name in names]
        found = [Saved(int(step), int((more or ["0"])[0], 16)) for _, step, *more in parts]
        return sorted(one for one in found if self._root.exists(f"{self._name(one)}/{MARKER}"))


def _readable(layout: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in layout.items())
