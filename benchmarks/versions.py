"""What one checkout of Sentray costs against another: whole runs of a recipe, in turns.

    git worktree add ../before COMMIT
    python -m benchmarks.versions ../before . recipes/quickstart.yaml --rounds 5

Every run makes everything in an empty storage, in processes of its own. Printed: wall time and the
time that all of its processes computed, Ray's included, as medians, and the median of the paired
ratios with their range. Both checkouts use the packages of this Python.
"""

import argparse
import ctypes
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36  # prctl(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="a checkout")
    parser.add_argument("after", type=Path, help="another")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--set", action="append", default=[], help="of the recipe, for both")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    # whatever Ray leaves behind becomes a child of this process, and is waited for
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    found: dict[str, list[tuple[float, float]]] = {"before": [], "after": []}
    for number in range(options.rounds + 1):
        for name in found if number % 2 else reversed(found):
            measured = run(getattr(options, name), options.recipe, options.set)
            if number:  # the first round warms up
                found[name].append(measured)
                print(f"{name}: {measured[0]:.1f} s, {measured[1]:.1f} s of CPU", flush=True)
    print(f"{os.cpu_count()} cores, {options.rounds} rounds")
    for place, what in enumerate(("wall time", "CPU time")):
        before, after = ([one[place] for one in found[name]] for name in ("before", "after"))
        ratios = [b / a for a, b in zip(before, after, strict=True)]
        print(
            f"{what}: {statistics.median(before):.1f} s before, {statistics.median(after):.1f} s "
            f"after, ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        )


def run(checkout: Path, recipe: Path, overrides: list[str]) -> tuple[float, float]:
    """Seconds of a run by the clock, and of the CPU in all of its processes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pipeline.cli", "run", str(recipe.resolve())]
        for override in (*overrides, f"storage={folder}/runs"):
            command += ["--set", override]
        environment = os.environ | {"PYTHONPATH": str(checkout.resolve())}
        before, started = _cpu_seconds(), time.perf_counter()
        subprocess.run(command, check=True, env=environment, cwd=folder, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - started
        while True:
            try:
                os.wait()
            except ChildProcessError:
                return seconds, _cpu_seconds() - before


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
