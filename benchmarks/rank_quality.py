"""RankEncoder step by step: base, ranks alone (Eq. 2), retrained (Eq. 5), with ranks (Eq. 7).

    SENTRAY_DATA=/path/to/data python benchmarks/rank_quality.py --seeds 1 2 3

Runs recipes/wiki-ranks.yaml once per seed with exact ranks and once with ranks compressed to 256
dimensions; the base encoder (recipes/wiki-simcse.yaml) is trained with the same seed, in the same
run, once for both. Prints mean and standard deviation over seeds: Spearman x 100 on the test sets,
alignment and uniformity on STS-B dev, and the compression's error. Checkpoints are chosen on STS-B
dev. What is done already is not done again.
"""

import argparse
from pathlib import Path

from measured import figures_of
from spread import over_seeds

from pipeline.plan.plan import make_plan
from pipeline.recipe.read import dump_recipe, load_recipe
from pipeline.run.runner import run

WAYS = {"exact": [], "256 dimensions": ["ranks.dimensions=256"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--storage", default="runs")
    parser.add_argument("--set", action="append", default=[], help="overrides of wiki-ranks.yaml")
    options = parser.parse_args()
    lines: dict[tuple[str, str], list[dict[str, float]]] = {}
    for seed in options.seeds:
        base = load_recipe("recipes/wiki-simcse.yaml", [f"train.seed={seed}"])
        base_file = Path(options.storage).absolute() / f"wiki-simcse-{seed}.yaml"
        base_file.parent.mkdir(parents=True, exist_ok=True)
        base_file.write_text(dump_recipe(base))
        for way, changes in WAYS.items():
            overrides = [*options.set, *changes, f"storage={options.storage}",
                         f"train.seed={seed}", f"teachers.0.model=recipe:{base_file}"]  # fmt: skip
            recipe = load_recipe("recipes/wiki-ranks.yaml", overrides)
            run(recipe)
            for who, found in figures_of(recipe).items():
                lines.setdefault((way, who), []).append(found)
            corpus = make_plan(recipe).nodes["corpus:simcse"].manifest
            assert corpus is not None
            error = {k: v for k, v in corpus.stats.get("error", {}).items() if k != "tenths"}
            print(way, "seed", seed, "error", error, flush=True)
    for (way, who), rows in lines.items():
        print(f"{way:<15} {who:<24}{over_seeds(rows)}")


if __name__ == "__main__":
    main()
