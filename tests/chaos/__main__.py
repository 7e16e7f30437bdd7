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
    return (
        f"ok, {outcome.num_compared} artifacts equal, {outcome.paid_twice} paid twice, "
        f"{outcome.stored_again} records again, {outcome.seconds:.0f} s"
    )


def summary(outcomes: list[Outcome]) -> str:
    survived = Counter(kind for one in outcomes for kind in one.survived)
    ended = Counter(kind for one in outcomes for kind in one.ended)
    again = Counter[str]()
    for one in outcomes:
        again.update(dict.fromkeys({*one.survived, *one.ended}, one.stored_again))
    lines = [f"{'fault':<16}  went on  started again  records stored again, other faults' too"]
    for kind in sorted(survived | ended):
        lines.append(f"{kind:<16}  {survived[kind]:>7}  {ended[kind]:>13}  {again[kind]:>7}")
    lines.append(
        f"{len(outcomes)} schedules: {sum(one.num_compared for one in outcomes)} artifacts equal, "
        f"{sum(one.paid_twice for one in outcomes)} answers paid twice, "
        f"{sum(one.stored_again for one in outcomes)} records stored again"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
