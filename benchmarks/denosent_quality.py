"""DenoSent, its ablations (the paper's Table 3) and SimCSE: same student, sentences and steps.

    SENTRAY_DATA=/path/to/data python benchmarks/denosent_quality.py --seeds 1 2 3

Runs recipes/wiki-denosent.yaml once per row and seed (what is done already is not done again) and
prints mean and standard deviation over the seeds, Spearman x 100 on the test sets. Checkpoints are
chosen on STS-B dev. "Without discrete noise" trains on the same sentences, both views the sentence
itself. SimCSE is the student of recipes/wiki-simcse.yaml (mean pooling, no head, dropout 0.1) on
these sentences; its rewritten row has a rewrite as its second view.
"""

import argparse

from measured import figures_of, train_stats
from spread import over_seeds

from pipeline.recipe.read import load_recipe
from pipeline.run.runner import run

RECIPE = "recipes/wiki-denosent.yaml"
NO_DENOISING, NO_CONTRAST = "train.objectives.denoising=null", "train.objectives.infonce=null"
NO_NOISE = "train.rewritten_view=none"
SIMCSE = [
    NO_DENOISING, "student.pooling=mean", "student.template=null", "student.head=none",
    "student.max_length=32", "train.learning_rate=3e-5",
]  # fmt: skip
ROWS = {
    "SimCSE": [*SIMCSE, NO_NOISE],
    "SimCSE, rewritten": SIMCSE,
    "DenoSent": [],
    "contrastive only": [NO_DENOISING],
    "denoising only": [NO_CONTRAST],
    "no discrete noise": [NO_NOISE],
    "DenoSent, mean pooling": [
        "student.pooling=mean",
        "student.template=null",
        "student.max_length=32",
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--storage", default="runs")
    options = parser.parse_args()
    lines: dict[str, list[dict[str, float]]] = {}
    for seed in options.seeds:
        for title, changes in ROWS.items():
            overrides = [*changes, f"train.seed={seed}", f"storage={options.storage}"]
            recipe = load_recipe(RECIPE, overrides)
            run(recipe)
            found = figures_of(recipe)
            dev = {"STS-B dev": train_stats(recipe)["dev_spearman"]}
            lines.setdefault(f"{title}, before", []).append(found["student before"])
            lines.setdefault(title, []).append(found["student after"] | dev)
            print(title, seed, lines[title][-1], flush=True)
    for title, rows in lines.items():
        print(f"{title:<32}{over_seeds(rows)}")


if __name__ == "__main__":
    main()
