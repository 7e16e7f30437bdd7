"""What one checkout of Sentray costs against another: whole runs of a recipe, in turns.

    git worktree add ../before COMMIT
    python -m benchmarks.versions ../before . recipes/quickstart.yaml --rounds 5

Every run makes everything in an empty storage, in processes of its own. Printed: medians by the
clock, and the median of the paired ratios with their range. Both checkouts use the packages of this
Python. Differences of a few percent show on an idle machine only.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="a checkout")
    parser.add_argument("after", type=Path, help="another")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--set", action="append", default=[], help="of the recipe, for both")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    found: dict[str, list[float]] = {"before": [], "after": []}
    for number in range(options.rounds + 1):
        for name in found if number % 2 else reversed(found):
            seconds = run(getattr(options, name), options.recipe, options.set)
            if number:  # the first round warms up
                found[name].append(seconds)
                print(f"{name}: {seconds:.1f} s", flush=True)
    before, after = found.values()
    ratios = [b / a for a, b in zip(before, after, strict=True)]
    print(
        f"{os.cpu_count()} cores, {options.rounds} rounds: "
        f"{statistics.median(before):.1f} s before, {statistics.median(after):.1f} s after, "
        f"ratio {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f})"
    )


def run(checkout: Path, recipe: Path, overrides: list[str]) -> float:
    """Seconds of a run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pipeline.cli", "run", str(recipe.resolve())]
        for override in (*overrides, f"storage={folder}/runs"):
            command += ["--set", override]
        environment = os.environ | {"PYTHONPATH": str(checkout.resolve())}
        started = time.perf_counter()
        subprocess.run(command, check=True, env=environment, cwd=folder, stdout=subprocess.DEVNULL)
        return time.perf_counter() - started


if __name__ == "__main__":
    main()
