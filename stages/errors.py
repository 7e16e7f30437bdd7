"""The one error type that is meant for people, and errors that are nobody's input."""

import re

# As torch, onnxruntime, OpenVINO and safetensors say it, each with an error type of its own
NO_ROOM = re.compile(
    r"allocate memory|(tried|failed) to allocate|bad.alloc|out of memory|no space left|"
    "file too large", re.IGNORECASE
)  # fmt: skip


class UserError(Exception):
    """Input that the user can correct: printed as one message, exit code 2, no traceback.

    The message says what is wrong, where, and how to fix it.
    """


class StorageError(UserError):
    """What is stored cannot be read or written; the settings may be tried again."""


class StorageSilent(StorageError):
    """A store has not answered for as long as a process was patient; it may later."""


def lacks_room(error: BaseException) -> bool:
    """Whether an error is of memory or a full disk: the same may be done on another day."""
    return isinstance(error, MemoryError) or NO_ROOM.search(str(error)) is not None


class Stopped(UserError):
    """The run was asked to end, and what can be kept of its work has been put away."""

    def __init__(self, text: str = "stopped; run again to continue") -> None:
        super().__init__(text)
