"""Finished runs side by side, on the tests that they share."""

import json

from pipeline.report.differences import with_differences
from pipeline.report.figures import Results, read_results
from pipeline.store.artifacts import ArtifactStore
from pipeline.store.history import newest_record
from pipeline.upkeep.contents import key_of
from stages.contract import EncoderLabel, Figure, Measurement
from stages.errors import UserError
from stages.fingerprint import fingerprint


def compare_runs(names: list[str], storage: str) -> Results:
    """Rows of runs, and their differences to the first one's.

    Args:
        names: of recipes, for their students; NAME:before and NAME:TEACHER for their other rows.

    Raises:
        UserError: there is no such run or row, or they share no test.
    """
    if len(set(names)) < len(names):
        raise UserError(f"compare {' '.join(names)}: one of them is there twice; name each once")
    store = ArtifactStore(storage)
    rows = {name: _row(store, name) for name in names}
    shared = set.intersection(*(set(row) for row in rows.values()))
    if all(json.loads(test)[0] == "Size" for _, test in shared):
        tests = "; ".join(f"{name}: {', '.join(n for n, _ in row)}" for name, row in rows.items())
        raise UserError(
            f"compare {' '.join(names)}: they share no test with equal settings and data ({tests})"
            "; name tests for all of them: --on FILE"
        )
    measurements, sources = [], []
    for name, row in rows.items():
        label = EncoderLabel("teacher", name)
        for key, (figure, source) in row.items():
            if key in shared:
                measurements.append(Measurement(label, [figure]))
                sources.append(source)
    left_out = {name for row in rows.values() for name, test in row if (name, test) not in shared}
    notes = [f"Left out, as not all have them: {', '.join(sorted(left_out))}."] if left_out else []
    found = Results(measurements, notes, {}, sources)
    return with_differences(store, found)


def _row(store: ArtifactStore, name: str) -> dict[tuple[str, str], tuple[Figure, list[str]]]:
    """Figures and where they come from, by the figure's name and the test that gave it."""
    recipe, _, which = name.partition(":")
    record = newest_record(store.root, recipe, with_results=True)
    if record is None:
        known = ", ".join(store.root.list("history")) or "none"
        raise UserError(
            f"compare {name}: there is no finished run of '{recipe}' (recipes run here: {known}); "
            "for models without a recipe there is `sentray evaluate`"
        )
    results = read_results(store.root, record)
    if not results.sources:
        raise UserError(
            f"compare {name}: that run is of an older version, which did not keep what figures "
            "were computed from; run it again"
        )
    wanted = _label(results, name, which or "after")
    found: dict[tuple[str, str], tuple[Figure, list[str]]] = {}
    for measurement, source in zip(results.measurements, results.sources, strict=True):
        manifest = store.manifest(source[0])
        # speeds that were not measured side by side are not compared
        if measurement.encoder != wanted or manifest is None or "test" not in manifest.identity:
            continue
        # held-out sentences and pairs, teachers' factors; earlier versions did not say, so that
        # nothing of theirs is known to be the same but where a test reads files only
        reads = manifest.stats.get("reads", manifest.inputs)
        test = manifest.identity["test"]
        settings = manifest.stats.get("test") or fingerprint(test)  # once it was not kept
        about = [test["kind"], settings, manifest.identity["encoder.max_length"]]
        about += sorted(key_of(manifest.inputs[name]) for name in reads)
        for figure in measurement.figures:
            found[figure.name, json.dumps(about, sort_keys=True)] = figure, source
    return found


def _label(results: Results, name: str, which: str) -> EncoderLabel:
    if which == "after" and results.reference is not None:
        return results.reference
    for label in results.encoders:
        if which == label.name and label.role != "after" and not label.ranks:
            return label
    rows = [label.name for label in results.encoders if label.role != "after"]
    raise UserError(f"compare {name}: that run has no row '{which}'; it has {', '.join(rows)}")
