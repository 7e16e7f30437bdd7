"""Batches made of neighbours against random ones: same student, sentences and steps, tuned alike.

    SENTRAY_DATA=/path/to/data python benchmarks/neighbour_batches.py --methods vectors

Each method has its nine trials of student_quality.py with each kind of batches, on STS-B dev (seed
0), and the best of them is trained with each seed. Builds on recipes/wiki-minilm.yaml, whose
sentences, factors and tokens it makes in --storage, and on the exact 100 nearest of each sentence
under the teacher. A share of each batch is random; the rest are groups of a random sentence and
near ones: the nearest, or any of ranks 11-100. No sentence comes twice. All else is the product's
training. Figures of the last step's student:
  dev    Spearman x 100 on STS-B dev
  near   percent of the teacher's ten nearest that the student finds among 2,000 sentences kept from
         training: 250 and seven neighbours of each
  order  Spearman x 100 of a sentence's similarities to all of these, mean over every fourth one
  error  of similarities that are over 0.5 under the teacher: root mean square x 100
Prints mean and standard deviation over the seeds, and the difference to the method with random
batches, which is always made; also the median difference of the nine trials, each with the same
settings as its twin with random batches, as the best ones may differ in their learning rate.
Trainings run in --processes of one thread each, on the GPU where there is one; on a CPU 120 steps
take one to four minutes. What is in --kept is not done again, so the table can be made in parts;
the file that is there by default holds trainings in bfloat16.
"""

import argparse
import itertools
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
from neighbour_graph import exact, in_blocks, without_itself
from spread import over_seeds
from student_quality import METHODS, RECIPE, Figures, Kept, Trial, one_thread_each, train_of

from pipeline.plan.plan import Plan, make_plan
from pipeline.recipe.read import load_recipe
from pipeline.run.runner import run
from stages.encoder.tokenizer import pad
from stages.evaluate.sts import spearman
from stages.rows import unit_rows
from stages.train.engine import PlainEngine
from stages.train.run import start_training, training_data
from stages.train.student import Student

NUM_NEAREST, NUM_HELD, HELD_GROUP = 100, 2000, 8
TAUGHT = [name for name in METHODS if name != "SimCSE"]  # by a teacher, whose neighbours count
SHOWN = ["vectors", "similarities", "order of similarities", "ListNet", "ListMLE"]


@dataclass(frozen=True)
class Batches:
    """What batches are made of: groups of so many sentences, and a share of random ones."""

    group: int = 1
    ranks: str = "nearest"
    random: float = 1.0

    def __str__(self) -> str:
        if self == RANDOM:
            return "random"
        return f"groups of {self.group}, {self.ranks}, {100 * self.random:.0f}% random"

    def rows(
        self, nearest_NK: np.ndarray, held: np.ndarray, shape: tuple[int, int], seed: int
    ) -> np.ndarray:
        """Row numbers of all steps' batches, of the given shape (steps, batch size)."""
        used = np.zeros(len(nearest_NK), dtype=bool)
        used[held] = True
        seeds = np.random.default_rng([seed, 7]).permutation(np.flatnonzero(~used))
        drawn = np.random.default_rng([seed, 8])
        unused = (row for row in seeds if not used[row])
        nearest = self.ranks == "nearest"
        first, last = (1, NUM_NEAREST) if nearest else map(int, self.ranks.split("-"))
        num_grouped = shape[1] - round(shape[1] * self.random)
        steps = []
        for _ in range(shape[0]):
            batch: list[int] = []
            while len(batch) < shape[1]:
                batch.append(next(unused))
                used[batch[-1]] = True
                if len(batch) <= num_grouped:
                    near = nearest_NK[batch[-1], first - 1 : last]
                    near = near[~used[near]]
                    near = near if nearest else drawn.permutation(near)
                    near = near[: min(self.group - 1, num_grouped - len(batch))]
                    used[near] = True
                    batch += near.tolist()
            steps.append(batch)
        return np.array(steps)


RANDOM = Batches()


def nearest_of(plan: Plan, options: argparse.Namespace) -> Path:
    """File of the nearest of every sentence (N, 100) int32, by cosine; kept for this artifact."""
    (factors,) = training_data(*train_of(plan)).factors
    rows = np.arange(factors.num_rows)
    vectors = factors.take(rows)
    file = Path(options.storage) / f"nearest-{Path(plan.folders['embed:minilm']).name}.npy"
    if not file.exists():
        found = in_blocks(exact(vectors, options), vectors, rows, NUM_NEAREST + 1)
        np.save(file, without_itself(rows, found, NUM_NEAREST).astype(np.int32))
    nearest_NK = np.load(file)
    for rank in (1, 10, 100):
        cosines = (vectors * vectors[nearest_NK[:, rank - 1]]).sum(1)
        above = 100 * (cosines > 0.8).mean()
        print(f"neighbour {rank}: median cosine {np.median(cosines):.2f}, {above:.1f}% above 0.8")
    return file


def held_out(nearest_NK: np.ndarray) -> np.ndarray:
    """Sentences that are not trained on (2000,): 250 random ones and seven near ones of each."""
    found: list[int] = []
    taken: set[int] = set()
    for row in np.random.default_rng(0).permutation(len(nearest_NK)):
        near = [one for one in (int(row), *nearest_NK[row, :12].tolist()) if one not in taken]
        if len(near) >= HELD_GROUP:
            found += near[:HELD_GROUP]
            taken.update(found[-HELD_GROUP:])
        if len(found) == NUM_HELD:
            break
    return np.sort(found)


def vectors_of(student: Student, tokens: list[np.ndarray]) -> np.ndarray:
    """Unit vectors (n, D) of sentences as the student reads them in training."""
    student.eval()
    tokenizer = student.tokenizers[0]
    rows = tokenizer.wrap(tokens)
    order = np.argsort([len(row) for row in rows])
    out = np.empty((len(rows), student.encoder.dimension), dtype=np.float32)
    for start in range(0, len(rows), 64):
        part = order[start : start + 64]
        ids, mask = pad([rows[i] for i in part], tokenizer.pad_id)
        with torch.no_grad():
            fed = (torch.from_numpy(x).to(student.encoder.device) for x in (ids, mask))
            out[part] = student(*fed, {})[0].float().cpu().numpy()
    return unit_rows(out)


def agreement(student_nD: np.ndarray, teacher_nD: np.ndarray) -> dict[str, float]:
    """`near`, `order` and `error` of the held-out sentences (see above)."""
    others = ~np.eye(len(student_nD), dtype=bool)
    own, taught = ((x @ x.T)[others].reshape(len(x), len(x) - 1) for x in (student_nD, teacher_nD))
    tens = (np.argsort(-x, axis=1)[:, :10] for x in (own, taught))
    found = [len(np.intersect1d(*rows)) for rows in zip(*tens, strict=True)]
    orders = [spearman(*rows) for rows in zip(own[::4], taught[::4], strict=True)]
    near = taught > 0.5
    return {
        "near": 10 * float(np.mean(found)),
        "order": 100 * float(np.mean(orders)),
        "error": 100 * float(np.sqrt(((own - taught)[near] ** 2).mean())),
    }


def figures_of(kept: Kept, nearest: Path, cell: tuple[list[str], Batches]) -> Figures:
    """The figures of one training; trains where they are not known."""
    changes, batches = cell
    plan = make_plan(load_recipe(RECIPE, changes))
    key = f"{plan.graph['train'].fingerprint}, {batches}"
    return kept.once(key, partial(measured, plan, nearest, batches))


def measured(plan: Plan, nearest: Path, batches: Batches) -> Figures:
    stage, work = train_of(plan)
    data, settings = training_data(stage, work), stage.settings
    nearest_NK = np.load(nearest, mmap_mode="r")
    held = held_out(nearest_NK)
    training = start_training(stage, work, PlainEngine, checkpointed=False)
    shape = training.num_steps, settings.batch_size
    rows_SB = batches.rows(nearest_NK, held, shape, settings.seed)
    by_step = SimpleNamespace(rows=rows_SB.__getitem__)
    with patch("stages.train.views.BatchOrder", lambda *_: by_step):
        *_, last = training.rows()
    student = vectors_of(training.engine.student, data.tokens.take(held))
    return {"dev": last["dev_spearman"]} | agreement(student, data.factors[0].take(held))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", nargs="+", default=SHOWN, choices=TAUGHT)
    parser.add_argument("--groups", type=int, nargs="*", default=[2, 8])
    parser.add_argument("--ranks", nargs="+", default=["nearest", "11-100"])
    parser.add_argument("--random", type=float, nargs="+", default=[0.75], help="share of a batch")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--layers", nargs="+", default=["[0, 2, 5]"])
    parser.add_argument("--limit", type=int, default=100_000, help="sentences")
    parser.add_argument("--storage", default="runs")
    parser.add_argument("--kept", type=Path, default="benchmarks/neighbour_batches.jsonl")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    shared = [
        f"sentences.limit={options.limit}", "sentences.max_chars=250",
        f"storage={options.storage}", "student.freeze_layers=0",
    ]  # fmt: skip
    recipe = load_recipe(RECIPE, shared)
    for stage in ("sentences", "tokens", "embed"):
        run(recipe, only=stage)
    nearest = nearest_of(make_plan(recipe), options)
    with one_thread_each(options.processes) as pool:
        table(partial(figures_of, Kept(options.kept), nearest), shared, options, pool)


def table(
    figures: Callable[[tuple[list[str], Batches]], Figures],
    shared: list[str],
    options: argparse.Namespace,
    pool: Executor,
) -> None:
    groups = itertools.product(options.groups, options.ranks, options.random)
    kinds = [RANDOM, *(Batches(*one) for one in groups)]
    parts = list(itertools.product(options.layers, options.methods, kinds))

    def cell(layers: str, trial: list[str], seed: int, batches: Batches) -> tuple[Trial, Batches]:
        steps = [f"train.max_steps={options.steps}", f"train.dev.every_steps={options.steps}"]
        own = [f"student.layers={layers}", f"train.seed={seed}"]
        return [*shared, *steps, *own, *trial], batches

    tried = pool.map(
        figures,
        [
            cell(layers, trial, 0, kind)
            for layers, method, kind in parts
            for trial in METHODS[method]
        ],
    )
    best = []
    for layers, method, kind in parts:
        trials = [next(tried) for _ in METHODS[method]]
        scores = np.nan_to_num([one["dev"] for one in trials], nan=-np.inf)
        best.append(METHODS[method][scores.argmax()])
        told = f"{layers}, {method}, {kind}: dev {scores.max():.2f}"
        print(f"{told} with {best[-1]}", flush=True)
        if kind == RANDOM:
            others = trials
            continue
        less = [differences(*both) for both in zip(trials, others, strict=True)]
        middle = {name: f"{np.nanmedian([one[name] for one in less]):+.2f}" for name in less[0]}
        print(f"  median difference to random with the same settings: {middle}", flush=True)
    found = pool.map(
        figures,
        [
            cell(layers, trial, seed, kind)
            for (layers, _, kind), trial in zip(parts, best, strict=True)
            for seed in options.seeds
        ],
    )
    for layers, method, kind in parts:
        rows = [next(found) for _ in options.seeds]
        print(f"{f'{layers}, {method}, {kind}':<66}{over_seeds(rows)}", flush=True)
        if kind == RANDOM:
            twins = rows
            continue
        less = [differences(*both) for both in zip(rows, twins, strict=True)]
        print(f"{'  difference to random':<66}{over_seeds(less)}", flush=True)


def differences(one: Figures, other: Figures) -> Figures:
    return {name: one[name] - other[name] for name in one}


if __name__ == "__main__":
    main()
