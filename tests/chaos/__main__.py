"""Plays schedules of faults and says what became of them.

python -m tests.chaos 17                 one seed
python -m tests.chaos 0-199 --out FILE   many; a JSON line for each
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import tests.support.environment  # noqa: F401 - before what imports numpy
from tests.chaos.arena import arena_in
from tests.chaos.play import Outcome, Play


def seeds_of(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seeds", type=seeds_of, help="one number, or FIRST-LAST")
    parser.add_argument("--out", type=Path, help="file that gets a JSON line for each seed")
    given = parser.parse_args()
    failed, outcomes = [], []
    with tempfile.TemporaryDirectory() as folder, arena_in(Path(folder)) as arena:
        print(f"subjects: {', '.join(arena.subjects)}", flush=True)
        for seed in given.seeds:
            schedule = arena.draw(seed)
            play = Play(arena, schedule)
            error = ""
            try:
                play()
                outcomes.append(play.outcome)
            except Exception as reason:
                error = f"{type(reason).__name__}: {reason}"
                failed.append(seed)
                print(play.log, flush=True)
                arena.restart()
            print(f"{schedule}: {error or told(play.outcome)}", flush=True)
            if given.out:
                line = asdict(schedule) | asdict(play.outcome) | {"error": error}
                with given.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    print(summary(outcomes))
    print(f"failed: {failed or 'none'}")
    return bool(failed)


def told(outcome: Outcome) -> str:
    missed = f", missed: {', '.join(outcome.missed)}" if outcome.missed else ""
    return (
        f"ok, {outcome.num_compared} artifacts equal, {outcome.lost} answers lost, "
        f"{outcome.paid_twice} paid twice, {outcome.stored_again} records and "
        f"{outcome.steps_again} checkpoints again, {outcome.seconds:.0f} s{missed}"
    )


def summary(outcomes: list[Outcome]) -> str:
    """A line for each kind of fault; what was lost or made again is of whole schedules, so it
    counts for all their faults."""
    columns = {"went on": "survived", "started again": "ended", "missed": "missed"}
    counts = {
        title: Counter(kind for one in outcomes for kind in getattr(one, name))
        for title, name in columns.items()
    }
    sums = {"answers lost": "lost", "records again": "stored_again", "steps again": "steps_again"}
    lines = [f"{'fault':<16}" + "".join(f"{title:>15}" for title in [*counts, *sums])]
    for kind in sorted({kind for counted in counts.values() for kind in counted}):
        own = [one for one in outcomes if kind in (*one.survived, *one.ended)]
        figures = [counted[kind] for counted in counts.values()]
        figures += [sum(getattr(one, name) for one in own) for name in sums.values()]
        lines.append(f"{kind:<16}" + "".join(f"{figure:>15}" for figure in figures))
    lines.append(
        f"{len(outcomes)} schedules: {sum(one.num_compared for one in outcomes)} artifacts equal, "
        f"{sum(one.lost for one in outcomes)} answers lost, "
        f"{sum(one.paid_twice for one in outcomes)} paid twice, "
        f"{sum(one.stored_again for one in outcomes)} records and "
        f"{sum(one.steps_again for one in outcomes)} checkpoints stored again"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
