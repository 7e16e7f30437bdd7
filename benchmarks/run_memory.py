"""Memory of a run's processes against the number of its sentences.

    PYTHONPATH=. python benchmarks/run_memory.py [--sentences 250000 1000000 4000000]

Whole runs over made-up sentences with models of a few thousand parameters, so that what grows is
what sentences cost: their file, a teacher's vectors, tokens, a training of 50 steps, tests without
labels, the export. Twice a second each process' own memory is read (anonymous pages; not mapped
files, which the system drops where it needs the room), and Ray's object store (shared pages).
Peaks, by kind of process.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.support.models import make_model, make_sentences


def recipe_of(folder: Path, model: str, text: Path) -> dict[str, Any]:
    return {
        "name": text.stem,
        "storage": str(folder / "runs"),
        "sentences": {"path": str(text)},
        "teachers": [{"name": "t", "model": model, "pooling": "mean", "max_length": 32}],
        "student": {"model": model, "layers": 1, "pooling": "mean", "head": "none", "dropout": 0},
        "train": {
            "objectives": {"vector_regression": {}}, "batch_size": 64, "max_steps": 50,
            "dev": {"every_steps": 25},
        },
        "evaluate": {"speed": False, "max_length": 32},
    }  # fmt: skip


def name_of(process: psutil.Process) -> str | None:
    """What a process is: Ray's worker of a stage by its title, None while it has no work."""
    words = process.cmdline()
    if not words or words[0] == "ray::IDLE":
        return None
    if words[0].startswith("ray::"):
        return re.split(r"[(.]", words[0])[0]
    return "driver" if "pipeline.cli" in words else "Ray's own processes"


def own_and_shared(process: psutil.Process) -> tuple[int, int]:
    """KiB of anonymous pages, and of its share of shared memory."""
    text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    of = {line.split(":")[0]: int(line.split()[1]) for line in text.splitlines()[1:]}
    return of["Pss_Anon"], of["Pss_Shmem"]


def peaks(command: list[str]) -> dict[str, float]:
    """MiB of the largest process of each kind, and of all of Ray's object store, while it runs."""
    found: dict[str, float] = defaultdict(float)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as run:
        root = psutil.Process(run.pid)
        while run.poll() is None:
            shared = 0
            for process in [root, *root.children(recursive=True)]:
                try:
                    name, (own, part) = name_of(process), own_and_shared(process)
                except (psutil.Error, OSError, KeyError):  # it has just ended
                    continue
                shared += part
                if name:
                    found[name] = max(found[name], own / 1024)
            found["object store"] = max(found["object store"], shared / 1024)
            time.sleep(0.5)
        assert run.stderr
        if run.returncode:
            raise SystemExit(run.stderr.read().decode())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sentences", type=int, nargs="+", default=[250_000, 1_000_000, 4_000_000])
    options = parser.parse_args()
    columns: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as local:
        folder = Path(local)
        model = str(make_model(folder / "model"))
        for count in options.sentences:
            text, file = folder / f"of-{count}.txt", folder / f"of-{count}.yaml"
            text.write_text("\n".join(make_sentences(count)))
            file.write_text(yaml.safe_dump(recipe_of(folder, model, text)))
            columns.append(peaks([sys.executable, "-m", "pipeline.cli", "run", str(file)]))
            print(f"{count:,} sentences done", flush=True)
    for name in sorted({name for one in columns for name in one}):
        print(f"{name:<32}", *(f"{one.get(name, float('nan')):>10.0f} MiB" for one in columns))


if __name__ == "__main__":
    main()
