"""What main scores of MTEB's tasks are computed from, so that they have intervals and marks.

MTEB gives scores and, when asked, what its model predicted; gold is in the task's data. What comes
of both is taken only where its figure is MTEB's score.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from stages.evaluate.resampling import Items

TREC_EVAL = {
    "ndcg": "ndcg_cut", "map": "map_cut", "recall": "recall", "precision": "P",
    "hit_rate": "success",
}  # fmt: skip


def items_of(task: Any, found: Any, folder: Path) -> Items | None:
    """Items of the main score, which is of 1.

    None of several splits or subsets, and of a main score that is no figure of items: F1, runs of
    a clustering, folds of a cross-validation, a task's own.

    Args:
        task: with its data. found: MTEB's result of it. folder: MTEB's `prediction_folder`.
    """
    places = [(split, one) for split, several in found.scores.items() for one in several]
    if task.is_aggregate or len(places) != 1:
        return None
    ((split, scores),) = places
    sets = scores.get(f"{task.metadata.main_score}s")
    if isinstance(sets, list):  # of several clusterings, each of other texts
        return Items("mean", np.asarray(sets))
    subset, file = scores["hf_subset"], folder / task.prediction_file_name
    if not file.exists():
        return None
    predicted = json.loads(file.read_text())[subset][split]
    data = task.dataset.get(subset, task.dataset)[split]
    several = _possible(task, data, predicted)
    return next((items for items in several if is_of(items, found)), None)


def is_of(items: Items, found: Any) -> bool:
    """Whether their figure is MTEB's score, which is rounded to four digits or five."""
    return bool(abs(items.figure() - found.get_score()) < 1e-4)


def _possible(task: Any, data: Any, predicted: Any) -> Iterator[Items]:
    """By the kind of task: others call their main scores alike, of other data."""
    from mteb import abstasks as kinds

    measure = task.metadata.main_score
    name, _, most = measure.rpartition("_at_")
    if isinstance(task, kinds.AbsTaskSTS) and measure.endswith("spearman"):
        gold = np.asarray(data["score"], float)
        yield Items("spearman", np.stack([predicted["cosine_scores"], gold], 1))
    elif isinstance(task, kinds.AbsTaskPairClassification) and measure.endswith("_ap"):
        data = data[0] if len(data) == 1 else data  # as version 1 had it: all in a row
        labels = np.asarray(data[task.label_column_name], float)
        for kind, scores in predicted.items():  # max_ap: whichever is best
            sign = -1 if kind.endswith("distances") else 1
            yield Items("average precision", np.stack([sign * np.asarray(scores), labels], 1))
    elif isinstance(task, kinds.AbsTaskClassification) and measure == "accuracy":
        labels = data[task.label_column_name]
        several = isinstance(task, kinds.AbsTaskMultilabelClassification)
        if not several and {len(draw) for draw in predicted} == {len(labels)}:
            right_NE = (np.asarray(labels)[:, None] == np.asarray(predicted).T).astype(float)
            yield Items("mean of repetitions", right_NE)
    elif isinstance(task, kinds.AbsTaskRetrieval) and name in TREC_EVAL:
        yield Items("mean", _of_queries(task, data, predicted, f"{TREC_EVAL[name]}_{most}"))


def _of_queries(task: Any, data: Any, ranked: Any, measure: str) -> np.ndarray:
    """A measure of trec_eval of each query, as MTEB computes it, in the order of their ids."""
    import pytrec_eval

    if task.ignore_identical_ids:
        ranked = {
            query: {document: score for document, score in one.items() if document != query}
            for query, one in ranked.items()
        }
    name, _, most = measure.rpartition("_")
    evaluator = pytrec_eval.RelevanceEvaluator(data["relevant_docs"], {f"{name}.{most}"})
    found = evaluator.evaluate(ranked)
    return np.array([found[query][measure] for query in sorted(found)])
