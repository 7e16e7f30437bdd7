"""Which objective makes the best student: same layers, sentences and steps, tuned on dev alike.

    SENTRAY_DATA=/path/to/data python benchmarks/student_quality.py --seeds 1 2 3

Builds on recipes/wiki-minilm.yaml. First every method gets the same number of trials on STS-B dev,
with three layers (0, 2, 5) and seed 0. Its best one is then trained with each seed and choice of
layers, and only these see the test sets. Prints mean and standard deviation over the seeds,
Spearman x 100. What is done already is not done again, so a part of the table can be made with
--methods and --layers. Every sentence is seen once, in 240 steps of 64 by default.
"""

import argparse
import statistics

from measured import figures_of, train_stats
from spread import over_seeds

from pipeline.recipe.read import load_recipe
from pipeline.run.runner import run
from pipeline.run.session import ray_session
from stages.recipe import Recipe

RECIPE = "recipes/wiki-minilm.yaml"
RATES = ["3e-4", "1e-3", "2e-3"]
LISTNET = "{{weight: {0}, student_temperature: {1}, teacher_temperature: {2}}}"
COSINE = "vector_regression: {}"


def objectives(text: str) -> str:
    return f"train.objectives={{{text}}}"


# Three trials each, as overrides of the recipe
METHODS = {
    "SimCSE": [
        [objectives("infonce: {}"), "student.dropout=0.1", f"train.learning_rate={rate}"]
        for rate in ("1e-5", "3e-5", "1e-4")
    ],
    "ListNet": [
        [objectives(f"infonce: {{}}, listnet: {LISTNET.format(1, *temperatures)}")]
        for temperatures in ((0.025, 0.0125), (0.05, 0.025), (0.05, 0.05))
    ],
    "ListMLE": [
        [objectives(f"infonce: {{}}, listmle: {{student_temperature: {temperature}}}")]
        for temperature in (0.0125, 0.025, 0.05)
    ],
    "similarities": [
        [objectives("similarity_regression: {weight: 10}"), f"train.learning_rate={rate}"]
        for rate in RATES
    ],
    "order of similarities": [
        [objectives(f"similarity_regression: {{distance: order, temperature: {temperature}}}")]
        for temperature in (0.025, 0.05, 0.1)
    ],
    "vectors": [[objectives(COSINE), f"train.learning_rate={rate}"] for rate in RATES],
    "vectors, projected": [
        [objectives("vector_regression: {projection: learned}"), f"train.learning_rate={rate}"]
        for rate in RATES
    ],
    "vectors + similarities": [
        [objectives(f"{COSINE}, similarity_regression: {{weight: {weight}}}")]
        for weight in (1, 3, 10)
    ],
    "vectors + order": [
        [objectives(f"{COSINE}, similarity_regression: {{distance: order, weight: {weight}}}")]
        for weight in (0.01, 0.03, 0.1)
    ],
    "vectors + ListNet": [
        [objectives(f"{COSINE}, listnet: {LISTNET.format(weight, 0.05, 0.05)}")]
        for weight in (0.03, 0.1, 0.3)
    ],
}
TUNED_LAYERS = "3"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--layers", nargs="+", default=["[0, 1, 2]", "3", "2"])
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--storage", default="runs")
    options = parser.parse_args()
    shared = [
        f"train.max_steps={options.steps}", f"train.batch_size={options.batch_size}",
        f"train.dev.every_steps={options.steps // 4}", f"storage={options.storage}",
        f"sentences.limit={options.steps * options.batch_size}",
        "evaluate.speed=false", "student.freeze_layers=0",
    ]  # fmt: skip
    with ray_session(None):
        table(options, shared)


def table(options: argparse.Namespace, shared: list[str]) -> None:
    chosen = {method: best_trial(method, shared) for method in options.methods}
    before: dict[str, dict[str, dict[str, float]]] = {}
    for layers in options.layers:
        for method, trial in chosen.items():
            rows = []
            for seed in options.seeds:
                recipe = trained([*shared, *trial], layers, seed, whole=True)
                before[layers] = figures_of(recipe)
                rows.append(row_of(before[layers]["student after"], dev_of(recipe)))
                print(f"layers {layers}, {method}, seed {seed}: {rows[-1]}", flush=True)
            print(f"layers {layers:<12}{method:<24}{over_seeds(rows)}", flush=True)
    for layers, figures in before.items():
        for who in ("student before", "minilm"):
            print(f"layers {layers:<12}{who:<24}{over_seeds([row_of(figures[who])])}")


def best_trial(method: str, shared: list[str]) -> list[str]:
    """The trial of a method with the best STS-B dev."""
    scores = []
    for trial in METHODS[method]:
        scores.append(dev_of(trained([*shared, *trial], TUNED_LAYERS, 0, whole=False)))
        print(f"{method}: dev {scores[-1]:.2f} with {trial}", flush=True)
    return METHODS[method][scores.index(max(scores))]


def trained(changes: list[str], layers: str, seed: int, whole: bool) -> Recipe:
    """The recipe after it has run; its tests are read only where the whole is asked for."""
    shape = [f"student.layers={layers}", f"train.seed={seed}"]
    recipe = load_recipe(
        RECIPE, [*changes, *shape, *([] if whole else ["evaluate={speed: false}"])]
    )
    run(recipe, out=lambda line: None)
    return recipe


def dev_of(recipe: Recipe) -> float:
    return train_stats(recipe)["dev_spearman"]


def row_of(scores: dict[str, float], dev: float | None = None) -> dict[str, float]:
    mean = {"mean": statistics.mean(scores.values())}
    return scores | mean | ({} if dev is None else {"STS-B dev": dev})


if __name__ == "__main__":
    main()
