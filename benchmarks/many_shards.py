"""What many shards cost: a plan, and a training under the usual limit of open files.

    python -m benchmarks.many_shards plan
    python -m benchmarks.many_shards training

`plan`: sentences, tokens and factors in 33,334 shards each, so 100,002 in the graph; published, and
with one shard of each lacking. The files are empty, as a plan reads none of them. Reported are the
seconds of whole commands, `sentray plan` beside `sentray --help`, in turns.

`training`: 10,000 shards of 8 sentences, so 40,000 arrays (ids, offsets, factors of two teachers),
under a limit of 1,024 open files; beside it the same sentences in 10 shards. Reported are seconds
from the start of the training to its first step and seconds a step, in turns, and the most files
that were open.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.plan.plan import Plan, make_plan
from pipeline.recipe.read import load_recipe
from pipeline.run.work import works_of
from pipeline.store.manifest import FileRecord, ShardRecord, new_manifest
from stages.contract import RowWise
from tests.support.models import make_model, make_sentences
from tests.support.recipes import overridden, setting, tiny, write_recipe

OPEN_FILES = 1024
ARRAYS = {"sentences": ["rows.parquet"], "tokens": ["ids.npy", "offsets.npy"],
          "embed:t": ["factors.npy"]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["plan", "training", "train"])
    parser.add_argument("--recipe", help=argparse.SUPPRESS)
    parser.add_argument("--shards", type=int, help="of each node")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.what == "train":
        train(options.recipe)
        return
    print(f"{os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as folder:
        if options.what == "plan":
            plans(Path(folder), options.shards or 33_334, options.rounds)
        else:
            trainings(Path(folder), options.shards or 10_000, options.rounds)


def recipe_in(folder: Path, *overrides: str) -> str:
    """The tests' tiny recipe, with smaller models."""
    teacher, student = folder / "teacher", folder / "student"
    if not teacher.exists():
        make_model(teacher, layers=1, width=32, seed=1)
        make_model(student, layers=1, width=32, seed=2)
    file = folder / "recipe.yaml"
    write_recipe(file, tiny(folder, teacher, student))
    return write_recipe(file, overridden(file, overrides))


def plans(folder: Path, num_shards: int, rounds: int) -> None:
    file = recipe_in(folder)
    plan = make_plan(load_recipe(file))
    for whole in (True, False):
        for node, names in ARRAYS.items():
            pretend(plan, node, names, num_shards, whole)
        state = "published" if whole else "one shard lacking"
        seconds = in_turns(
            rounds,
            {"plan": lambda: command("plan", file), "--help": lambda: command("--help")},
        )
        print(f"{3 * num_shards:,} shards, {state}: {told(seconds)}")


def pretend(plan: Plan, node: str, names: list[str], num_shards: int, whole: bool) -> None:
    """An artifact of empty files; not whole: without its manifest and its last shard."""
    folder, store = plan.folders[node], plan.store
    place = Path(store.root.path(folder)) / "shards"
    place.mkdir(parents=True, exist_ok=True)
    shards = []
    for number in range(num_shards):
        files = {name: FileRecord(f"shards/{number:05d}.{name}", "0" * 64, 0) for name in names}
        shards.append(ShardRecord(number, 8, files))
        for name in names:
            (place / f"{number:05d}.{name}").touch()
        record = place / f"{number:05d}.json"
        record.write_text(json.dumps(asdict(shards[-1])))
    manifest = new_manifest(
        plan.graph[node], recipe="tiny", inputs={}, shards=shards, files={}, stats={},
        started=time.time(),
    )  # fmt: skip
    text = Path(store.root.path(folder)) / "manifest.json"
    text.write_text(json.dumps(asdict(manifest)))
    if not whole and node != "sentences":
        text.unlink()
        (place / f"{num_shards - 1:05d}.json").unlink()


def trainings(folder: Path, num_shards: int, rounds: int) -> None:
    text = folder / "many.txt"
    text.write_text("\n".join(f"{n} {one}" for n, one in enumerate(make_sentences(8 * num_shards))))
    files = {}
    for name, count in (("many", num_shards), ("few", 10)):
        place = folder / name
        place.mkdir()
        (known,) = tiny(place, place / "teacher", place / "student")["teachers"]
        file = recipe_in(
            place, f"sentences.path={text}", f"sentences.rows_per_shard={8 * num_shards // count}",
            setting("teachers", [known, known | {"name": "u", "max_length": 16}]),
            "train.objectives={listnet: {}}", "train.batch_size=64", "train.max_steps=200",
            "train.checkpoint_every_steps=1000000", "train.dev=null",
        )  # fmt: skip
        started = time.perf_counter()
        make_inputs(file)
        print(f"{name}: {count:,} shards made in {time.perf_counter() - started:.0f} s", flush=True)
        files[name] = file
    found = in_turns(rounds, {name: partial(trained, one) for name, one in files.items()})
    for figure in ("seconds_to_first_step", "ms_per_step", "open_files"):
        each = {name: [one[figure] for one in several] for name, several in found.items()}
        print(f"{figure}: {told(each)}")


def make_inputs(file: str) -> None:
    """What training reads, without Ray."""
    recipe = load_recipe(file)
    for name in ("sentences", "tokens", "embed:t", "embed:u"):
        plan = make_plan(recipe)
        (work,) = works_of([plan.graph[name]], recipe.storage, plan.folders).values()
        stage = work.node.stage
        if isinstance(stage, RowWise):
            make = stage.open(work)
            for number in work.missing_shards():
                work.put_shard(number, make(number))
            stage.finish(work)
        else:
            stage.make(work, stage.load(work))


def trained(file: str) -> dict[str, float]:
    found = subprocess.run(
        [sys.executable, "-m", "benchmarks.many_shards", "train", "--recipe", file],
        check=True,
        stdout=subprocess.PIPE,
    )
    return dict(json.loads(found.stdout.splitlines()[-1]))


def train(file: str) -> None:
    """Trains under the limit, and prints what it took."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    recipe = load_recipe(file)
    plan = make_plan(recipe)
    (work,) = works_of([plan.graph["train"]], recipe.storage, plan.folders).values()
    work.begin_again()
    times, most = [], 0

    def tell(text: str, important: bool = False, figures: Any = None) -> None:
        nonlocal most
        times.append(time.perf_counter())
        most = max(most, len(os.listdir("/proc/self/fd")))

    started = time.perf_counter()
    work = replace(work, tell=tell)
    stage = work.node.stage
    stage.make(work, stage.load(work))
    steps = recipe.train.log_every_steps * (len(times) - 2)
    print(json.dumps({
        "seconds_to_first_step": times[0] - started,
        "ms_per_step": 1000 * (times[-2] - times[0]) / steps, "open_files": most,
    }))  # fmt: skip


def command(*arguments: str) -> float:
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "pipeline.cli", *arguments], check=True, capture_output=True
    )
    return time.perf_counter() - started


def in_turns(rounds: int, runs: dict[str, Callable[[], Any]]) -> dict[str, list[Any]]:
    """What each of these gives, in every round after one that does not count."""
    found: dict[str, list[Any]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            result = run()
            if number:
                found[name].append(result)
    return found


def told(seconds: dict[str, list[float]]) -> str:
    return ", ".join(
        f"{name} {statistics.median(one):.2f} s ({min(one):.2f} to {max(one):.2f})"
        for name, one in seconds.items()
    )


if __name__ == "__main__":
    main()
