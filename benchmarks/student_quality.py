"""Which objective makes the best student: same layers, sentences and steps, tuned on dev alike.

    SENTRAY_DATA=/path/to/data python benchmarks/student_quality.py --seeds 1 2 3

Builds on recipes/wiki-minilm.yaml, whose sentences, factors and tokens it makes in --storage; all
else is the product's training. For each choice of layers every method gets nine trials on STS-B dev
(seed 0): three learning rates and three values of a setting of its own, or nine rates where it has
none. Its best one is then trained with each seed, and only these see the test sets. Prints mean and
standard deviation over the seeds, Spearman x 100. Every sentence is seen once, in 240 steps of 64
by default. Trainings run in --processes of one thread each, on the GPU where there is one; on a CPU
one takes two to three minutes. What is in --kept is not done again, so the table can be made in
parts, by --methods and --layers. The file that is there by default holds what docs/ shows; another
one begins anew.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from spread import over_seeds

from pipeline.plan.plan import Plan, make_plan
from pipeline.recipe.read import load_recipe
from pipeline.run.runner import run
from pipeline.run.work import NodeWork, works_of
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
from stages.train.stage import Train
from stages.train.student import save_encoder

RECIPE = "recipes/wiki-minilm.yaml"
RATES = ("3e-4", "1e-3", "2e-3")
NINE_RATES = ("1e-4", "2e-4", "3e-4", "5e-4", "7e-4", "1e-3", "1.5e-3", "2e-3", "3e-3")
LOW_RATES = ("1e-5", "3e-5", "1e-4")
DROPOUT = "student.dropout=0.1"
Trial = list[str]  # overrides of the recipe


def trials(
    objectives: Callable[[Any], dict[str, Any]],
    values: Sequence[Any],
    rates: Sequence[str] = RATES,
    *others: str,
) -> list[Trial]:
    """Objectives with each value of a setting of theirs, and each learning rate."""
    return [
        [f"train.objectives={json.dumps(objectives(value))}", f"train.learning_rate={rate}",
         *others]
        for value, rate in product(values, rates)
    ]  # fmt: skip


def at_rates(known: Sequence[Trial], rates: Sequence[str]) -> list[Trial]:
    """The same settings with other learning rates."""
    bare = dict.fromkeys(
        tuple(one for one in trial if not one.startswith("train.learning_rate=")) for trial in known
    )
    return [[*one, f"train.learning_rate={rate}"] for one, rate in product(bare, rates)]


def by_rate(objectives: dict[str, Any]) -> list[Trial]:
    return trials(lambda _: objectives, [None], NINE_RATES)


def listnet(temperatures: tuple[float, float], weight: float = 1) -> dict[str, Any]:
    student, teacher = temperatures
    return {"weight": weight, "student_temperature": student, "teacher_temperature": teacher}


def listmle(temperature: float) -> dict[str, Any]:
    return {"student_temperature": temperature}


def order(temperature: float, weight: float = 1) -> dict[str, Any]:
    return {"distance": "order", "temperature": temperature, "weight": weight}


PAIRS = ((0.025, 0.0125), (0.05, 0.025), (0.05, 0.05))
TEMPERATURES = (0.0125, 0.025, 0.05)
SIMCSE: dict[str, Any] = {"infonce": {}}
RANKCSE = SIMCSE | {"consistency": {}}
VECTORS: dict[str, Any] = {"vector_regression": {}}
PROJECTED = {"vector_regression": {"projection": "learned"}}
METHODS: dict[str, list[Trial]] = {
    "SimCSE": trials(
        lambda t: {"infonce": {"temperature": t}}, (0.03, 0.05, 0.1), LOW_RATES, DROPOUT
    ),
    "RankEncoder": trials(
        lambda low: SIMCSE | {"rank_regression": {"low": low}}, (0, 0.25, 0.5), RATES, DROPOUT
    ),
    "RankCSE, ListNet": trials(lambda t: RANKCSE | {"listnet": listnet(t)}, PAIRS, RATES, DROPOUT),
    "RankCSE, ListMLE": trials(
        lambda t: RANKCSE | {"listmle": listmle(t)}, TEMPERATURES, RATES, DROPOUT
    ),
    "ListNet": trials(lambda t: {"listnet": listnet(t)}, PAIRS),
    "ListMLE": trials(lambda t: {"listmle": listmle(t)}, TEMPERATURES),
    "order of similarities": trials(
        lambda t: {"similarity_regression": order(t)}, (0.025, 0.05, 0.1)
    ),
    "similarities": by_rate({"similarity_regression": {"weight": 10}}),
    "vectors": by_rate(VECTORS),
    "vectors, MSE": by_rate({"vector_regression": {"distance": "mse", "weight": 192}}),
    "vectors, projected": by_rate(PROJECTED),
    "vectors + SimCSE": trials(
        lambda w: VECTORS | {"infonce": {"weight": w}}, (0.003, 0.01, 0.03), RATES, DROPOUT
    ),
    "vectors + similarities": trials(
        lambda w: VECTORS | {"similarity_regression": {"weight": w}}, (1, 3, 10)
    ),
    "vectors + order": trials(
        lambda w: VECTORS | {"similarity_regression": order(0.05, w)}, (0.01, 0.03, 0.1)
    ),
    "vectors + ListNet": trials(
        lambda w: VECTORS | {"listnet": listnet((0.05, 0.05), w)}, (0.03, 0.1, 0.3)
    ),
    "vectors + ListMLE": trials(
        lambda w: VECTORS | {"listmle": {"weight": w}}, (0.0001, 0.001, 0.01)
    ),
    "projected + similarities": trials(
        lambda w: PROJECTED | {"similarity_regression": {"weight": w}}, (1, 3, 10)
    ),
}
# The type that a training in bfloat16 is computed in here, and where.
GPU = torch.cuda.get_device_name() if torch.cuda.is_available() else None
COMPUTED = str(computed_type("bfloat16", torch.device("cpu" if GPU is None else "cuda")))
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
            kept = {"key": key, "computed": COMPUTED.removeprefix("torch."), "figures": figures}
            stream.write(json.dumps(kept) + "\n")
        return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--layers", nargs="+", default=["3", "[0, 1, 2]", "2", "1"])
    parser.add_argument("--rates", nargs="+", help="learning rates instead of each method's own")
    options = parsed(parser, "benchmarks/student_quality.jsonl")
    shared = prepared(options.steps, options.batch_size, options.storage)
    with one_thread_each(options.processes) as pool:
        for layers in options.layers:
            table(options, [*shared, f"student.layers={layers}"], Kept(options.kept), pool)


def parsed(parser: argparse.ArgumentParser, kept: str) -> argparse.Namespace:
    """The command line, with what all trainings of these benchmarks have."""
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--storage", default="runs")
    parser.add_argument("--kept", type=Path, default=kept)
    parser.add_argument("--processes", type=int, default=1)
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


def table(options: argparse.Namespace, shared: list[str], kept: Kept, pool: Executor) -> None:
    """Rows of one choice of layers, which is among `shared`."""
    recipe, layers = load_recipe(RECIPE, shared), shared[-1]
    for name, settings in {
        f"before, {layers}": recipe.student.encoder(),
        "teacher": recipe.teachers[0].encoder().model_copy(update={"precision": "float32"}),
    }.items():
        found = kept.once(name, partial(tested, recipe, settings))
        print(f"{name:<48}{over_seeds([found])}", flush=True)
    tried = [
        (name, trial)
        for name in options.methods
        for trial in (at_rates(METHODS[name], options.rates) if options.rates else METHODS[name])
    ]
    changes = [[*shared, *trial, "train.seed=0"] for _, trial in tried]
    scores = pool.map(partial(trained, kept, whole=False), changes)
    best: dict[str, tuple[float, Trial]] = {}
    for (method, trial), figures in zip(tried, scores, strict=True):
        score = figures["STS-B dev"]
        print(f"{layers}, {method}: dev {score:.2f} with {trial}", flush=True)
        if score > best.setdefault(method, (float("-inf"), trial))[0]:  # nan never is
            best[method] = score, trial
    seeded = [
        [*shared, *trial, f"train.seed={seed}"]
        for (_, trial), seed in product(best.values(), options.seeds)
    ]
    rows = list(pool.map(partial(trained, kept, whole=True), seeded))
    for method, start in zip(best, range(0, len(rows), len(options.seeds)), strict=True):
        own = rows[start : start + len(options.seeds)]
        print(f"{f'{method}, {layers}':<48}{over_seeds(own)}", flush=True)


def one_thread_each(processes: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        processes, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    )


def trained(kept: Kept, changes: list[str], whole: bool) -> Figures:
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


def train_of(plan: Plan) -> tuple[Train, NodeWork]:
    """The training of a plan, and what opens its inputs."""
    node = plan.graph["train"]
    assert isinstance(node.stage, Train)
    return node.stage, works_of([node], plan.recipe.storage, plan.folders)["train"]


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
