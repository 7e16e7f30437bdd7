"""What many trials leave behind: the driver's memory, and the storage.

    python benchmarks/search_memory.py --trials 200

Trains a student of a few thousand parameters for two steps in each trial (random configurations, no
early stopping) and prints, every so many trials, the driver's resident memory, the size of the
storage root and the number of trials that keep their weights; then what a trial costs beside its
training.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import psutil
import yaml

from tests.support.data import write_sts
from tests.support.models import make_model, make_sentences
from tune.definition import Search
from tune.phases import run_search
from tune.trial_queue import TrialQueue
from tune.trials import Trial, TrialLog


def write_recipe(folder: Path, trials: int) -> str:
    (folder / "text.txt").write_text("\n".join(make_sentences(300)))
    write_sts(folder / "sts.tsv")
    model = str(make_model(folder / "model"))
    recipe = {
        "name": "stub",
        "storage": str(folder / "runs"),
        "sentences": {"path": str(folder / "text.txt")},
        "student": {"model": model, "pooling": "mean", "max_length": 16},
        "train": {
            "objectives": {"infonce": {}}, "batch_size": 16, "max_steps": 2,
            "dev": {"sts": [{"name": "dev", "path": str(folder / "sts.tsv")}], "every_steps": 1},
        },
        "evaluate": {"speed": False, "max_length": 48},
        "search": {
            "space": {"train.learning_rate": {"loguniform": [1e-5, 1e-2]}}, "trials": trials,
            "scheduler": "none", "confirm": {"settings": 0},
        },
    }  # fmt: skip
    file = folder / "stub.yaml"
    file.write_text(yaml.safe_dump(recipe))
    return str(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--every", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as local:
        folder = Path(local)
        search = Search(write_recipe(folder, options.trials))
        end = TrialQueue.end

        def counted(queue: TrialQueue, fingerprint: str, **facts: object) -> Trial:
            trial = end(queue, fingerprint, **facts)
            number = sum(1 for _ in queue.log)
            if number % options.every == 0:
                memory = psutil.Process().memory_info().rss / 2**20
                files = [path for path in (folder / "runs").rglob("*") if path.is_file()]
                size = sum(path.stat().st_size for path in files) / 2**20
                weights = sum(path.suffix == ".safetensors" for path in files)
                print(
                    f"{number:4} trials  driver {memory:.1f} MiB  storage {size:.2f} MiB in "
                    f"{len(files)} files, {weights} with weights",
                    flush=True,
                )
            return trial

        TrialQueue.end = counted  # type: ignore[assignment, method-assign]
        run_search(search, None, lambda line: None)
        overhead = [t.overhead_seconds for t in TrialLog(search.store.root, search.folder)]
    overhead.sort()
    print(
        f"overhead of a trial: median {statistics.median(overhead):.2f} s, mean "
        f"{statistics.mean(overhead):.2f} s, largest {overhead[-1]:.2f} s"
    )


if __name__ == "__main__":
    main()
