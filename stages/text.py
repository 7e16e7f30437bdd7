"""How numbers and people are written."""

import getpass
import os


def clock(seconds: float) -> str:
    """Seconds as 1:02:03 or 2:03."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def user_name() -> str:
    """Who runs this process; containers may know no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user-{os.getuid()}"
