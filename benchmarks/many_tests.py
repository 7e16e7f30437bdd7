"""200 tests of one encoder: `sentray evaluate` beside the same tests one by one.

    SENTRAY_DATA=/path/to/data PYTHONPATH=. python benchmarks/many_tests.py MODEL [--of 10]

Every STS set of $SENTRAY_DATA/sts, by its gold scores: the 50 widest of the windows between tenths
of their range. So they share sentences, as sets of real benchmarks do. `sentray evaluate` is timed
as a whole command, with nothing made yet; beside it, in a process of its own, what a script of ten
lines does: SentenceTransformer.encode of both columns of each test, cosines, scipy's spearmanr,
after the model is loaded. Of its 200 tests every 10th (--of) is run, and its seconds are scaled by
pairs.
"""

import argparse
import csv
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

DATA = Path(os.environ["SENTRAY_DATA"])
SETS = ("STS13", "STS15", "STSB", "SICKR")
PER_SET = 50
ONE_BY_ONE = """
import json, sys, time
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import pairwise_cos_sim
model = SentenceTransformer(sys.argv[1], device="cpu")
tests, begun, found = json.load(open(sys.argv[2])), time.perf_counter(), {}
for test in tests:
    left, right = model.encode(test["left"]), model.encode(test["right"])
    found[test["name"]] = spearmanr(pairwise_cos_sim(left, right), test["gold"]).statistic
print(json.dumps({"seconds": time.perf_counter() - begun, "figures": found}))
"""


def windows(gold: np.ndarray) -> list[tuple[float, float]]:
    """Lowest and highest score of each test."""
    edges = np.round(np.linspace(gold.min(), gold.max(), 11), 4).tolist()
    pairs = sorted(itertools.combinations(range(11), 2), key=lambda one: one[0] - one[1])
    return [(edges[low], edges[high]) for low, high in pairs[:PER_SET]]


def make_tests() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """As a recipe names them, and with their rows."""
    named, rows_of = [], []
    for name in SETS:
        file = DATA / "sts" / f"{name}.tsv"
        with file.open(encoding="utf-8", newline="") as stream:
            rows = list(csv.DictReader(stream, delimiter="\t", quoting=csv.QUOTE_NONE))
        gold = np.array([float(row["score"]) for row in rows])
        for number, (low, high) in enumerate(windows(gold)):
            kept = [row for row, score in zip(rows, gold, strict=True) if low <= score <= high]
            title = f"{name}-{number}"
            named.append({"name": title, "path": str(file), "min_score": low, "max_score": high})
            rows_of.append(
                {
                    "name": title,
                    "left": [row["sentence1"] for row in kept],
                    "right": [row["sentence2"] for row in kept],
                    "gold": [float(row["score"]) for row in kept],
                }
            )
    return named, rows_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder")
    parser.add_argument("--of", type=int, default=10)
    options = parser.parse_args()
    named, rows_of = make_tests()
    some = rows_of[:: options.of]
    pairs = sum(len(test["gold"]) for test in rows_of)
    print(f"{len(named)} tests, {pairs:,} pairs")
    with tempfile.TemporaryDirectory() as folder:
        tests, figures = Path(folder) / "tests.yaml", Path(folder) / "figures.json"
        tests.write_text(yaml.safe_dump({"sts": named}))
        command = [sys.executable, "-m", "pipeline.cli", "evaluate", options.model, "--on"]
        command += [str(tests), "--storage", f"{folder}/runs", "--json", str(figures)]
        begun = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        ours = time.perf_counter() - begun
        given = Path(folder) / "rows.json"
        given.write_text(json.dumps(some))
        script = [sys.executable, "-c", ONE_BY_ONE, options.model, str(given)]
        told = subprocess.run(script, check=True, capture_output=True, text=True).stdout
        whole = json.loads(figures.read_text())["measurements"]
    ours_by_name = {one["name"]: one["value"] for row in whole for one in row["figures"]}
    theirs = json.loads(told.splitlines()[-1])
    apart = max(abs(ours_by_name[name] - 100 * x) for name, x in theirs["figures"].items())
    share = sum(len(test["gold"]) for test in some) / pairs
    scaled = theirs["seconds"] / share
    print(f"sentray evaluate: {ours:.0f} s, with loading and intervals")
    print(f"one by one: {theirs['seconds']:.0f} s for {len(some)} with {100 * share:.1f}% "
          f"of the pairs, so {scaled:.0f} s in all, {scaled / ours:.1f} times as long")  # fmt: skip
    print(f"figures of these tests are at most {apart:.3f} of 100 apart")


if __name__ == "__main__":
    main()
