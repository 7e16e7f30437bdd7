"""The report page of a run: what it says, and that it needs nothing beside itself."""

import re
from html.parser import HTMLParser

import pytest

from pipeline.plan.plan import make_plan
from pipeline.report.figures import collect
from pipeline.report.html import figures_table
from pipeline.report.table import shown
from pipeline.run.runner import finish, record_start
from stages.recipe import Recipe
from tests.support.here import make_here
from tests.support.models import make_sentences
from tests.support.recipes import tiny

EMPTY = {"meta", "br", "path", "use", "rect", "image"}


class Reader(HTMLParser):
    """Text by heading, table cells, boxes of the lineage; every element must be closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.heading, self.texts, self.cells, self.boxes = [], "", {}, [], []
        self.links = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.links += [value for name, value in attributes if name in ("src", "href")]
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag in EMPTY:
            return
        if tag == "html" and self.open[-1:] != ["html"]:
            raise AssertionError(f"left open: {self.open}")
        assert self.open.pop() == tag
        if tag == "section":
            self.heading = ""

    def handle_data(self, data):
        if self.open[-1:] in (["h1"], ["h2"]):
            self.heading = data
        elif self.open[-1:] == ["td"]:
            self.cells.append(data)
        elif self.open[-2:] == ["g", "title"]:
            self.boxes.append(data)
        else:
            self.texts.setdefault(self.heading, []).append(data)


@pytest.fixture(scope="module")
def made(tmp_path_factory, teacher_folder, student_folder):
    """A plan with agreement, geometry and labels, and its page."""
    folder = tmp_path_factory.mktemp("page")
    raw = tiny(folder, teacher_folder, student_folder)
    text = folder / "sentences.txt"
    text.write_text(text.read_text().replace("\n", " <p> & more\n"))  # must be escaped
    raw["sentences"]["holdout"] = 60
    geometry = raw["evaluate"]["sts"][0] | {"positives_above": 0.5}
    labels = folder / "labels.tsv"
    rows = [f"{text}\t{text[0]}" for text in make_sentences(30, seed=5)]
    labels.write_text("\n".join(["text\tlabel", *rows]) + "\n")
    clustering = [{"name": "letters", "path": str(labels)}]
    raw["evaluate"] |= {"speed": False, "geometry": geometry, "clustering": clustering}
    recipe = Recipe.model_validate(raw)
    make_here(recipe)
    plan = make_plan(recipe)
    record = record_start(plan)
    finish(plan, record)
    return plan, plan.store.root.read(f"{record}/report.html").decode()


def test_it_is_whole_and_needs_nothing_else(made):
    page = Reader(made[1])
    assert page.open == []
    assert all(link.startswith("#") for link in page.links)
    assert not re.search(r"url\((?!#)|@import|<script", made[1])


def test_it_says_what_was_asked_and_gained(made):
    plan, page = made
    asked, gained = re.findall(r'<p class="asked">(.*?)</p>', page)
    assert asked == (
        "Asked: a student, trained on 240 sentences with infonce, consistency, listnet, taught by "
        "t."
    )
    results = collect(plan)
    before, teacher, after = map(results.figures, results.encoders)
    values = [
        f"{shown(one['made-up'])}{' with ' + shown(one['MB']) + ' MB' if one is not before else ''}"
        for one in (after, before, teacher)
    ]
    said = "Gained: made-up {}, from {} before training; t has {}."
    assert gained == said.format(*values)


def test_its_table_has_every_figure(made):
    plan, page = made
    cells, results = Reader(page).cells, collect(plan)
    for encoder in results.encoders:
        row = cells[cells.index(encoder.title) :]
        assert {shown(f) for f in results.figures(encoder).values()} <= {
            c.rstrip("* ") for c in row
        }


def test_its_lineage_has_every_artifact_once(made):
    plan, page = made
    boxes = [set(re.findall(r"^(\S+): ", box, re.M)) for box in Reader(page).boxes]
    lines = [line for box in Reader(page).boxes for line in box.splitlines()]
    assert sorted(lines) == sorted(f"{name}: {folder}" for name, folder in plan.folders.items())
    read = {  # a line from each box to each that reads something in it
        (one, other)
        for one, made in enumerate(boxes)
        for other, box in enumerate(boxes)
        if any(made & set(plan.graph[name].inputs.values()) for name in box)
    }
    section = page.partition("<h2>Where it comes from</h2>")[2].partition("</section>")[0]
    assert section.count("<path ") == len(read) > 5


def test_sentences_of_each_label_are_in_every_encoders_plane(made):
    plan, page = made
    picture = page.partition("<h2>Sentences in the plane</h2>")[2].partition("</section>")[0]
    told = set(re.findall(r"<text[^>]*>([^<]+)</text>", picture))
    assert {encoder.title for encoder in collect(plan).encoders} < told
    labels = {text[0] for text in make_sentences(30, seed=5)}
    assert len(labels) == 13 and len(labels & told) == 10
    assert "letters, labels left out as less frequent: 3" in told


def test_sts_is_told_by_subset(made):
    plan, page = made
    results = collect(plan)
    student = results.figures(results.reference)["made-up"]
    assert len(student.parts) > 1
    cells = Reader(page).cells
    for name, value in student.parts.items():
        row = cells.index(f"made-up, {name}")
        assert f"{value:.2f}" in cells[row : row + 1 + len(results.encoders)]


def test_a_tables_cells_are_text():
    page = Reader(figures_table([("", ["", "<p>"]), ("main", ["<p> & x", " 1* "]), ("", ["y"])]))
    assert page.cells == ["<p> & x", "1*", "y"] and page.open == []


def test_its_sentences_are_those_of_the_artifact(made):
    plan, page = made
    stats = plan.store.manifest(plan.folders["evaluate:after:agreement"]).stats
    before = plan.store.manifest(plan.folders["evaluate:before:agreement"]).stats
    texts = Reader(page).texts
    shown_texts = texts["Nearest sentences"]
    for one, other in zip(stats["neighbours"], before["neighbours"], strict=True):
        assert one["text"] == other["text"]
        expected = [one["text"], "teachers", *one["teachers"], "student before", *other["student"],
                    "student after", *one["student"]]  # fmt: skip
        starts = [place for place, text in enumerate(shown_texts) if text == one["text"]]
        assert expected in [shown_texts[start : start + len(expected)] for start in starts]
    apart = texts["Where student and teachers disagree most"]
    assert {text for pair in stats["disagreements"] for text in pair["texts"]} <= set(apart)
