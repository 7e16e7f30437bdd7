"""RankCSE ListNet and ListMLE against SimCSE: same student, sentences, batch and steps.

Learning rate and temperatures are each method's own, chosen on STS-B dev (docs/log.md). At dropout
0 both views of a sentence are equal, so that the consistency term vanishes and what is left of
RankCSE is listwise distillation: those rows stand beside the others.

    SENTRAY_DATA=/path/to/data python benchmarks/wiki_quality.py --seeds 1 2 3

Runs recipes/wiki-minilm.yaml once per method and seed (what is done already is not done again) and
prints mean and standard deviation over the seeds, Spearman x 100 on the test sets. Checkpoints are
chosen on STS-B dev. About an hour and a half on two cores.
"""

import argparse

from measured import figures_of, train_stats
from spread import over_seeds

from pipeline.recipe.read import load_recipe
from pipeline.run.runner import run

RECIPE = "recipes/wiki-minilm.yaml"
LISTMLE = "{infonce: {}, consistency: {}, listmle: {student_temperature: 0.025}}"
METHODS = {
    "SimCSE": ["train.objectives={infonce: {}}", "student.dropout=0.1", "train.learning_rate=3e-5"],
    "RankCSE ListNet": ["student.dropout=0.1"],
    "RankCSE ListMLE": ["student.dropout=0.1", f"train.objectives={LISTMLE}"],
    "ListNet, dropout 0": [],
    "ListMLE, dropout 0": [f"train.objectives={LISTMLE}"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--storage", default="runs")
    options = parser.parse_args()
    lines: dict[str, list[dict[str, float]]] = {}
    for seed in options.seeds:
        for method, changes in METHODS.items():
            overrides = [*changes, f"train.seed={seed}", f"storage={options.storage}"]
            recipe = load_recipe(RECIPE, [*overrides, "evaluate.speed=false"])
            run(recipe)
            scores, dev = figures_of(recipe), train_stats(recipe)["dev_spearman"]
            lines.setdefault(method, []).append(scores["student after"] | {"STS-B dev": dev})
            print(method, seed, lines[method][-1], flush=True)
    for who in ("student before", "minilm"):
        print(f"{who:<18}" + "".join(f"{n} {v:.2f}   " for n, v in scores[who].items()))
    for method, rows in lines.items():
        print(f"{method:<18}{over_seeds(rows)}")


if __name__ == "__main__":
    main()
