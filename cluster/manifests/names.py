"""What Kubernetes, Ray and shells take as names and labels."""

import re

from pipeline.run.pools import PoolSettings
from stages.errors import UserError

# KubeRay takes 47 characters for a RayJob, and a RayCronJob adds six to its own.
LONGEST_NAME = 41
NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
OBJECT_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
LABEL_KEY = re.compile(
    r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?"
)
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?)?")


def kubernetes_name(text: str, what: str, remedy: str) -> str:
    """A name for Kubernetes: `My_model.v2` is `my-model-v2`.

    Raises:
        UserError: none that one would expect; `what` starts the message, `remedy` ends it.
    """
    name = re.sub(r"[-_. ]+", "-", text.lower()).strip("-")
    if not NAME.fullmatch(name) or len(name) > LONGEST_NAME:
        raise UserError(
            f"{what} '{text}' cannot be a name in Kubernetes (a letter first, then a-z, 0-9 and -, "
            f"{LONGEST_NAME} characters at most); {remedy}"
        )
    return name


def checked_object_name(name: str) -> str:
    """The name of something that exists in Kubernetes.

    Raises:
        ValueError: it cannot be one.
    """
    if not OBJECT_NAME.fullmatch(name):
        raise ValueError(
            f"'{name}' cannot be a name in Kubernetes (a-z, 0-9, - and ., a letter or digit first "
            "and last)"
        )
    return name


def checked_variable(name: str, remedy: str = "") -> str:
    """What an environment variable can be called, for shells and for Kubernetes.

    Raises:
        ValueError: it cannot; `remedy` ends the message, which shows no value that stands there.
    """
    if name.isascii() and name.isidentifier():
        return name
    shown = name.partition("=")[0] + "=" if "=" in name else name[:3]
    raise ValueError(f"'{shown}***' is not the name of an environment variable{remedy}")


def check_labels(labels: dict[str, str], where: str) -> None:
    """Raises UserError where a label is none for Ray and Kubernetes; `where` starts it."""
    for key, value in labels.items():
        if not LABEL_KEY.fullmatch(key) or not LABEL_VALUE.fullmatch(value):
            raise UserError(
                f"{where}: '{key}: {value}' cannot be a label (letters, digits, -, _ and ., "
                "a letter or digit first and last, 63 characters at most)"
            )


def node_labels(name: str, pool: PoolSettings) -> dict[str, str]:
    """Labels of the Ray nodes of a pool.

    Raises:
        UserError: one that Ray does not take.
    """
    labels = pool.node_labels(name)
    check_labels(labels, f"pools.{name}.labels" if pool.labels else f"pools.{name}")
    return labels
