"""What a run has measured: typed figures of encoders, read alike by tables, pages and searches.

A stage that measures publishes `stages.contract.measured(...)`; which stage that is does not matter
here.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pipeline.plan.plan import Plan
from pipeline.store.artifacts import ArtifactStore
from stages.contract import EncoderLabel, Figure, Measurement

ORDER = {"before": 0, "teacher": 1, "after": 2}


@dataclass(frozen=True)
class Results:
    """The figures of a run.

    measurements: in the graph's order; several may be of one encoder.
    notes: what they mean, each once. artifacts: folders of all nodes, by node. advice: what would
        probably help next, as this run's figures have it (pipeline/report/advice.py).
    """

    measurements: list[Measurement]
    notes: list[str]
    artifacts: dict[str, str]
    advice: str = ""

    @property
    def complete(self) -> bool:
        """Whether the student has been evaluated."""
        return any(one.encoder.role == "after" for one in self.measurements)

    @property
    def encoders(self) -> list[EncoderLabel]:
        """Before, teachers, after; each followed by itself with ranks, the student by itself with a
        teacher's documents, by its variants and by its cut vectors. After --only some may miss."""
        found = list(dict.fromkeys(one.encoder for one in self.measurements))
        places = {label: place for place, label in enumerate(found)}
        first = {name: place for place, name in enumerate(dict.fromkeys(x.name for x in found))}

        def order(x: EncoderLabel) -> tuple[Any, ...]:
            other = bool(x.variant), x.documents, -x.dimensions, x.ranks
            return ORDER[x.role], first[x.name], x.dimensions > 0, *other, places[x]

        return sorted(found, key=order)

    @property
    def columns(self) -> list[str]:
        """Names of all figures, in the order in which the recipe asks for them."""
        return list(dict.fromkeys(f.name for one in self.measurements for f in one.figures))

    def figures(self, encoder: EncoderLabel) -> dict[str, Figure]:
        """An encoder's figures by name."""
        return {
            figure.name: figure
            for one in self.measurements
            if one.encoder == encoder
            for figure in one.figures
        }

    @property
    def student(self) -> dict[str, Figure]:
        """Figures of the trained student, with ranks where it is used with them."""
        after = [label for label in self.encoders if label.role == "after"]
        return self.figures(after[0]) if after else {}

    def json(self) -> str:
        """`results.json`."""
        whole = {
            "measurements": [one.plain() for one in self.measurements],
            "notes": self.notes,
            "artifacts": self.artifacts,
            "advice": self.advice,
        }
        return json.dumps(whole, indent=1)

    @staticmethod
    def read(raw: dict[str, Any]) -> "Results":
        measurements = [Measurement.read(one) for one in raw["measurements"]]
        advice = raw.get("advice", "")  # older runs have none
        return Results(measurements, raw["notes"], raw["artifacts"], advice)


def collect(plan: Plan) -> Results:
    """What the published artifacts of a plan have measured."""
    return collect_from(plan.store, plan.folders)


def collect_from(store: ArtifactStore, folders: dict[str, str]) -> Results:
    """What the published ones of these artifacts (folders by node) have measured."""
    measurements: list[Measurement] = []
    notes: dict[str, None] = {}
    for folder in folders.values():
        manifest = store.manifest(folder)
        if manifest is None or "measured" not in manifest.stats:
            continue
        measurements += [Measurement.read(one) for one in manifest.stats["measured"]]
        notes |= dict.fromkeys(manifest.stats["notes"])
    return Results(measurements, list(notes), folders)


def averages(figures: Iterable[Figure]) -> dict[str, float]:
    """Means over the figures that ask for one, where there is more than one, by heading."""
    groups: dict[str, list[float]] = {}
    for figure in figures:
        if figure.averaged:
            groups.setdefault(figure.averaged, []).append(figure.value)
    return {name: sum(v) / len(v) for name, v in groups.items() if len(v) > 1}
