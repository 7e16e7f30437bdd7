"""Checkpoints that a kill cannot spoil.

The first worker writes the state under `step-000500-3f9a1c2b/`, whose last digits are the
attempt's, so that a process that was thought dead cannot write into another's; and `complete.json`
there, last. A checkpoint without it does not exist. Ray Train's own registry is not used to resume:
a report just before a kill can be lost (the newest complete folder cannot). The newest two are
kept.

    best-000400-3f9a1c2b/    the best weights so far, once for all checkpoints that have them
"""

import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from stages.files import Root, understood

MARKER = "complete.json"
NUM_KEPT = 2


def write_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """As safetensors does, but a full disk is an OSError."""
    try:
        save_file(tensors, file)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else 0, str(error)) from None


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
        self._bests: dict[int, str] = {}  # of the checkpoints saved or loaded here, by their step

    def save(
        self,
        step: int,
        write: Callable[[Path], None],
        state: dict[str, Any],
        best: tuple[int, dict[str, Tensor]] | None = None,
    ) -> None:
        """Publishes the checkpoint of `step`; called by the first worker.

        Args:
            write: writes its files into an empty local folder.
            state: small JSON state of the loop.
            best: the best weights so far and their step; written where they are new.
        """
        name = self._name(Saved(step, self._attempt))
        with self._root.filled_folder(name) as local:
            write(local)
        state = state | {"best": self._put_best(*best) if best else ""}
        self._bests[step] = state["best"]
        self._root.write(f"{name}/{MARKER}", json.dumps(state).encode())
        self._forget()

    def _put_best(self, step: int, weights: dict[str, Tensor]) -> str:
        """Where the best weights are stored, from now on or already."""
        name = f"best-{step:06d}-{self._attempt:08x}"
        if name not in self._bests.values():
            with self._root.filled_folder(f"{self._folder}/{name}") as local:
                write_tensors(weights, local / "weights.safetensors")
        return name

    def _forget(self) -> None:
        """Old checkpoints, and best weights that none of the others has."""
        for old in self._complete()[:-NUM_KEPT]:
            self._root.delete(self._name(old))
        kept = dict(sorted(self._bests.items())[-NUM_KEPT:])
        for name in {*self._bests.values()} - {*kept.values()}:
            if name.endswith(f"-{self._attempt:08x}"):  # another's may be in its own checkpoints
                self._root.delete(f"{self._folder}/{name}")
        self._bests = kept

    def newest(self) -> "Saved":
        """The newest complete checkpoint; of step 0 when there is none."""
        return max(self._complete(), default=Saved(0, 0))

    def state(self, saved: "Saved") -> dict[str, Any]:
        """The loop's state at a complete checkpoint.

        Raises:
            StorageError: it is damaged.
        """
        name = f"{self._name(saved)}/{MARKER}"
        with understood(self._root.shown(name)):
            state: dict[str, Any] = json.loads(self._root.read(name))
            self._bests[saved.step] = str(state.pop("best"))
            state["layout"].items()
        return state

    def load(self, saved: "Saved", read: Callable[[Path], None]) -> None:
        """Hands a checkpoint's files, in a local folder, to `read`."""
        with tempfile.TemporaryDirectory() as local:
            self._root.get_folder(self._name(saved), Path(local))
            read(Path(local))

    def best(self, saved: "Saved") -> dict[str, Tensor] | None:
        """The best weights so far at a checkpoint whose state was read; None: there were none."""
        name = self._bests[saved.step]
        if not name:
            return None
        with tempfile.TemporaryDirectory() as local:
            self._root.get_folder(f"{self._folder}/{name}", Path(local))
            return load_file(Path(local) / "weights.safetensors")

    def _name(self, saved: "Saved") -> str:
        attempt = f"-{saved.attempt:08x}" if saved.attempt else ""
        return f"{self._folder}/step-{saved.step:06d}{attempt}"

    def _complete(self) -> list["Saved"]:
        names = [name for name in self._root.list(self._folder) if name.startswith("step-")]
        parts = [name.split("-") for name in names]
        found = [Saved(int(step), int((more or ["0"])[0], 16)) for _, step, *more in parts]
        return sorted(one for one in found if self._root.exists(f"{self._name(one)}/{MARKER}"))
