"""Results fetched from a cluster's storage: report, table, recipe, student, search.

NAME/student/        the folder that sentence-transformers loads, its model card included
NAME/report.html     and results.json, recipe.yaml: of the newest run that has ended
NAME/search/         report.html, best.yaml, trials.jsonl, search.yaml: of a search
"""

import json
import shutil
import tempfile
from pathlib import Path

from pipeline.report.figures import read_results
from pipeline.report.table import results_table
from pipeline.store.artifacts import ArtifactStore
from pipeline.store.history import newest_record
from stages.errors import UserError
from stages.files import Root, masked_uri, understood
from tune.trials import TrialLog

RUN_FILES = ("report.html", "results.json", "recipe.yaml")
# In a folder that a later `pull` may replace.
MARK = ".pulled"
SEARCH_FILES = ("report.html", "best.yaml", "search.yaml")


def pull(name: str, storage: str, target: Path) -> str:
    """Fetches what is there of a recipe or search into the folder `target`, whole or not at all.

    Returns:
        the table, and where everything is.

    Raises:
        UserError: nothing has ended under this name, the storage cannot be reached from here, or
            `target` is something else.
    """
    _check_reachable(storage)
    store = ArtifactStore(storage)
    record = newest_record(store.root, name, with_results=True)
    searched = store.root.exists(f"tune/{name}/best.yaml")
    if record is None and not searched:
        known = ", ".join(store.root.list("history")) or "none"
        raise UserError(
            f"pull {name}: no run or search of that name has ended in {masked_uri(storage)} "
            f"(recipes run there: {known})"
        )
    if target.exists() and not (target / MARK).is_file():
        raise UserError(f"{target} exists and was not pulled; choose another place with --to")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".pull-") as aside:
        whole = Path(aside) / "whole"
        whole.mkdir()
        (whole / MARK).write_text(f"{name} from {masked_uri(storage)}\n")
        lines = _fetch_run(store, record, whole) if record else []
        if searched:
            _fetch(store.root, f"tune/{name}", SEARCH_FILES, whole / "search")
            trials = TrialLog(store.root, f"tune/{name}").lines()
            (whole / "search" / "trials.jsonl").write_bytes(trials)
        if target.exists():
            target.rename(Path(aside) / "old")
        whole.rename(target)
    places = [f"{file.name:<13} {file}" for file in sorted(target.iterdir()) if file.name != MARK]
    return "\n".join([*lines, *places])


def _check_reachable(storage: str) -> None:
    if "://" not in storage and not Path(storage).is_dir():
        raise UserError(
            f"storage '{storage}': there is no such folder on this machine; mount it here too, or "
            "run `sentray pull` on a machine that has it"
        )


def _fetch_run(store: ArtifactStore, record: str, target: Path) -> list[str]:
    _fetch(store.root, record, RUN_FILES, target)
    results = read_results(store.root, record)
    lines = [results_table(results), ""]
    name = f"{record}/student.json"
    try:
        data = store.root.read(name)
    except FileNotFoundError:
        return [*lines, "no student: the run had none to export, or an older Sentray made it"]
    with understood(store.root.shown(name)):
        student = json.loads(data)
        folders, card = [student["folder"], *student.get("more", [])], str(student["card"])
    if any(store.find(folder) is None for folder in folders):
        return [*lines, "no student: it was removed (`sentray gc`); run the recipe again for one"]
    for folder in folders:
        source = store.open(folder).folder_path("model")
        shutil.copytree(source, target / "student", dirs_exist_ok=True)
    (target / "student" / "README.md").write_text(card, encoding="utf-8")
    return lines


def _fetch(root: Root, folder: str, names: tuple[str, ...], target: Path) -> None:
    target.mkdir(exist_ok=True)
    for name in names:
        if root.exists(f"{folder}/{name}"):
            (target / name).write_bytes(root.read(f"{folder}/{name}"))
