"""A secret that must stay where it is, and files where it might have been left."""

from contextlib import suppress
from pathlib import Path
from typing import Any

SECRET = "s3cr3t-Gateway-Value"

EXTRA = {"user": "u", "extra_headers": {"Authorization": "Bearer ${GATEWAY_TOKEN}"}}


def chat(**changes: Any) -> list[dict[str, Any]]:
    return [{"name": "chat", "rewriting": {"model": "m", "key_variable": None} | changes}]


def left_by(folder: Path | str) -> dict[Path, bytes]:
    """Every file below a folder, whatever it is, by its path."""
    found = {}
    for path in Path(folder).rglob("*"):
        with suppress(FileNotFoundError):  # it goes while we look
            if path.is_file():
                found[path] = path.read_bytes()
    return found


def process_list() -> bytes:
    """The commands of all processes of this machine, as anybody can read them."""
    found = b""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it ends while we look
            found += path.read_bytes() + b"\n"
    return found
