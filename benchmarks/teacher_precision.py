"""What a teacher in bfloat16 costs its student: the same training with factors in either precision.

    SENTRAY_DATA=/path/to/data PYTHONPATH=. python benchmarks/teacher_precision.py --seeds 1 2 3

First what changes in what is taught: similarities and list positions in batches of 128 sentences,
against float32. Then the recipe, limited to 20,000 sentences, weights of the last step:
recipes/wiki-minilm.yaml in 300 steps of 64, or recipes/wiki-rankcse.yaml in 60 of 128. Only the
precision in which the teacher embeds the sentences differs between the two rows; figures are paired
by seed. Spearman x 100 on the test sets. `--seeds` without numbers: the first part alone, which
takes seconds.
"""

import argparse
import gzip
import os

import numpy as np
from measured import figures_of
from spread import over_seeds

from pipeline.recipe.read import load_recipe
from pipeline.run.runner import run
from stages.encoder.model import load_for_inference
from stages.rows import unit_rows

RECIPES = {
    "recipes/wiki-minilm.yaml": ["train.max_steps=300"],
    "recipes/wiki-rankcse.yaml": ["train.batch_size=128", "train.max_steps=60"],
}
BATCH, NUM_BATCHES = 128, 4
LIMITS = ["sentences.limit=20000", "train.dev=null", "evaluate.speed=false",
          "evaluate.num_bootstrap=0"]  # fmt: skip


def factors(recipe: str, texts: list[str], precision: str) -> np.ndarray:
    """What training reads of the recipe's teacher: stored in fp16, unit rows again."""
    teacher = load_recipe(recipe, [f"teachers.0.precision={precision}"]).teachers[0].encoder()
    stored = load_for_inference(teacher).encode_unit(texts).astype(np.float16)
    return unit_rows(stored)


def print_what_is_taught(recipe: str) -> None:
    """Differences of similarities, and share of list positions that differ."""
    path = os.path.join(os.environ["SENTRAY_DATA"], "wiki", "wiki1m_sentences.txt.gz")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        texts = [line.strip() for line, _ in zip(file, range(BATCH * NUM_BATCHES), strict=False)]
    found = {one: factors(recipe, texts, one) for one in ("float32", "bfloat16")}
    squares, largest, moved = [], [], []
    for start in range(0, len(texts), BATCH):
        exact, rounded = (x[start : start + BATCH] @ x[start : start + BATCH].T
                          for x in found.values())  # fmt: skip
        largest.append(np.abs(exact - rounded).max())
        squares.append(((exact - rounded) ** 2).mean())
        orders = [np.argsort(-x, axis=1, kind="stable") for x in (exact, rounded)]
        moved.append((orders[0] != orders[1]).mean())
    typical = np.mean(squares) ** 0.5
    print(
        f"similarities differ by {max(largest):.1e} at most, {typical:.1e} (root mean square); "
        f"{100 * np.mean(moved):.0f}% of list positions change ({NUM_BATCHES} batches of {BATCH})"
    )


def scores(name: str, precision: str, seed: int, storage: str) -> dict[str, float]:
    """The student's figures by test set."""
    overrides = [*LIMITS, *RECIPES[name], f"teachers.0.precision={precision}"]
    recipe = load_recipe(name, [*overrides, f"train.seed={seed}", f"storage={storage}"])
    run(recipe)
    return figures_of(recipe)["student after"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", choices=list(RECIPES), default=next(iter(RECIPES)))
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--storage", default="runs")
    options = parser.parse_args()
    print_what_is_taught(options.recipe)
    if not options.seeds:
        return
    rows: dict[str, list[dict[str, float]]] = {"bfloat16": [], "float32": []}
    for seed in options.seeds:
        for precision, found in rows.items():
            found.append(scores(options.recipe, precision, seed, options.storage))
            found[-1]["mean"] = sum(found[-1].values()) / len(found[-1])
            print(precision, seed, found[-1], flush=True)
    for precision, found in rows.items():
        print(f"{precision:<11}{over_seeds(found)}")
    pairs = zip(rows["float32"], rows["bfloat16"], strict=True)
    differences = [{name: a[name] - b[name] for name in a} for a, b in pairs]
    print(f"{'difference':<11}{over_seeds(differences)}")


if __name__ == "__main__":
    main()
