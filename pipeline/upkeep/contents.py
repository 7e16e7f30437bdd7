"""What a storage root holds, by one listing, and which of it somebody may still need."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.store.artifacts import FINGERPRINTED, MANIFEST, ArtifactStore
from pipeline.store.history import STAMP, folders_of, newest_record, stamps
from pipeline.store.leases import Seen, seen_leases
from pipeline.store.needs import needs_of
from stages.errors import UserError
from stages.files import Root, half_written

# Folders of a root that hold no artifacts
SCRATCH, LEASES, HISTORY, SEARCHES = "work", "leases", "history", "tune"
JOURNALS = ("answers", "embeddings")
STUDENTS = "students"  # links, and model cards
# What every run leaves, and what artifacts hold
RUN = re.compile(rf"{HISTORY}/[^/]+/{STAMP.pattern}/")
OURS = re.compile(r"shards/(\d{5}|ledger-)|files/[0-9a-f]{8}/")
OTHERS = (SCRATCH, LEASES, HISTORY, SEARCHES, *JOURNALS)


@dataclass
class Folder:
    """An artifact's folder, or the scratch of one: the bytes of its files, by path inside it."""

    files: dict[str, int] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(self.files.values())

    @property
    def published(self) -> bool:
        return MANIFEST in self.files

    @property
    def is_ours(self) -> bool:
        """Whether it has what an artifact has, and not a like name only."""
        return any(name == MANIFEST or OURS.match(name) for name in self.files)


@dataclass
class Contents:
    """A root as it was found.

    artifacts, scratch: by folder, `embed/minilm-3f9a1c2b`, of scratch without `work/`.
    torn: files that a writer left half-written. others: bytes of the other folders, by name.
    """

    store: ArtifactStore
    artifacts: dict[str, Folder] = field(default_factory=dict)
    scratch: dict[str, Folder] = field(default_factory=dict)
    torn: dict[str, int] = field(default_factory=dict)
    others: dict[str, int] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        folders = [*self.artifacts.values(), *self.scratch.values()]
        return sum(one.num_bytes for one in folders) + sum(
            (*self.torn.values(), *self.others.values())
        )


def contents(storage: str) -> Contents:
    """Reads the listing of a root.

    Raises:
        UserError: it is none.
    """
    store = ArtifactStore(storage)
    sizes = store.root.sizes("")
    if not any(RUN.match(path) for path in sizes):
        raise UserError(
            f"storage '{storage}': no recipe has run here (there is nothing of a run in a folder "
            f"`{HISTORY}`), so nothing of it is looked at; name the folder or address that recipes "
            "have as `storage`"
        )
    found = Contents(store)
    for path, num_bytes in sizes.items():
        parts = path.split("/")
        if parts[0] == STUDENTS:
            continue
        if half_written(parts[-1]):
            found.torn[path] = num_bytes
        elif parts[0] == SCRATCH and len(parts) > 3:
            _add(found.scratch, parts[1:], num_bytes)
        elif parts[0] not in OTHERS and len(parts) > 2 and FINGERPRINTED.search(parts[1]):
            _add(found.artifacts, parts, num_bytes)
        else:
            found.others[parts[0]] = found.others.get(parts[0], 0) + num_bytes
    for folder in [name for name, one in found.artifacts.items() if not one.is_ours]:
        kind, size = folder.partition("/")[0], found.artifacts.pop(folder).num_bytes
        found.others[kind] = found.others.get(kind, 0) + size
    return found


def _add(folders: dict[str, Folder], parts: list[str], num_bytes: int) -> None:
    folder = folders.setdefault("/".join(parts[:2]), Folder())
    folder.files["/".join(parts[2:])] = num_bytes


def key_of(folder: str) -> str:
    """What an artifact is whatever its title, as its lease has it: `embed/3f9a1c2b`."""
    kind, _, name = folder.rpartition("/")
    return f"{kind}/{name[-8:]}"


def needed_by_runs(root: Root, names: Iterable[str] | None = None) -> set[str]:
    """Keys of all artifacts that runs name.

    Args:
        names: only the newest run of each of these recipes, and the newest that has ended; None:
            all runs.

    Raises:
        UserError: a recipe has never run.
    """
    known = root.list(HISTORY)
    records: set[str] = set()
    for name in known if names is None else names:
        if name not in known:
            raise UserError(f"no recipe called '{name}' has run here; there are {', '.join(known)}")
        if names is None:
            records.update(f"{HISTORY}/{name}/{stamp}" for stamp in stamps(root, name))
        else:
            both = newest_record(root, name), newest_record(root, name, with_results=True)
            records.update(record for record in both if record is not None)
    there = (record for record in records if root.exists(f"{record}/run.json"))
    return {key_of(folder) for record in there for folder in folders_of(root, record).values()}


def needed_by_searches(there: Contents, names: Iterable[str] | None = None) -> set[str]:
    """Keys of what searches have said that their trials read, and of what is there of the trainings
    in their logs, and of their results, which have the same fingerprints; None: of all searches."""
    root, digits, read = there.store.root, set[str](), set[str]()
    for name in root.list(SEARCHES) if names is None else names:
        folder = f"{SEARCHES}/{name}"
        read.update(map(key_of, needs_of(root, folder)))
        files = [f"{folder}/trials.jsonl"]
        files += [f"{folder}/trials/{one}" for one in root.list(f"{folder}/trials")]
        for data in root.read_all([file for file in files if root.exists(file)]):
            rows = (_trial(line) for line in data.splitlines())
            digits |= {str(row["folder"])[-8:] for row in rows if "folder" in row}
    keys = map(key_of, [*there.artifacts, *there.scratch])
    return read | {key for key in keys if key[-8:] in digits}


def _trial(line: bytes) -> Mapping[str, Any]:
    """Nothing of a line that a killed search has torn."""
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


def with_inputs(store: ArtifactStore, keys: set[str], folders: Iterable[str]) -> set[str]:
    """Keys, and those of what their artifacts were made of.

    Args:
        folders: of the published artifacts.
    """
    folder_of = {key_of(folder): folder for folder in folders}
    found, waiting = set(keys), [key for key in keys if key in folder_of]
    while waiting:
        manifest = store.manifest(folder_of[waiting.pop()])
        inputs = {key_of(folder) for folder in manifest.inputs.values()} if manifest else set()
        waiting += [key for key in inputs - found if key in folder_of]
        found |= inputs
    return found


def alive(root: Root) -> dict[str, Seen]:
    """Leases of those who are at work, by what they hold."""
    return {one.folder: one for one in seen_leases(root) if one.alive}
