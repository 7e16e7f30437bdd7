"""What a setting's value may be at all: text, whole and finite numbers, and lists of them; how it
is written as YAML."""

import math
import re
from typing import Any

import yaml

# 64 bits, as in Arrow, torch and every random generator
LARGEST = 2**63
# Characters of a text (a prompt is the longest), of a value in a message, and of a whole message
LONGEST, SHOWN, LONGEST_MESSAGE = 100_000, 200, 3000
DEEPEST = 64
# user:password@ of an address, wherever somebody wrote it; bounded, as a message may be 3 MB long
PASSWORD = re.compile(r"(:/{1,3})[^\s'\"@:]{0,200}:[^\s'\"]{0,500}@")
# Control characters of ASCII but for tab and line breaks, and halves of a surrogate pair
NO_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
# What some terminals obey besides
UNPRINTABLE = re.compile(f"{NO_TEXT.pattern}|[\x80-\x9f]")
# 3e-5 is a number to whoever reads a recipe, and a text to PyYAML: who writes one must know
FLOAT = (
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


class _Dumper(yaml.SafeDumper):
    """Puts quotes around what would be read as something else."""


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # PyYAML writes this line break as it is, and reads it as a space
    style = '"' if "\x85" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_implicit_resolver(*FLOAT)
_Dumper.add_representer(str, _text)


def as_yaml(raw: Any, **style: Any) -> str:
    """Plain data as YAML, in its own order, as it is read again; `style`: options of PyYAML."""
    style = {"sort_keys": False, "allow_unicode": True, "width": 100} | style
    return str(yaml.dump(raw, Dumper=_Dumper, **style))


def yaml_line(value: Any) -> str:
    """A value as YAML on one line."""
    return as_yaml([value], default_flow_style=True, width=10**6)[1:-2]


def check_scalar(value: Any) -> None:
    """Raises ValueError: a number that is not finite or has more than 64 bits, a text with control
    characters or of more than LONGEST characters."""
    if isinstance(value, bool):
        return
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is no finite number")
    if isinstance(value, int) and not -LARGEST <= value < LARGEST:
        raise ValueError(f"{shortened(str(value))} is a number of more than 64 bits")
    if isinstance(value, str):
        if len(value) > LONGEST:
            raise ValueError(f"a text of {len(value):,} characters; at most {LONGEST:,} are read")
        found = NO_TEXT.search(value)
        if found:
            raise ValueError(f"the text has the character {found[0]!r}, which is not to be printed")


def check_plain(value: Any, depth: int = 0) -> None:
    """As `check_scalar`, for all that lists and mappings of settings hold.

    Raises:
        ValueError: also for what JSON cannot hold, such as a date, and too deep a nesting.
    """
    if depth > DEEPEST:
        raise ValueError(f"lists and mappings are nested more than {DEEPEST} deep")
    if isinstance(value, dict | list | tuple):
        for item in value.items() if isinstance(value, dict) else value:
            check_plain(item, depth + 1)
    elif value is None or isinstance(value, bool | int | float | str):
        check_scalar(value)
    else:
        raise ValueError(
            f"a {type(value).__name__} ({shortened(repr(value))}) is neither text nor a number; "
            "put quotes around it if it is a text"
        )


def shortened(text: str, most: int = SHOWN) -> str:
    """Its beginning and its end, where it is long."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"


def for_people(text: str) -> str:
    """A message with escapes for what a terminal would not show, or would obey, without the middle
    of what nobody reads, and without passwords in addresses."""
    return shortened(printable(without_passwords(text)), LONGEST_MESSAGE)


def without_passwords(text: str) -> str:
    """Without user and password of the addresses in it."""
    return PASSWORD.sub(r"\1***@", text)


def printable(text: str) -> str:
    """With escapes for what a terminal would not show, or would obey."""
    return UNPRINTABLE.sub(lambda found: repr(found[0])[1:-1], text)
