"""Checkpoints that a kill cannot spoil.

The first worker writes the state under `step-000500-3f9a1c2b/`, whose last digits are the
attempt's, so that a process that was thought dead cannot write into another's; and `complete.json`
there, last, with SHA-256 of all files. A checkpoint without it does not exist, and one that has
changed since is not read. Ray Train's own registry is not used to resume:
a report just before a kill can be lost (the newest complete folder cannot). The newest two are
kept.

    best-000400-3f9a1c2b/    the best weights so far, once for all checkpoints that have them
"""

import hashlib
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from stages.content import sha256_of
from stages.files import Root

MARKER = "complete.json"
WEIGHTS = "weights.safetensors"
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


class Found(NamedTuple):
    """A checkpoint as it is read: the loop's state, files, and the best weights, if any."""

    state: dict[str, Any]
    folder: Path
    best: dict[str, Tensor] | None


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
        self._digests: dict[str, dict[str, str]] = {}  # of the best weights by their name
        self._rejected: set[Saved] = set()

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
        saved = Saved(step, self._attempt)
        self._rejected.discard(saved)
        name = self._name(saved)
        with self._root.filled_folder(name) as local:
            write(local)
            files = _digests(local)
        best_name = self._put_best(*best) if best else ""
        state = state | {
            "files": files, "best": best_name, "best_files": self._digests.get(best_name, {}),
        }  # fmt: skip
        self._bests[step] = best_name
        self._root.write(f"{name}/{MARKER}", _sealed(state))
        self._forget()

    def _put_best(self, step: int, weights: dict[str, Tensor]) -> str:
        """Where the best weights are stored, from now on or already."""
        name = f"best-{step:06d}-{self._attempt:08x}"
        if name not in self._bests.values():
            with self._root.filled_folder(f"{self._folder}/{name}") as local:
                write_tensors(weights, local / WEIGHTS)
                self._digests[name] = _digests(local)
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
        """The newest complete checkpoint that was not rejected; of step 0 if there is none."""
        return max(self._complete(), default=Saved(0, 0))

    def reject(self, saved: "Saved") -> None:
        """A checkpoint that is damaged: it is not one of those that are kept, as new ones of
        earlier steps would then be forgotten as they are written."""
        self._rejected.add(saved)
        self._bests.pop(saved.step, None)

    @contextmanager
    def opened(self, saved: "Saved") -> Iterator[Found | None]:
        """A complete checkpoint with its files in a local folder; None where one is not as it was
        written. (Older versions did not say how that was.)"""
        with tempfile.TemporaryDirectory() as local:
            yield self._fetched(saved, Path(local, "state"), Path(local, "best"))

    def _fetched(self, saved: "Saved", folder: Path, best: Path) -> Found | None:
        try:
            state = _unsealed(self._root.read(f"{self._name(saved)}/{MARKER}"))
            name = state.pop("best")
            digests = [state.pop("files", None), state.pop("best_files", None)]
            state["layout"].items()
        except (ValueError, TypeError, AttributeError, KeyError):
            return None
        written = [(self._name(saved), folder, digests[0])]
        written += [(f"{self._folder}/{name}", best, digests[1])] * bool(name)
        for place, here, known in written:
            here.mkdir()
            self._root.get_folder(place, here)
            if known is not None and _digests(here, but=MARKER) != known:
                return None
        self._bests[saved.step] = name
        if not name:
            return Found(state, folder, None)
        self._digests[name] = digests[1] or {}
        return Found(state, folder, load_file(best / WEIGHTS))

    def _name(self, saved: "Saved") -> str:
        attempt = f"-{saved.attempt:08x}" if saved.attempt else ""
        return f"{self._folder}/step-{saved.step:06d}{attempt}"

    def _complete(self) -> list["Saved"]:
        names = [name for name in self._root.list(self._folder) if name.startswith("step-")]
        parts = [name.split("-") for name in names]
        found = {Saved(int(step), int((more or ["0"])[0], 16)) for _, step, *more in parts}
        left = found - self._rejected
        return sorted(one for one in left if self._root.exists(f"{self._name(one)}/{MARKER}"))


def _sealed(state: dict[str, Any]) -> bytes:
    return json.dumps(state | {"sha256": _seal(state)}).encode()


def _unsealed(data: bytes) -> dict[str, Any]:
    """Raises ValueError: it is not as it was written."""
    state: dict[str, Any] = json.loads(data)
    if state.pop("sha256", None) not in (None, _seal(state)):
        raise ValueError
    return state


def _seal(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _digests(folder: Path, but: str = "") -> dict[str, str]:
    """SHA-256 of a folder's files."""
    return {one.name: sha256_of(one) for one in sorted(folder.iterdir()) if one.name != but}
