"""What packages outside this repository add: `plugins: [my_package]` in a recipe.

Such a package has a module-level `SENTRAY = Extensions(...)` that lists what it brings; nothing is
registered by being imported. Its name and version are part of the fingerprint of all it makes.
See docs/extending.md.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import metadata
from typing import Any

from stages.errors import UserError

OWN_PACKAGES = ("stages", "pipeline", "tune", "cluster")


@dataclass(frozen=True)
class Extensions:
    """What there is to choose from. `stages/builtin.py` lists Sentray's own.

    stages: kinds of nodes (stages.contract.Stage), by `kind`.
    plans: functions that add a recipe's nodes to its graph, in this order.
    sections: settings of a recipe's sections, by key.
    objectives: losses (stages.train.objectives.base.Objective), by key of `train.objectives`.
    evaluations: tests (stages.evaluate.base.Evaluation), by key of `evaluate`.
    rewrites: sources of rewrites (stages.rewrite.base.RewriteSource), by key of `perturb[i]`.
    similarities: sources of teacher factors (stages.teachers.TeacherSource), by value of
        `teachers[i].similarity`.
    searchers: by value of `search.searcher` (tune.searchers).
    """

    stages: Sequence[type[Any]] = ()
    plans: Sequence[Callable[..., None]] = ()
    sections: Mapping[str, type[Any]] = field(default_factory=dict)
    objectives: Mapping[str, type[Any]] = field(default_factory=dict)
    evaluations: Mapping[str, type[Any]] = field(default_factory=dict)
    rewrites: Mapping[str, type[Any]] = field(default_factory=dict)
    similarities: Mapping[str, Any] = field(default_factory=dict)
    searchers: Mapping[str, Callable[..., Any]] = field(default_factory=dict)


def load_extensions(own: Extensions, plugins: Sequence[str], where: str = "plugins") -> Extensions:
    """Sentray's own parts (stages.builtin.BUILTIN) and those of the packages named.

    Raises:
        UserError: a package that is not installed, fails when imported, has no SENTRAY or no
            version, or brings a name that is taken.
    """
    found = {one.name: getattr(own, one.name) for one in fields(Extensions)}
    owners: dict[tuple[str, str], str] = {}
    for number, package in enumerate(plugins):
        place = f"{where}[{number}]"
        brought = _extensions_of(package, place)
        for group, known in found.items():
            more = getattr(brought, group)
            if not isinstance(known, Mapping):
                _check_kinds(group, known, more, package, place)
                found[group] = (*known, *more)
                continue
            for name in more:
                if name in known:
                    owner = owners.get((group, name), "Sentray itself")
                    raise UserError(
                        f"{place}: '{package}' brings {group} '{name}', which {owner} has already; "
                        "leave one of the two out, or rename it"
                    )
                owners[group, name] = f"'{package}'"
            found[group] = {**known, **more}
    return Extensions(**found)


def _check_kinds(
    group: str, own: Sequence[Any], more: Sequence[Any], package: str, place: str
) -> None:
    if group != "stages":
        return
    taken = {stage.kind for stage in own}
    for stage in more:
        if stage.kind in taken:
            raise UserError(
                f"{place}: '{package}' brings a stage of kind '{stage.kind}', which is taken; "
                "rename it"
            )


def _extensions_of(package: str, place: str) -> Extensions:
    try:
        module = importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package.split(".")[0] and error.name != package:
            raise UserError(
                f"{place}: the plug-in '{package}' needs '{error.name}', which is not installed"
            ) from None
        raise UserError(
            f"{place}: the plug-in '{package}' is not installed in this Python; install it (on "
            "every machine of the cluster), or take it off the list"
        ) from None
    except Exception as error:
        line = (str(error).splitlines() or [""])[0]
        raise UserError(
            f"{place}: the plug-in '{package}' fails when it is imported "
            f"({type(error).__name__}: {line}); mend it, or take it off the list"
        ) from error
    found = getattr(module, "SENTRAY", None)
    if not isinstance(found, Extensions):
        raise UserError(
            f"{place}: '{package}' is no plug-in: it has no `SENTRAY = Extensions(...)` "
            "(docs/extending.md)"
        )
    version_of(package.split(".")[0], place)
    return found


def plugin_version(package: str) -> str:
    """The version of an installed plug-in.

    Raises:
        UserError: it is not installed, or cannot be used.
    """
    _extensions_of(package, "plugins")
    return version_of(package.split(".")[0], "plugins")


def plugin_of(made: type[Any]) -> dict[str, Any]:
    """`{"plugin": "name version"}` for identities, or nothing for Sentray's own classes."""
    package = made.__module__.split(".")[0]
    if package in OWN_PACKAGES:
        return {}
    return {"plugin": f"{package} {version_of(package, package)}"}


@cache
def version_of(package: str, place: str) -> str:
    names = metadata.packages_distributions().get(package, [])
    if names:
        return metadata.version(names[0])
    version = getattr(importlib.import_module(package), "__version__", None)
    if version is None:
        raise UserError(
            f"{place}: '{package}' has no version, which fingerprints need: install it as a "
            "package, or define __version__"
        )
    return str(version)
