"""Which objective makes the best student: same layers, sentences and steps, tuned on dev alike.

    SENTRAY_DATA=/path/to/data python benchmarks/student_quality.py --seeds 1 2 3

Builds on recipes/wiki-minilm.yaml, whose sentences, factors and tokens it makes in --storage; all
else is the product's training, in this process. First every method gets the same number of trials
on STS-B dev, with three layers (0, 2, 5) and seed 0. Its best one is then trained with each seed
and choice of layers, and only these see the test sets. Prints mean and standard deviation over the
seeds, Spearman x 100. Every sentence is seen once, in 240 steps of 64 by default. What is in --kept
is not done again, so a part of the table can be made with --methods and --layers, side by side too:
a process has one thread, and a training takes two to three minutes. The file that is there by
default holds what docs/ shows; another one begins anew.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from neighbour_batches import train_of
from spread import over_seeds

from pipeline.plan.plan import Plan, make_plan
from pipeline.recipe.read import load_recipe
from pipeline.run.runner import run
from stages.encoder.cpu import computed_type
from stages.encoder.model import Encoder, load_for_inference
from stages.encoder.pipeline import PipelineEncoder
from stages.encoder.settings import EncoderSettings
from stages.evaluate.base import Encode, Tested
from stages.evaluate.sets import load_sts
from stages.evaluate.sts import score_sts
from stages.recipe import Recipe
from stages.train.engine import PlainEngine
from stages.train.run import start_training
from stages.train.student import save_encoder

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
# The type that a training in bfloat16 is computed in on this processor.
COMPUTED = str(computed_type("bfloat16", torch.device("cpu"))).removeprefix("torch.")
Figures = dict[str, float]


class Kept:
    """Figures by key in a file of JSON lines, to which other processes may add."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def once(self, key: str, measure: Callable[[], Figures]) -> Figures:
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        for found in map(json.loads, lines):
            if found["key"] == key:
                return found["figures"]
        figures = measure()
        with self.file.open("a") as stream:
            kept = {"key": key, "computed": COMPUTED, "figures": figures}
            stream.write(json.dumps(kept) + "\n")
        return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--layers", nargs="+", default=["[0, 1, 2]", "3", "2"])
    options = parsed(parser, "benchmarks/student_quality.jsonl")
    torch.set_num_threads(1)
    shared = prepared(options.steps, options.batch_size, options.storage)
    table(options, shared, Kept(options.kept))


def parsed(parser: argparse.ArgumentParser, kept: str) -> argparse.Namespace:
    """The command line, with what all trainings of these benchmarks have."""
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--storage", default="runs")
    parser.add_argument("--kept", type=Path, default=kept)
    return parser.parse_args()


def prepared(steps: int, batch_size: int, storage: str) -> list[str]:
    """Overrides of the recipe, each sentence seen once; makes what training reads."""
    shared = [
        f"train.max_steps={steps}", f"train.batch_size={batch_size}", f"storage={storage}",
        f"train.dev.every_steps={steps // 2}", f"sentences.limit={steps * batch_size}",
        "student.freeze_layers=0",
    ]  # fmt: skip
    recipe = load_recipe(RECIPE, shared)
    plan = make_plan(recipe)
    if any(plan.nodes[name].manifest is None for name in ("tokens", "embed:minilm")):
        for stage in ("sentences", "tokens", "embed"):
            run(recipe, only=stage)
    return shared


def table(options: argparse.Namespace, shared: list[str], kept: Kept) -> None:
    chosen = {method: best_trial(method, shared, kept) for method in options.methods}
    for layers in options.layers:
        recipe = load_recipe(RECIPE, [*shared, f"student.layers={layers}"])
        untrained = recipe.student.encoder()
        before = kept.once(f"before, {layers}", partial(tested, recipe, untrained))
        print(f"layers {layers:<12}{'before':<24}{over_seeds([before])}", flush=True)
        for method, trial in chosen.items():
            rows = []
            for seed in options.seeds:
                changes = [*shared, *trial, f"student.layers={layers}", f"train.seed={seed}"]
                rows.append(trained(changes, kept, whole=True))
            print(f"layers {layers:<12}{method:<24}{over_seeds(rows)}", flush=True)
    teacher = recipe.teachers[0].encoder().model_copy(update={"precision": "float32"})
    print(f"teacher {over_seeds([kept.once('teacher', partial(tested, recipe, teacher))])}")


def best_trial(method: str, shared: list[str], kept: Kept) -> list[str]:
    """The trial of a method with the best STS-B dev."""
    scores = []
    for trial in METHODS[method]:
        changes = [*shared, *trial, f"student.layers={TUNED_LAYERS}", "train.seed=0"]
        scores.append(trained(changes, kept, whole=False)["STS-B dev"])
        print(f"{method}: dev {scores[-1]:.2f} with {trial}", flush=True)
    return METHODS[method][scores.index(max(scores))]


def trained(changes: list[str], kept: Kept, whole: bool) -> Figures:
    """Dev of a student and, where the whole is asked for, its tests; trains what is not known."""
    plan = make_plan(load_recipe(RECIPE, changes))
    key = f"{plan.graph['train'].fingerprint}, {'tests' if whole else 'dev'}"
    return kept.once(key, partial(measured, plan, whole))


def measured(plan: Plan, whole: bool) -> Figures:
    student, dev = student_of(plan)
    return (spearmans(plan.recipe, student.encode_unit) if whole else {}) | {"STS-B dev": dev}


def student_of(plan: Plan) -> tuple[Encoder | PipelineEncoder, float]:
    """The student that a plan trains, at the recipe's length of tests, and its STS-B dev."""
    stage, work = train_of(plan)
    training = start_training(stage, work, PlainEngine, checkpointed=False)
    for _ in training.rows():
        pass
    with tempfile.TemporaryDirectory() as folder:
        save_encoder(training.engine.student.encoder, training.trained.weights, Path(folder))
        encoder = loaded(plan.recipe, EncoderSettings(model=folder, pooling="auto"))
    return encoder, training.progress.best_score or float("nan")


def loaded(recipe: Recipe, settings: EncoderSettings) -> Encoder | PipelineEncoder:
    longer = settings.model_copy(update={"max_length": recipe.evaluate.max_length})
    return load_for_inference(longer)


def tested(recipe: Recipe, settings: EncoderSettings) -> Figures:
    return spearmans(recipe, loaded(recipe, settings).encode_unit)


def spearmans(recipe: Recipe, encode: Encode) -> Figures:
    """Spearman x 100 on the recipe's test sets, as its evaluation gives them, and their mean."""
    results = [score_sts(load_sts(one), Tested(encode, None), 0) for one in recipe.evaluate.sts]
    figures = {result.figures[0].name: result.figures[0].value for result in results}
    return figures | {"mean": statistics.mean(figures.values())}


if __name__ == "__main__":
    main()
