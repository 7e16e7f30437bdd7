"""The exported student as it is used: its files, those of its variants, and the model card."""

import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from pipeline.plan.plan import Plan, make_plan
from pipeline.report.figures import Results
from pipeline.store.artifacts import Artifact
from stages.contract import StudentPart
from stages.errors import UserError
from stages.files import storage_errors
from stages.recipe import Recipe


@dataclass(frozen=True)
class Student:
    """layers: artifacts whose folders `model` are laid over each other, the export first."""

    layers: list[Artifact]
    card: str

    def record(self) -> bytes:
        """`student.json`, for whoever fetches it."""
        first, *more = (artifact.folder for artifact in self.layers)
        return json.dumps({"folder": first, "more": more, "card": self.card}).encode()


def find_student(plan: Plan, results: Results) -> Student | None:
    """The exported student, where there is one, and its model card with the figures."""
    from pipeline.report.table import results_table

    if not results.complete:
        return None
    parts, table = _parts(plan), results_table(results)
    published = [artifact for artifact, part in parts if not part.refused]
    for name, planned in plan.nodes.items():
        if planned.node.recipe != plan.recipe.name or plan.store.manifest(planned.folder) is None:
            continue
        artifact = plan.store.open(planned.folder, name)
        card = planned.node.stage.student_card(artifact, table, [part for _, part in parts])
        if card is not None:
            return Student([artifact, *published], card)
    return None


def check_published(recipe: Recipe) -> None:
    """Says at the end of a run that nothing of what was asked for beside the student passed.

    Raises:
        UserError: all variants were made and none is published.
    """
    parts = [part for _, part in _parts(make_plan(recipe))]
    asked = recipe.export.variants if recipe.export else []
    if asked and len(parts) == len(asked) and all(part.refused for part in parts):
        raise UserError(
            f"{recipe.name}: none of the variants under export.variants passed export.gate; the "
            "student itself is made and kept. Lower the gate, or ask for other variants:\n"
            + "\n".join(part.refused for part in parts)
        )


def _parts(plan: Plan) -> list[tuple[Artifact, StudentPart]]:
    found = []
    for name, planned in plan.nodes.items():
        if planned.node.recipe != plan.recipe.name or plan.store.manifest(planned.folder) is None:
            continue
        artifact = plan.store.open(planned.folder, name)
        part = planned.node.stage.student_part(artifact)
        if part is not None:
            found.append((artifact, part))
    return found


def present_student(plan: Plan, student: Student | None) -> None:
    """`students/NAME`: links to the newest export's files, and the model card.

    Only on a local file system. The folder is swapped in whole: whoever loads it meanwhile has the
    old one.

    Raises:
        StorageError: it cannot be written.
        UserError: there is another folder in its place.
    """
    link = plan.store.root.local_path(f"students/{plan.recipe.name}")
    if link is not None and student is not None:
        with storage_errors(plan.store.root.uri):
            _lay_out(link, student)


def _lay_out(link: Path, student: Student) -> None:
    readme = link / "README.md"
    is_here = readme.is_file() and all(_points_to(link, one) for one in student.layers)
    if is_here and readme.read_text(encoding="utf-8") == student.card:
        return
    if link.exists() and not link.is_symlink():
        raise UserError(
            f"{link}: a copied folder or a file is where the student belongs, which is made and "
            "kept; move it away and run again"
        )
    target = link.with_name(f".{link.name}-{time.time_ns()}")
    for artifact in student.layers:
        source = artifact.folder_path("model")
        for file in sorted(path for path in source.rglob("*") if path.is_file()):
            place = target / file.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            if file.name != "README.md":
                place.symlink_to(os.path.relpath(file, place.parent))  # the storage may be moved
    (target / "README.md").write_text(student.card, encoding="utf-8")
    aside = link.with_name(f"{target.name}-link")
    aside.symlink_to(target.name)
    old = link.resolve() if link.is_symlink() else None
    aside.replace(link)
    if old is not None and old.parent == target.parent.resolve() and old.name != target.name:
        shutil.rmtree(old)


def _points_to(link: Path, artifact: Artifact) -> bool:
    """Whether the files of `artifact` are those in the folder; looks at no content."""
    names = [name.removeprefix("model/") for name in artifact.files if name.startswith("model/")]
    return all(
        (link / name).resolve() == artifact.local_path(f"model/{name}")
        for name in names
        if not name.endswith("README.md")
    )
