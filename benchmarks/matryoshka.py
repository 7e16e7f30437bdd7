"""Vectors cut to fewer dimensions: students trained for it (`student.dimensions`) and not.

    SENTRAY_DATA=/path/to/data python benchmarks/matryoshka.py --seeds 1 2 3

The setting of student_quality.py: recipes/wiki-minilm.yaml, 240 steps of 64 sentences, one thread,
one to two minutes a training. Prints Spearman x 100 on the recipe's test sets and their mean for
each width, and for the teacher's vectors cut alike; mean and standard deviation over the seeds.
"""

import argparse
from collections.abc import Sequence

import numpy as np
import torch
from spread import over_seeds
from student_quality import RECIPE, Figures, loaded, prepared, spearmans, student_of

from pipeline.plan.plan import make_plan
from pipeline.recipe.read import load_recipe
from stages.evaluate.base import Encode
from stages.kinds import Kinds
from stages.recipe import Recipe
from stages.rows import unit_rows

WIDTHS = (384, 256, 128, 64, 32)
# As overrides of the recipe.
STUDENTS = {"all dimensions": "[]", "each width": str(list(WIDTHS[1:]))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--storage", default="runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shared = prepared(240, 64, options.storage)
    recipe = load_recipe(RECIPE, shared)
    teacher = loaded(recipe, recipe.teachers[0].encoder())
    show("teacher", [by_width(recipe, teacher.encode_unit)])
    for title, dimensions in STUDENTS.items():
        rows = []
        for seed in options.seeds:
            changes = [*shared, f"student.dimensions={dimensions}", f"train.seed={seed}"]
            plan = make_plan(load_recipe(RECIPE, changes))
            rows.append(by_width(plan.recipe, student_of(plan)[0].encode_unit))
        show(f"trained on {title}", rows)


def by_width(recipe: Recipe, encode: Encode) -> dict[int, Figures]:
    """Each sentence is embedded once for all widths."""
    known: dict[str, np.ndarray] = {}

    def cut(width: int) -> Encode:
        def encode_cut(texts: Sequence[str], kinds: Kinds = None) -> np.ndarray:
            missing = [text for text in dict.fromkeys(texts) if text not in known]
            if missing:
                known.update(zip(missing, encode(missing), strict=True))
            return unit_rows(np.stack([known[text][:width] for text in texts]))

        return encode_cut

    return {width: spearmans(recipe, cut(width)) for width in WIDTHS}


def show(title: str, rows: list[dict[int, Figures]]) -> None:
    for width in WIDTHS:
        print(f"{title:<26}{width:>4} wide  {over_seeds([row[width] for row in rows])}", flush=True)


if __name__ == "__main__":
    main()
