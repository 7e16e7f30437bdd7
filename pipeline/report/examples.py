"""Sentences to look at on the page: neighbours under teachers and student, and pairs apart."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.report.figures import Results
from pipeline.store.artifacts import ArtifactStore

SIDES = {"teachers": "the teachers", "student": "the student"}


def examples(store: ArtifactStore, results: Results) -> Sequence[tuple[str, str]]:
    """Headings and HTML, where the student's agreement with teachers was measured."""
    stats: dict[str, Mapping[str, Any]] = {
        label.role: manifest.stats
        for one, folders in zip(results.measurements, results.sources, strict=True)
        if (label := one.encoder).is_student or label.role == "before"
        if (manifest := store.manifest(folders[0])) and "neighbours" in manifest.stats
    }
    if "after" not in stats:
        return []
    found = [("Nearest sentences", _neighbours(stats))]
    if apart := stats["after"]["disagreements"]:
        found.append(("Where student and teachers disagree most", _disagreements(apart)))
    return found


def _neighbours(stats: Mapping[str, Mapping[str, Any]]) -> str:
    """The same sentences with their neighbours side by side."""
    parts = []
    for number, one in enumerate(stats["after"]["neighbours"]):
        sides = {"teachers": one["teachers"]}
        if "before" in stats:
            sides["student before"] = stats["before"]["neighbours"][number]["student"]
        sides["student after"] = one["student"]
        lists = "".join(
            f"<div><h4>{name}</h4>{_ordered(texts, one['teachers'])}</div>"
            for name, texts in sides.items()
        )
        text = html.escape(one["text"])
        parts.append(f'<div class="texts"><b>{text}</b><div class="grid">{lists}</div></div>')
    note = "Of the sentences kept from training, the first few; a coloured number is a sentence "
    return f'<p class="quiet">{note}that the teachers name too.</p>{"".join(parts)}'


def _ordered(texts: Sequence[str], same: Sequence[str]) -> str:
    marks = (' class="same"' if text in same else "" for text in texts)
    items = (f"<li{mark}>{html.escape(text)}</li>" for mark, text in zip(marks, texts, strict=True))
    return f"<ol>{''.join(items)}</ol>"


def _disagreements(pairs: Sequence[Mapping[str, Any]]) -> str:
    parts = []
    for pair in pairs:
        texts = "<br>".join(html.escape(text) for text in pair["texts"])
        places = ", ".join(f"{pair[name]:.3g}% for {who}" for name, who in SIDES.items())
        parts.append(
            f'<div class="texts">{texts}<div class="quiet">Nearer pairs: {places}</div></div>'
        )
    note = "First pairs that the teachers hold near, then those that the student does."
    return f'<p class="quiet">{note}</p>{"".join(parts)}'
