"""A search of 24 configurations with ASHA against the same 24 trainings from the command line.

    SENTRAY_DATA=/path/to/data python benchmarks/search.py --steps 40

recipes/wiki-search.yaml with a batch of 64 (100,000 Wikipedia sentences, three MiniLM layers).
Sentences, teacher factors and tokens are made first and are not counted. The search is killed
(SIGKILL, Ray with it) when half of its trials have ended, and continued; its time is that of both
runs. Printed besides: what was trained twice (nothing may be), whether a teacher was asked, what a
trial costs beside its training, and the quality of what the search finds.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from measured import train_stats

from pipeline.recipe.read import load_recipe
from tune.definition import Search

FILE = "recipes/wiki-search.yaml"


def sentray(*arguments: str, storage: Path, options: argparse.Namespace) -> list[str]:
    changes = [
        f"storage={storage}", "train.batch_size=64", f"train.max_steps={options.steps}",
        f"train.dev.every_steps={options.steps // 4}",
    ]  # fmt: skip
    sets = [word for change in changes for word in ("--set", change)]
    return [sys.executable, "-m", "pipeline.cli", *arguments, *sets]


def one_after_another(search: Search, storage: Path, options: argparse.Namespace) -> float:
    started = time.monotonic()
    for number, values in enumerate(search.space.grid(), start=1):
        command = sentray("run", "recipes/wiki-rankcse.yaml", "--only", "train", storage=storage,
                          options=options)  # fmt: skip
        for key, value in (values | {"train.seed": 1}).items():
            command += ["--set", f"{key}={value}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        print(f"command line: {number} of 24, {time.monotonic() - started:.0f} s", flush=True)
    return time.monotonic() - started


def killed_and_continued(storage: Path, options: argparse.Namespace) -> float:
    """Seconds of both runs of the search."""
    command = sentray("tune", FILE, "--set", "search.confirm.settings=0", storage=storage,
                      options=options)  # fmt: skip
    log = storage / "tune/wiki-search/trials.jsonl"
    seconds = 0.0
    started = time.monotonic()
    process = subprocess.Popen(command, start_new_session=True)
    while process.poll() is None and len(ended(log)) < 12:
        time.sleep(0.2)
    assert process.poll() is None, "the search ended before it could be killed"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    seconds += time.monotonic() - started
    print(f"search killed after {seconds:.0f} s", flush=True)
    started = time.monotonic()
    process = subprocess.Popen(command)
    while process.poll() is None:  # until all are searched: testing the best is not compared
        if len({trial["fingerprint"] for trial in ended(log)}) == 24:
            break
        time.sleep(0.2)
    seconds += time.monotonic() - started
    assert process.wait() == 0
    return seconds


def ended(log: Path) -> list[dict[str, Any]]:
    """Every line about the end of a trial."""
    text = log.read_text() if log.exists() else ""
    trials = [json.loads(line) for line in text.split("\n")[:-1]]
    return [trial for trial in trials if trial["status"] != "running"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--storage", type=Path, default=Path("runs-search"))
    options = parser.parse_args()
    apart, searched = options.storage / "apart", options.storage / "searched"
    prepare = ["embed", "tokens"]
    subprocess.run(
        sentray("run", "recipes/wiki-rankcse.yaml", "--only", "sentences", storage=apart,
                options=options), check=True,
    )  # fmt: skip
    for stage in prepare:
        subprocess.run(
            sentray("run", "recipes/wiki-rankcse.yaml", "--only", stage, storage=apart,
                    options=options), check=True,
        )  # fmt: skip
    for kind in ("sentences", *prepare):
        shutil.copytree(apart / kind, searched / kind, dirs_exist_ok=True)
    search = Search(FILE, [f"storage={searched}"])
    factors = sorted(path.stat().st_mtime_ns for path in searched.glob("embed/*/manifest.json"))

    together = killed_and_continued(searched, options)
    seconds = one_after_another(search, apart, options)
    trials = ended(searched / "tune/wiki-search/trials.jsonl")
    names = [trial["fingerprint"] for trial in trials]
    overhead = sorted(trial["overhead_seconds"] for trial in trials)
    states = [trial["status"] for trial in trials]
    counts = {state: states.count(state) for state in sorted(set(states))}
    print(f"trials: {len(trials)}, {counts}")
    print(f"trained twice: {len(names) - len(set(names))}")
    after = sorted(path.stat().st_mtime_ns for path in searched.glob("embed/*/manifest.json"))
    print(f"teacher factors made by the search: {len(after) - len(factors) + (after != factors)}")
    print(f"overhead of a trial: mean {statistics.mean(overhead):.2f} s, median "
          f"{statistics.median(overhead):.2f}, largest {overhead[-1]:.2f}")  # fmt: skip
    print(f"search {together:.0f} s, one after another {seconds:.0f} s")
    print(f"that is {seconds / together:.2f} times")
    best = max(trial["score"] for trial in trials)
    every = [dev_score(apart, values, options) for values in search.space.grid()]
    print(f"best dev score: search {best:.2f}, of all 24 {max(every):.2f}")


def dev_score(storage: Path, values: dict[str, float], options: argparse.Namespace) -> float:
    """What the command line's training of one configuration reached."""
    changes = [
        f"storage={storage}", "train.batch_size=64", f"train.max_steps={options.steps}",
        f"train.dev.every_steps={options.steps // 4}", "train.seed=1",
        *(f"{key}={value}" for key, value in values.items()),
    ]  # fmt: skip
    recipe = load_recipe("recipes/wiki-rankcse.yaml", changes)
    return train_stats(recipe)["dev_spearman"]


if __name__ == "__main__":
    main()
