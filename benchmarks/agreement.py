"""How well agreement with the teacher on held-out sentences, which needs no label, predicts STS.

    SENTRAY_DATA=/path/to/data python benchmarks/agreement.py

Students of different quality: three of the nine trials of ten methods of student_quality.py, at
three values of the method's own setting or, where it has none, at three learning rates; with layers
0, 1, 2; 0, 2, 5 and 0, 5 by turns. Recipe and data are its too; besides, 1,000 of the
sentences are held out. Prints each student's figures, then the rank correlation (Spearman) over
students of each measure of agreement with the mean of the four STS test sets, and with STS-B dev;
the same for STS-B dev itself and for the loss's stand-in, the mean cosine to the teacher's vectors;
and all of it again without SimCSE's students, which have no teacher. Students that are there
already (--kept) are not trained again.
"""

import argparse
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from student_quality import (
    METHODS,
    RECIPE,
    Figures,
    Kept,
    Trial,
    one_thread_each,
    parsed,
    prepared,
    spearmans,
    student_of,
)

from pipeline.plan.plan import Plan, make_plan
from pipeline.recipe.read import load_recipe
from stages.evaluate.agreement import score_agreement
from stages.evaluate.sts import spearman
from stages.rows import FactorRows
from stages.sentences.texts import texts_of_rows

LAYERS = ["[0, 1, 2]", "3", "2"]
# By method, which of its trials
CHOSEN = {
    "SimCSE": (3, 4, 5),
    "RankCSE, ListNet": (1, 4, 7),
    "RankCSE, ListMLE": (1, 4, 7),
    "similarities": (2, 5, 7),
    "order of similarities": (1, 4, 7),
    "vectors": (2, 5, 7),
    "vectors, projected": (2, 5, 7),
    "vectors + similarities": (1, 4, 7),
    "vectors + order": (1, 4, 7),
    "vectors + ListNet": (1, 4, 7),
}
NUM_HELD = 1000
LABELLED = "mean", "STS-B dev"
# Means that the better students exceed
GOOD = (76.0, 78.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    options = parsed(parser, "benchmarks/agreement.jsonl")
    shared = [*prepared(options.steps, options.batch_size, options.storage),
              f"sentences.holdout={NUM_HELD}"]  # fmt: skip
    tried = [
        (trial, LAYERS[(number + number // 3) % 3])
        for number, trial in enumerate(METHODS[name][i] for name in CHOSEN for i in CHOSEN[name])
    ]
    students = []
    with one_thread_each(options.processes) as pool:
        for one, found in zip(
            tried, pool.map(partial(student, options.kept, shared), tried), strict=True
        ):
            students.append(found)
            told = "  ".join(f"{name} {value:.2f}" for name, value in found.items())
            print(f"{one}: {told}", flush=True)
    table(students)
    table(students[len(CHOSEN["SimCSE"]) :])  # those with a teacher
    for least in GOOD:
        table([one for one in students if one["mean"] > least])


def student(kept: Path, shared: list[str], one: tuple[Trial, str]) -> Figures:
    trial, layers = one
    changes = [*shared, *trial, f"student.layers={layers}", "train.seed=1"]
    plan = make_plan(load_recipe(RECIPE, changes))
    teacher = make_plan(load_recipe(RECIPE, shared))  # has factors, which SimCSE's plan has not
    return Kept(kept).once(plan.graph["train"].fingerprint, partial(measured, plan, teacher))


def measured(plan: Plan, teacher: Plan) -> Figures:
    """Agreement, STS-B dev and the mean of the test sets of the student that a plan trains."""
    encoder, dev = student_of(plan)
    sentences = plan.store.open(plan.folders["sentences"])
    rows = np.arange(NUM_HELD)
    texts, _ = texts_of_rows(sentences, rows.tolist())
    shards = plan.store.open(teacher.folders["embed:minilm"]).shard_paths("factors.npy")
    factors = FactorRows(shards, plan.recipe.sentences.rows_per_shard).take(rows)
    vectors = encoder.encode_unit(texts)
    found = score_agreement(vectors, {"minilm": factors}, [1.0]).figures
    cosine = {"cosine to teacher": float((vectors * factors).sum(1).mean())}
    labelled = {"STS-B dev": dev, "mean": spearmans(plan.recipe, encoder.encode_unit)["mean"]}
    return {figure.name: figure.value for figure in found} | cosine | labelled


def table(students: Sequence[Figures]) -> None:
    values = {name: np.array([one[name] for one in students]) for name in students[0]}
    spread = {name: statistics.stdev(values[name]) for name in LABELLED}
    print(f"\n{len(students)} students; standard deviation of {spread}")
    print(f"{'rank correlation with':<22}" + "".join(f"{name:>12}" for name in LABELLED))
    for name, measure in values.items():
        if name != "mean":
            found = [spearman(measure, values[labelled]) for labelled in LABELLED]
            print(f"{name:<22}" + "".join(f"{rho:>12.3f}" for rho in found))


if __name__ == "__main__":
    main()
