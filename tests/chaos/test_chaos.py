"""Some schedules of faults; `python -m tests.chaos 0-199` plays many, and says more."""

import json

import pytest

from tests.chaos.arena import arena_in
from tests.chaos.play import Play
from tests.chaos.schedule import Fault, Schedule


@pytest.fixture(scope="module")
def arena(tmp_path_factory):
    with arena_in(tmp_path_factory.mktemp("chaos")) as found:
        yield found


def play(arena, schedule):
    if schedule.storage == "disk" and (why := arena.storages["disk"].why_not):
        pytest.skip(f"no disk that can be full: {why}")
    playing = Play(arena, schedule)
    try:
        return playing()
    except AssertionError as error:
        error.add_note(playing.log)
        raise


def one(storage, subject, *faults, again=False):
    timed = tuple(Fault(kind, after) for kind, after in faults)
    return Schedule(0, storage, subject, again, False, timed)


# All kinds of faults, where they hurt most
SCHEDULES = [
    one("s3", "endpoint:far", ("outage", (0.2, 0.0)), ("kill worker", (0.5, 0.0))),
    one("s3", "perturb:chat", ("stop driver", (0.3, 0.0)), ("kill both runs", (0.5, 0.3))),
    one("disk", "perturb:chat", ("full disk", (0.5, 0.0)), ("move clock", (0.6, 0.0))),
    one("s3", "embed:t", ("stumble", (0.0, 0.0)), ("lose cluster", (0.4, 0.3)), again=True),
    one("disk", "endpoint:far", ("kill driver", (0.2, 0.0)), ("freeze worker", (0.4, 0.0))),
    one("s3", "train by two", ("second run", (0.2, 0.0)), ("lose node", (0.5, 0.0))),
    # of a node whose driver publishes it: a worker would end what its frozen driver began
    one("disk", "embed:t", ("kill overtaker", (0.2, 0.0)), ("freeze driver", (0.5, 0.0))),
    one("disk", "embed:t", ("read-only disk", (0.4, 0.0))),
]


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_what_a_run_makes_through_faults_is_what_it_makes_undisturbed(arena, schedule):
    outcome = play(arena, schedule)
    assert schedule.faults[0].kind not in outcome.missed


@pytest.mark.thorough
def test_a_schedule_notices_what_is_not_as_it_must_be(arena):
    """Else no other one could fail."""
    playing = Play(arena, one("disk", "tokens"))
    playing.run()
    playing.check()
    root = arena.storages["disk"].root
    (folder,) = arena.subjects["tokens"].made
    record, manifest = f"{folder}/shards/00001.json", f"{folder}/manifest.json"
    data = f"{folder}/{json.loads(root.read(record))['files']['ids.npy']['path']}"
    for path, old, new, message in (
        (data, root.read(data)[-1:], b"\xff", "is damaged"),
        (record, b'"num_rows": 40', b'"num_rows": 39', ""),
        (manifest, b'"num_rows": [40', b'"num_rows": [39', r"num_rows\[0\]: 39 instead of 40"),
    ):
        content = root.read(path)
        place = content.rindex(old) if path == data else content.index(old)
        root.write(path, content[:place] + new + content[place + len(old) :])
        with pytest.raises(AssertionError, match=message):
            playing.check()
        root.write(path, content)
    playing.check()
    arena.endpoints[0].answered["an answer"] += 2
    with pytest.raises(AssertionError, match="2 answers were lost"):
        playing.check()
    root.write("answers/some.jsonl", 2 * b'{"key": "00"}\n')
    with pytest.raises(AssertionError, match="1 answers were paid twice"):
        playing.check()
