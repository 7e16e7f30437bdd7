"""`sentray du`: what takes the space of a storage root, by stage, and by recipe and search."""

from collections.abc import Iterable

from pipeline.report.table import aligned
from pipeline.store.history import folders_of, newest_record
from pipeline.upkeep.contents import (
    HISTORY,
    SCRATCH,
    SEARCHES,
    Contents,
    contents,
    key_of,
    needed_by_searches,
)


def usage_text(storage: str) -> str:
    """Two tables. A recipe's bytes are those of its newest run, a search's those of its trials and
    what they read; what several use counts for each, and as shared.

    Raises:
        UserError: it is no storage root.
    """
    there = contents(storage)
    lines = [*aligned(_by_stage(there)), "", *aligned(_by_recipe(there))]
    lines += ["", f"{shown(there.num_bytes)} in all"]
    return "\n".join(lines)


def _by_stage(there: Contents) -> list[list[str]]:
    kinds: dict[str, list[int]] = {}
    for folder, one in there.artifacts.items():
        kind = folder.partition("/")[0] if one.published else "unfinished"
        kinds.setdefault(kind, []).append(one.num_bytes)
    kinds[SCRATCH] = [one.num_bytes for one in there.scratch.values()]
    kinds |= {name: [num_bytes] for name, num_bytes in there.others.items()}
    kinds["torn files"] = list(there.torn.values())
    rows = [["stage", "number", "size"]]
    for kind, sizes in sorted(kinds.items(), key=lambda one: -sum(one[1])):
        if sizes:
            number = "" if kind in there.others else str(len(sizes))
            rows.append([kind, number, shown(sum(sizes))])
    return rows


def _by_recipe(there: Contents) -> list[list[str]]:
    root, used = there.store.root, {}
    for name in root.list(HISTORY):
        record = newest_record(root, name)
        folders: Iterable[str] = folders_of(root, record).values() if record else ()
        used[name] = {key_of(folder) for folder in folders}
    for name in root.list(SEARCHES):
        used[f"search {name}"] = needed_by_searches(there, [name])
    sizes: dict[str, int] = {}
    for group in (there.artifacts, there.scratch):
        for folder, one in group.items():
            sizes[key_of(folder)] = sizes.get(key_of(folder), 0) + one.num_bytes
    rows = [["newest run, search", "size", "shared"]]
    for name, keys in used.items():
        others = set().union(*(other for n, other in used.items() if n != name))
        whole = sum(sizes.get(key, 0) for key in keys)
        rows.append([name, shown(whole), shown(sum(sizes.get(key, 0) for key in keys & others))])
    named = set().union(*used.values())
    rest = sum(size for key, size in sizes.items() if key not in named)
    if rest:
        rows.append(["none: older runs", shown(rest), ""])
    return rows


def shown(num_bytes: int) -> str:
    """In MB or GB, 10^6 and 10^9 bytes."""
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"
