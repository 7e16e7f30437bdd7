"""What a run has measured: typed figures of encoders, read alike by tables, pages and searches.

A stage that measures publishes `stages.contract.measured(...)`; which stage that is does not matter
here.
"""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.plan.graph import Node
from pipeline.plan.plan import Plan
from pipeline.store.artifacts import ArtifactStore
from pipeline.store.history import newest_record
from stages.contract import EncoderLabel, Figure, Measurement
from stages.files import Root, understood

ORDER = {"baseline": 0, "before": 1, "teacher": 2, "after": 3}


@dataclass(frozen=True)
class Results:
    """The figures of a run.

    measurements: in the graph's order; several may be of one encoder.
    notes: what they mean, each once. artifacts: folders of all nodes, by node. sources: folders
        of each measurement, one for each seed; none of older runs. advice: what would
        probably help next, as this run's figures have it (pipeline/report/advice.py).
    differences: of other encoders' figures to the reference's, and means: of its own, both
        with 95% intervals (pipeline/report/differences.py).
    """

    measurements: list[Measurement]
    notes: list[str]
    artifacts: dict[str, str]
    sources: list[list[str]] = field(default_factory=list)
    advice: str = ""
    differences: list[Measurement] = field(default_factory=list)
    means: list[Measurement] = field(default_factory=list)

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
    def reference(self) -> EncoderLabel | None:
        """Whom all others are compared with: the trained student, else the first encoder that is no
        baseline."""
        after = [label for label in self.encoders if label.role == "after"]
        others = [label for label in self.encoders if label.role != "baseline"]
        return next(iter([*after, *others, *self.encoders]), None)

    @property
    def student(self) -> dict[str, Figure]:
        """Figures of the trained student."""
        label = self.reference
        return self.figures(label) if label and label.role == "after" else {}

    def json(self) -> str:
        """`results.json`."""
        whole = {
            "measurements": [one.plain() for one in self.measurements],
            "notes": self.notes,
            "artifacts": self.artifacts,
            "sources": self.sources,
            "advice": self.advice,
            "differences": [one.plain() for one in self.differences],
            "means": [one.plain() for one in self.means],
        }
        return json.dumps(whole, indent=1, allow_nan=False)

    @staticmethod
    def read(raw: dict[str, Any]) -> "Results":
        measurements = [Measurement.read(one) for one in raw["measurements"]]
        known = {name: raw[name] for name in ("sources", "advice") if name in raw}
        differences = [Measurement.read(one) for one in raw.get("differences", [])]
        means = [Measurement.read(one) for one in raw.get("means", [])]
        return Results(
            measurements, raw["notes"], raw["artifacts"], **known,
            differences=differences, means=means,
        )  # fmt: skip


def read_results(root: Root, record: str) -> Results:
    """What a run wrote at its end into its record.

    Raises:
        StorageError: the file is damaged, or of a version with other figures.
    """
    name = f"{record}/results.json"
    with understood(root.shown(name)):
        return Results.read(json.loads(root.read(name)))


def told(plan: Plan) -> tuple[Results, str | None]:
    """What the newest run with a plan's artifacts told at its end, and its record; without one
    what these have measured."""
    results = collect(plan)
    record = newest_record(plan.store.root, plan.recipe.name, plan.folders)
    if results.complete and record is not None:
        results = read_results(plan.store.root, record)
    return results, record


def collect(plan: Plan) -> Results:
    """What the published artifacts of a plan have measured."""
    return collect_from(plan.store, plan.graph, plan.folders)


def collect_from(
    store: ArtifactStore, nodes: Mapping[str, Node], folders: Mapping[str, str]
) -> Results:
    """What the published ones of these nodes' artifacts have measured.

    An artifact may have been made for another row: the node says whose figures they are.
    """
    found: dict[tuple[Any, ...], list[tuple[Measurement, str]]] = {}
    notes: dict[str, None] = {}
    for name, node in nodes.items():
        manifest = store.manifest(folders[name])
        if manifest is None or "measured" not in manifest.stats:
            continue
        for raw in manifest.stats["measured"]:
            one = Measurement.read(raw)
            label = node.stage.measures or one.encoder
            # the same test of every seed is one measurement
            names = tuple(figure.name for figure in one.figures)
            key = (name, label) if label.seed is None else (replace(label, seed=None), names)
            found.setdefault(key, []).append((replace(one, encoder=label), folders[name]))
        notes |= dict.fromkeys(manifest.stats["notes"])
    measurements = [mean_over_seeds([one for one, _ in several]) for several in found.values()]
    sources = [[folder for _, folder in several] for several in found.values()]
    seeds = dict.fromkeys(one.encoder.seed for several in found.values() for one, _ in several)
    seeds.pop(None, None)
    if seeds:
        named, first = ", ".join(map(str, seeds)), next(iter(seeds))
        notes[f"student after: mean and standard deviation of seeds {named}; all else of the "
              f"student is seed {first}'s."] = None  # fmt: skip
    for several in found.values():
        own = [one.encoder.seed for one, _ in several if one.encoder.seed is not None]
        if 0 < len(own) < len(seeds):
            named = ", ".join(figure.name for figure in several[0][0].figures)
            notes[f"{named}: only of seed {', '.join(map(str, own))}."] = None
    return Results(measurements, list(notes), dict(folders), sources)


def mean_over_seeds(several: Sequence[Measurement]) -> Measurement:
    """One measurement of several that differ in their seed.

    An interval is the mean of theirs, which is about items, not about seeds.
    """
    label = replace(several[0].encoder, seed=None)
    if len(several) == 1:
        return replace(several[0], encoder=label)
    figures = []
    for same in zip(*(one.figures for one in several), strict=True):
        values = [figure.value for figure in same]
        limits = [figure.interval for figure in same if figure.interval]
        low_high = tuple(map(statistics.fmean, zip(*limits, strict=True)))
        figures.append(
            replace(
                same[0],
                value=statistics.fmean(values),
                interval=(low_high[0], low_high[1]) if len(limits) == len(same) else None,
                by_seed=values,
                parts={
                    name: statistics.fmean(figure.parts[name] for figure in same)
                    for name in same[0].parts
                },
            )
        )
    return Measurement(label, figures)


def averages(figures: Iterable[Figure]) -> dict[str, Figure]:
    """Means over the figures that ask for one, where there is more than one, by heading; by seed
    where all have the same number of seeds."""
    groups: dict[str, list[Figure]] = {}
    for figure in figures:
        if figure.averaged:
            groups.setdefault(figure.averaged, []).append(figure)
    found = {}
    for name, several in groups.items():
        if len(several) > 1:
            seeds = [one.by_seed for one in several]
            alike = len({len(values) for values in seeds}) == 1
            by_seed = [statistics.fmean(one) for one in zip(*seeds, strict=True)] if alike else []
            value = statistics.fmean(one.value for one in several)
            found[name] = Figure(name, value, by_seed=by_seed)
    return found
