"""What a checkpoint costs a training: written beside it, and at once.

    python -m benchmarks.checkpoints

A student of twelve layers of width 768 (0.69 GB with AdamW's moments), batches of 8 sentences. In
turns: so many steps without a checkpoint, with one that is written meanwhile, and with one that is
waited for. Reported is what the steps took more than those without, and what share that is of
`train.checkpoint_every_seconds`.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from stages.files import Root
from stages.train.checkpoint import Checkpoints
from stages.train.engine import PlainEngine
from stages.train.loop import Training
from stages.train.settings import TrainSettings
from tests.support.heads import built, token_data
from tests.support.models import make_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        model = str(make_model(place / "model", layers=12, width=768))
        student = built(model, max_length=16)
        settings = TrainSettings.model_validate(
            dict(objectives={"infonce": {}}, batch_size=8, max_steps=10**6, log_every_steps=1,
                 checkpoint_every_seconds=1e9, dev=None)
        )  # fmt: skip
        checkpoints = Checkpoints(Root(str(place / "storage")), "work")
        engine = PlainEngine(student, settings)
        training = Training(engine, settings, token_data(place, model=model), checkpoints)
        rows = training.rows()
        extra: dict[str, list[float]] = {"beside it": [], "at once": []}
        alone = []
        for number in range(options.rounds + 1):
            seconds = {}
            for how in ("none", *extra):
                started = time.perf_counter()
                if how == "at once":
                    training.save(checkpoints)
                elif how == "beside it":
                    training._save_later(checkpoints)
                for _ in range(options.steps):
                    next(rows)
                training.finish_saving()
                seconds[how] = time.perf_counter() - started
            if number:  # the first one warms up
                alone.append(seconds["none"])
                for how, found in extra.items():
                    found.append(seconds[how] - seconds["none"])
        (file,) = sorted(place.glob("storage/work/*/state.safetensors"))[-1:]
        interval = TrainSettings.model_fields["checkpoint_every_seconds"].get_default()
        print(f"{os.cpu_count()} cores, {torch.get_num_threads()} threads")
        print(
            f"{file.stat().st_size / 1e9:.2f} GB, {options.rounds} rounds of {options.steps} steps"
        )
        print(f"without: {statistics.median(alone):.2f} s ({min(alone):.2f} to {max(alone):.2f})")
        for how, found in extra.items():
            middle = statistics.median(found)
            print(
                f"{how}: {middle:.2f} s more ({min(found):.2f} to {max(found):.2f}), "
                f"{100 * middle / interval:.2f}% of {interval:.0f} s"
            )


if __name__ == "__main__":
    main()
