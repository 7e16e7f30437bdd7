"""Items of MTEB's main scores: tasks of every kind whose data are here, none needs the hub."""

import importlib
from dataclasses import replace

import numpy as np
import pytest

from stages.evaluate.mteb_tasks import MtebTest
from tests.support.models import make_sentences
from tests.support.pipelines import make_pipeline, pooling
from tests.support.tested import SILENT, encoder_of

mteb = pytest.importorskip("mteb")
TASKS = importlib.import_module("mteb.get_tasks")._TASKS_REGISTRY
TEXTS = make_sentences(120)


def sts():
    return {
        "sentence1": TEXTS[:60],
        "sentence2": TEXTS[60:],
        "score": np.random.default_rng(0).random(60).tolist(),
    }


def pairs():
    return {
        "sentence1": TEXTS[:60], "sentence2": TEXTS[60:],
        "labels": np.random.default_rng(0).integers(0, 2, 60).tolist(),
    }  # fmt: skip


def clusters():
    return {"sentences": TEXTS, "labels": [len(text.split()) % 3 for text in TEXTS]}


def sets_of_clusters():
    labels = [len(text.split()) % 3 for text in TEXTS]
    return {
        "sentences": [TEXTS[:40], TEXTS[40:80], TEXTS[80:]],
        "labels": [labels[:40], labels[40:80], labels[80:]],
    }


def queries():
    """Each has two relevant documents, of which one gives more; one query is a document, too, and
    its own first answer."""
    from datasets import Dataset

    asked = ["d3", *(f"q{number}" for number in range(1, 30))]
    relevant = {
        query: {f"d{number}": 1, f"d{(number + 7) % 90}": 2} for number, query in enumerate(asked)
    }
    relevant["d3"]["d3"] = 1
    return {
        "corpus": Dataset.from_dict(
            {"id": [f"d{number}" for number in range(90)], "title": [""] * 90, "text": TEXTS[:90]}
        ),
        "queries": Dataset.from_dict({"id": asked, "text": [TEXTS[3], *TEXTS[91:120]]}),
        "relevant_docs": relevant,
        "top_ranked": None,
    }


def candidates():
    found = queries()
    shown = {
        query: [
            *relevant,
            *(f"d{number}" for number in np.random.default_rng(0).choice(90, 20, replace=False)),
        ]
        for query, relevant in found["relevant_docs"].items()
    }
    return found | {"top_ranked": shown}


def summaries():
    return {
        "text": TEXTS[:8],
        "human_summaries": [TEXTS[8 + row : 10 + row] for row in range(8)],
        "machine_summaries": [TEXTS[20 + 4 * row : 24 + 4 * row] for row in range(8)],
        "relevance": [np.random.default_rng(row).random(4).tolist() for row in range(8)],
    }


def of_many_labels():
    labels = [[len(text.split()) % 3, 3][: 1 + row % 2] for row, text in enumerate(TEXTS[:60])]
    return {"text": TEXTS[:60], "label": labels}


KINDS = {  # their own class, type, main score and data
    "AbsTaskSTS": ("STS", "cosine_spearman", sts),
    "AbsTaskPairClassification": ("PairClassification", "max_ap", pairs),
    "AbsTaskRetrieval": ("Retrieval", "ndcg_at_10", queries),
    "AbsTaskRetrieval recall": ("Retrieval", "recall_at_5", queries),
    "AbsTaskRetrieval hits": ("Retrieval", "hit_rate_at_3", queries),
    "AbsTaskRetrieval precision, identical left out": ("Retrieval", "precision_at_3", queries),
    "AbsTaskRetrieval reranking": ("Reranking", "map_at_1000", candidates),
    "AbsTaskClusteringLegacy": ("Clustering", "v_measure", sets_of_clusters),
    "AbsTaskClustering": ("Clustering", "v_measure", clusters),
    "AbsTaskSummarization": ("Summarization", "cosine_spearman", summaries),
    "AbsTaskMultilabelClassification": ("MultilabelClassification", "accuracy", of_many_labels),
}
NO_ITEMS = {"AbsTaskClustering", "AbsTaskSummarization", "AbsTaskMultilabelClassification"}


@pytest.fixture
def task(request, monkeypatch):
    """The name of a task of a kind."""
    import mteb.abstasks as kinds
    from datasets import Dataset
    from mteb.abstasks.task_metadata import TaskMetadata

    base = getattr(kinds, request.param.split()[0])
    kind, main_score, make = KINDS[request.param]

    class Local(base):
        ignore_identical_ids = request.param.endswith("left out")
        min_score, max_score = 0, 1
        metadata = TaskMetadata(
            name="Local", description="made up", type=kind, main_score=main_score,
            dataset={"path": "nobody/nothing", "revision": "1"}, eval_langs=["eng-Latn"],
        )  # fmt: skip

        def load_data(self, **_):
            data = make()
            is_table = "corpus" not in data
            table = Dataset.from_dict(data) if is_table else data
            of_split = {"train": table, "test": table}
            self.dataset = of_split if is_table else {"default": of_split}
            self.data_loaded = True

    monkeypatch.setitem(TASKS, "Local", Local)
    return "Local"


@pytest.mark.parametrize("task", sorted(set(KINDS) - NO_ITEMS), indirect=True)
def test_a_score_of_items_has_an_interval_and_its_items(task, tmp_path):
    """With MTEB's cache, too, whether it was there or not."""
    model = make_pipeline(tmp_path, pooling("mean"))
    tested = replace(encoder_of(model), known_as=("sentray/mine", "1"))
    first, plain, again = (
        MtebTest(task=task, cache=cache).score(tested, SILENT)
        for cache in (str(tmp_path / "cache"), None, str(tmp_path / "cache"))
    )
    (figure,) = first.figures
    low, high = figure.interval
    assert low < figure.value < high and high - low < 60
    assert 100 * first.items[task].figure() == pytest.approx(figure.value, abs=1e-2)
    for other in (plain, again):
        assert other.figures[0].interval == pytest.approx(figure.interval)
        assert other.items[task].values == pytest.approx(first.items[task].values)


@pytest.mark.parametrize("task", ["AbsTaskClustering"], indirect=True)
def test_a_clustering_has_the_range_of_its_runs(task, tmp_path):
    model = make_pipeline(tmp_path, pooling("mean"))
    result = MtebTest(task=task).score(encoder_of(model), SILENT)
    low, high = result.figures[0].interval
    assert low < result.figures[0].value < high
    assert not result.items


@pytest.mark.parametrize("task", sorted(NO_ITEMS - {"AbsTaskClustering"}), indirect=True)
def test_a_score_of_no_items_is_a_figure_all_the_same(task, tmp_path):
    """Although its main score is called as that of a task with items."""
    model = make_pipeline(tmp_path, pooling("mean"))
    result = MtebTest(task=task).score(encoder_of(model), SILENT)
    assert np.isfinite(result.figures[0].value) and not result.items


@pytest.mark.parametrize("task", ["AbsTaskSTS"], indirect=True)
@pytest.mark.parametrize(
    "kept",
    [
        '{"statistic": "mean", "values": [0.9, 0.8]}',
        '{"statis',
        "[]",
        '{"statistic": "x", "values": []}',
        None,
    ],
)
def test_items_that_are_not_those_of_the_score_are_left_out(task, tmp_path, kept):
    """Another result's, cut ones, and those of a cache that MTEB's own tools have filled."""
    tested = replace(
        encoder_of(make_pipeline(tmp_path, pooling("mean"))), known_as=("sentray/mine", "1")
    )
    test = MtebTest(task=task, cache=str(tmp_path / "cache"))
    (first,) = test.score(tested, SILENT).figures
    (file,) = (tmp_path / "cache").glob("results/sentray__mine/1/Local.items")
    file.write_text(kept) if kept else file.unlink()
    again = test.score(tested, SILENT)
    assert again.figures[0].value == pytest.approx(first.value, abs=1e-2)
    assert again.figures[0].interval is None and not again.items
