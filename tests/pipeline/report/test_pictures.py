"""Pictures of the report page: what they are drawn of."""

import itertools
import json
from types import SimpleNamespace

import numpy as np

from pipeline.report import pictures
from pipeline.report.figures import Results
from stages.contract import EncoderLabel, Figure, Measurement
from stages.evaluate.clustering import PLANE
from stages.evaluate.resampling import Items
from stages.plain import shortened

AFTER, TEACHER = EncoderLabel("after", "after"), EncoderLabel("teacher", "t")


def drawn(monkeypatch, module=pictures):
    """What is saved, as figures."""
    found = []
    monkeypatch.setattr(module, "svg_text", lambda figure: found.append(figure) or "<svg>")
    return found


def test_similarities_stand_in_groups_of_gold_score(monkeypatch):
    """Medians of the violins, against the rows of each fifth of the scores."""
    random = np.random.default_rng(0)
    gold = random.uniform(0, 5, 200)
    values = {
        AFTER: np.stack([gold / 5 + 0.1 * random.standard_normal(200), gold], 1),
        TEACHER: np.stack([random.random(200), gold], 1),
    }
    items = {label: {"A": [Items("spearman", x)], "MRR": [Items("mean", x[:, 0])]}
             for label, x in values.items()}  # fmt: skip
    monkeypatch.setattr(pictures, "items_of", lambda *_: items)
    figures = drawn(monkeypatch)
    results = Results([Measurement(label, [Figure("A", 1.0)]) for label in items], [], {})
    assert pictures.by_gold_score(None, results) == "<svg>"
    (axes,) = figures[0].axes
    edges = np.linspace(gold.min(), gold.max(), 6)
    names = [text.get_text() for text in axes.get_xticklabels()]
    assert names[0] == f"{edges[0]:.3g} to {edges[1]:.3g}" and len(names) == 5
    lines = [c for c in axes.collections if hasattr(c, "get_segments")]
    medians = [line.get_segments()[0][0, 1] for line in lines]
    expected = []
    for label in (TEACHER, AFTER):  # the table's order
        for low, high in itertools.pairwise(edges):
            rows = (gold >= low) & ((gold < high) | (high == edges[-1]))
            expected.append(np.median(values[label][rows, 0]))
    np.testing.assert_allclose(medians, expected)


def test_agreement_is_drawn_by_band(monkeypatch):
    parts = {"nearest 1%": 10.0, "next 9%": 20.0, "other 90%": 30.0, "teacher t": 5.0}
    figures = drawn(monkeypatch)
    results = Results([Measurement(AFTER, [Figure("agreement", 40.0, parts=parts)])], [], {})
    assert pictures.by_band(results) == "<svg>"
    heights = [bar.get_height() for bar in figures[0].axes[0].patches]
    assert heights == [10.0, 20.0, 30.0]


def test_alignment_is_drawn_against_uniformity(monkeypatch):
    cut = EncoderLabel("after", "after", dimensions=8)
    both = [Figure("alignment", 0.3), Figure("uniformity", -2.0)]
    figures = drawn(monkeypatch)
    measured = [Measurement(AFTER, both), Measurement(TEACHER, both[:1]), Measurement(cut, both)]
    assert pictures.by_geometry(Results(measured, [], {})) == "<svg>"
    (axes,) = figures[0].axes
    assert [c.get_offsets().tolist() for c in axes.collections] == [[[-2.0, 0.3]]]
    assert [text.get_text() for text in axes.texts] == ["student after"]


def test_labels_are_drawn_in_each_encoders_plane(monkeypatch, tmp_path):
    """Encoders in the table's order, four in two rows; not the student's variants, nor what kept
    none."""
    figures, folders, measured = drawn(monkeypatch), {}, []
    variant, before = EncoderLabel("after", "after", variant="x"), EncoderLabel("before", "before")
    other, cut = EncoderLabel("teacher", "u"), EncoderLabel("after", "after", dimensions=8)
    for label in (AFTER, variant, TEACHER, other, before, cut):
        plane = {"names": ["a", "b"], "points": [[1, 2, 0], [3, len(folders), 1], [5, 6, 0]],
                 "share": 40.0, "num_labels": 5}  # fmt: skip
        file = tmp_path / f"{len(folders)}.json"
        file.write_text(json.dumps(plane))
        folders[file.name] = SimpleNamespace(files=[PLANE], file_path=lambda _, file=file: file)
        measured.append(Measurement(label, [Figure("V set", 1.0)]))
    folders["none"] = SimpleNamespace(files=[])
    measured.append(Measurement(AFTER, [Figure("STS", 1.0)]))
    store = SimpleNamespace(open=folders.__getitem__)
    sources = [[folder, "none"] for folder in folders]  # of two seeds
    results = Results(measured, [], {}, sources)
    assert pictures.in_planes(store, results) == "<svg>"
    axes = figures[0].axes
    titles = [one.get_title().partition("\n")[0] for one in axes]
    assert titles == [label.title for label in (before, TEACHER, other, AFTER)]
    for one, number in zip(axes, (4, 2, 3, 0), strict=True):
        points = [c.get_offsets().tolist() for c in one.collections]
        assert points == [[[1, 2], [5, 6]], [[3, number]]]
    assert figures[0].get_suptitle() == "set, labels left out as less frequent: 3"
    (legend,) = figures[0].legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b"]


def test_long_labels_have_room_below_their_plane(monkeypatch):
    """Ten of them, one of which matplotlib would leave out; and the encoder's name is folded."""
    figures = drawn(monkeypatch)
    names = [f"_label of forty characters in all, no. {number}" for number in range(10)]
    plane = {"names": names, "points": [[number, 1, number] for number in range(10)],
             "share": 1.0, "num_labels": 10}  # fmt: skip
    label = EncoderLabel("teacher", "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2")
    pictures._planes("set", {label: plane})
    (figure,) = figures
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [shortened(x, 32) for x in names]
    for part in (legend, figure.axes[0].title):
        box = part.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1


def test_nothing_is_drawn_of_nothing(monkeypatch):
    monkeypatch.setattr(pictures, "items_of", lambda *_: {})
    assert pictures.pictures(None, Results([], [], {})) == []


def test_the_path_of_alignment_and_uniformity_is_by_step(monkeypatch):
    from pipeline.report import page

    figures = drawn(monkeypatch, page)
    rows = [{"step": step, "loss": 1.0} for step in range(1, 5)]
    assert page._paths(rows) == ""
    for row in rows[1::2]:
        row |= {"uniformity/dev": -row["step"] / 2, "alignment/dev": 1 / row["step"]}
    assert page._paths(rows) == "<svg>"
    (points,) = figures[0].axes[0].collections
    assert points.get_offsets().tolist() == [[-1.0, 0.5], [-2.0, 0.25]]
    assert points.get_array().tolist() == [2, 4]


def test_a_plug_ins_curve_may_lack_speeds():
    from pipeline.report.page import _curves

    rows = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]
    assert _curves(rows).startswith("<svg")
    assert _curves([row | {"tokens_per_second": 10.0} for row in rows]).startswith("<svg")
