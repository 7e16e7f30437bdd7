"""Environment variables that go with a job: nobody reads their values in the job's description.

Ray shows a job's variables in its API and writes them into logs. What it gets is their values
combined with a random pad as long as they are (XOR); the pad is a file of the job's package. Either
alone is noise (a one-time pad: each is of one job only).
"""

import base64
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from stages.errors import UserError

VARIABLE = "SENTRAY_PASSED"
PAD = "passed.pad"


def split(values: Mapping[str, str]) -> tuple[str, bytes]:
    """Both halves of variables: a text for the job's environment, and the pad."""
    plain = json.dumps(dict(values)).encode()
    pad = secrets.token_bytes(len(plain))
    return base64.b64encode(_combined(plain, pad)).decode(), pad


def take(package: Path) -> None:
    """Sets the variables that came with this process's job, if any did.

    Args:
        package: the folder where the job's package is unpacked.

    Raises:
        UserError: the pad is not there.
    """
    half = os.environ.get(VARIABLE)
    if half is None:
        return
    try:
        pad = (package / PAD).read_bytes()
    except OSError as error:
        raise UserError(
            f"the variables that were passed to this job cannot be read: {package / PAD}: {error}"
        ) from None
    os.environ.update(json.loads(_combined(base64.b64decode(half), pad)))


def _combined(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))
