"""Is a row of the table really above another? Paired bootstrap over the same items."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from pipeline.report.figures import Results, averages
from pipeline.store.artifacts import ArtifactStore
from stages.contract import EncoderLabel, Figure, Measurement
from stages.evaluate.resampling import Items, interval, read_items

# Items of a figure, for each seed
Several = Sequence[Items]


def with_differences(store: ArtifactStore, results: Results) -> Results:
    """The results with the differences of all rows to the reference, and its means' intervals."""
    items, reference = items_of(store, results), results.reference
    if reference is None or reference not in items:
        return results
    figures = {label: list(results.figures(label).values()) for label in items}
    drawn = resampled_of(items[reference])
    apart = differences(figures, items, reference, drawn)
    means = Measurement(reference, means_of(figures[reference], drawn))
    return replace(results, differences=apart, means=[means])


def items_of(store: ArtifactStore, results: Results) -> dict[EncoderLabel, dict[str, Several]]:
    """What the figures of each encoder were computed from, where that was kept."""
    items: dict[EncoderLabel, dict[str, list[Items]]] = {}
    measured = zip(results.measurements, results.sources, strict=True)
    # each folder once: several measurements may be of one
    for label, folder in dict.fromkeys(
        (m.encoder, one) for m, several in measured for one in several
    ):
        for name, one in read_items(store.open(folder)).items():
            items.setdefault(label, {}).setdefault(name, []).append(one)
    return {label: dict(known) for label, known in items.items()}


def resampled_of(items: Mapping[str, Several]) -> dict[str, np.ndarray]:
    """Figures of items drawn anew, by name: (R,), unscaled."""
    return {name: _resampled(several) for name, several in items.items()}


def means_of(figures: Sequence[Figure], drawn: Mapping[str, np.ndarray]) -> list[Figure]:
    """Means over an encoder's figures with 95% intervals, where all were drawn anew."""
    found = []
    for name, mean in averages(figures).items():
        several = [figure for figure in figures if figure.averaged == name]
        if all(figure.name in drawn for figure in several):
            each = [
                (100 if figure.percent else 1) * _shuffled(drawn[figure.name], number)
                for number, figure in enumerate(several)
            ]
            found.append(replace(mean, interval=interval(np.mean(each, axis=0))))
    return found


def differences(
    figures: Mapping[EncoderLabel, Sequence[Figure]],
    items: Mapping[EncoderLabel, Mapping[str, Several]],
    reference: EncoderLabel,
    drawn: Mapping[str, np.ndarray],
) -> list[Measurement]:
    """Figures of every other encoder less the reference's, and means, with 95% intervals.

    Only of figures whose items are known on both sides and are equally many.

    Args:
        drawn: `resampled_of` the reference's.
    """
    base = {figure.name: figure for figure in figures[reference]}
    found = []
    for label in items:
        if label == reference:
            continue
        resampled, rows = items[label], []
        of_mean: dict[str, list[tuple[float, np.ndarray]]] = {}
        for figure in figures[label]:
            name = figure.name
            if not _comparable(name, resampled, items[reference]) or name not in base:
                continue
            apart = _resampled(resampled[name]) - drawn[name]
            if figure.percent:
                apart = 100 * apart
            value = figure.value - base[name].value
            limits = interval(apart)
            rows.append(Figure(name, value, figure.better, limits, decimals=figure.decimals))
            if figure.averaged:
                of_mean.setdefault(figure.averaged, []).append((value, apart))
        for name, several in of_mean.items():
            # of all that the table's mean is of; items of different tests are drawn alone
            sizes = {sum(f.averaged == name for f in figures[one]) for one in (label, reference)}
            if len(several) > 1 and sizes == {len(several)}:
                value = float(np.mean([value for value, _ in several]))
                apart = np.mean([_shuffled(one, n) for n, (_, one) in enumerate(several)], axis=0)
                rows.append(Figure(name, value, interval=interval(apart)))
        if rows:
            found.append(Measurement(label, rows))
    return found


def _comparable(name: str, one: Mapping[str, Several], other: Mapping[str, Several]) -> bool:
    if name not in one or name not in other:
        return False
    kinds = {(x.statistic, len(x.values)) for several in (one, other) for x in several[name]}
    return len(kinds) == 1


def _resampled(several: Several) -> np.ndarray:
    """Resampled figures, means over the seeds: of the same items for each."""
    return np.mean([one.resampled() for one in several], axis=0)


def _shuffled(figures_R: np.ndarray, number: int) -> np.ndarray:
    """In another order, so that tests of equally many items do not have the same draws together."""
    return np.random.default_rng(number).permutation(figures_R)


def is_clear(difference: Figure) -> bool:
    """Whether its interval is without 0."""
    low, high = difference.interval or (float("nan"), float("nan"))
    return low > 0 or high < 0
