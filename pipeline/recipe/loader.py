"""YAML without its surprises: what is read is what a person would read.

A subset of YAML 1.2: decimal numbers (3e-5 is one), no key twice, aliases only as far as they stay
small. `010` (8 in YAML 1.1) and `1:30` (90) are refused and not guessed at.
"""

import re
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from stages.errors import UserError
from stages.plain import FLOAT

# Characters of a file, and settings in it once aliases are written out
LONGEST, MOST_NODES = 4_000_000, 100_000
DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9_]*)")

Lines = dict[tuple[str, ...], str]


def read_yaml(text: str, title: str) -> tuple[Any, Lines]:
    """Plain data, and `line 12` of every setting by its path.

    Raises:
        UserError: it is no YAML, or YAML that means something else than it seems to.
    """
    try:
        root = yaml.compose(text, Loader=_Loader)
        if root is None:
            return None, {}
        _check_size(root)
        return _written_out(yaml.load(text, Loader=_Loader)), _lines_of(root)
    except RecursionError:
        raise UserError(f"{title}: lists and mappings are nested too deep") from None
    # KeyError and the like: a value that does not fit the tag before it; ValueError: month 13
    except (yaml.YAMLError, ValueError, KeyError, AttributeError, TypeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        if mark and "${" in "".join(text.splitlines()[mark.line : mark.line + 1]):
            problem += "; put quotes around a value with ${...}"
        raise UserError(f"{title}{line}: not valid YAML ({problem})") from None


def _written_out(value: Any) -> Any:
    """Aliases as values of their own: a setting is overridden in one place."""
    if isinstance(value, dict):
        return {key: _written_out(one) for key, one in value.items()}
    return [_written_out(one) for one in value] if isinstance(value, list) else value


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise _refused("a setting's name must be text", key_node)
            if key in seen:
                raise _refused(f"the key '{key}' is there twice", key_node)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: Any) -> int | float:
        """As Python has it; other notations have other values in other readers of YAML."""
        text = str(self.construct_scalar(node))
        is_integer = node.tag.endswith(":int")
        if ":" in text or (is_integer and not DECIMAL.fullmatch(text)):
            raise _refused(
                f"{text} is a number of base 8, 16 or 60 to some readers of YAML; write it without "
                "leading zeros, x and colon, or in quotes",
                node,
            )
        convert = self.construct_yaml_int if is_integer else self.construct_yaml_float
        value: int | float = convert(node)
        return value


_Loader.add_implicit_resolver(*FLOAT)
for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.construct_number)


def _refused(problem: str, node: Any) -> ConstructorError:
    return ConstructorError(None, None, problem, node.start_mark)


def _check_size(root: Any) -> None:
    """Raises ConstructorError: an alias within itself, or aliases that make a giant of it."""
    sizes: dict[int, int] = {}

    def size(node: Any, above: frozenset[int]) -> int:
        if id(node) in above:
            raise _refused("an alias is within what it stands for", node)
        if id(node) not in sizes:
            inside = above | {id(node)}
            parts = node.value if isinstance(node.value, list) else []
            several = (one if isinstance(one, tuple) else (one,) for one in parts)
            found = 1 + sum(size(part, inside) for one in several for part in one)
            if found > MOST_NODES:
                raise _refused(f"more than {MOST_NODES:,} settings, aliases written out", node)
            sizes[id(node)] = found
        return sizes[id(node)]

    size(root, frozenset())


def _lines_of(node: Any, where: tuple[str, ...] = ()) -> Lines:
    found = {where: f"line {node.start_mark.line + 1}"} if where else {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = (*where, str(key.value))
            found |= _lines_of(value, path) | {path: f"line {key.start_mark.line + 1}"}
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            found |= _lines_of(value, (*where, str(number)))
    return found
