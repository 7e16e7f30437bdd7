"""Runs that are killed go on where they were, and end as undisturbed ones."""

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.plan.plan import make_plan
from pipeline.recipe.read import load_recipe
from pipeline.run import hosts
from pipeline.run.board import start_board
from pipeline.run.log import RunLog
from pipeline.run.metrics import RunMetrics
from pipeline.run.progress import Progress
from pipeline.run.rows import make_rows
from pipeline.run.work import works_of
from stages.contract import RowWise
from stages.errors import UserError
from stages.recipe import Recipe
from tests.support.command import made, student_weights
from tests.support.here import make_here
from tests.support.models import make_sentences


def kill_when(sentray, process, stages, happened):
    """SIGKILL once all of `stages` have started and `happened()`; fails if the run ends before."""
    waited = {f"{stage:<16}  started" for stage in stages}
    for line in process.stdout:
        waited = {one for one in waited if one not in line}
        if not waited:
            break
    sentray.wait(process, happened)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


RANKS = [
    "ranks={corpus_size: 500, dimensions: 32}",
    "teachers.0.similarity=ranks",
    "train.objectives={infonce: {}, listnet: {}, rank_regression: {combine: sum}}",
]

# What is killed: stages that must have started, and what they have written
KILLS = [
    (["sentences", "evaluate:before:size", "evaluate:t:size"], ""),
    (["ranks:t", "evaluate:t+ranks:size"], "ranks/*/shards/*.json"),
    (["train"], "work/train/*/step-*/complete.json"),
]

PUBLISH_ONCE = ("sentences", "ranks", "train")

NUM_SHARDS = 94


def kill_and_check(sentray, recipe, stages, ledger, before):
    """Kills a run; returns what is finished, of which nothing in `before` was made again."""
    file = sentray.recipe_file(recipe)
    process = sentray.start("run", file)
    root = Path(recipe["storage"])
    kill_when(sentray, process, stages, lambda: not ledger or list(root.glob(ledger)))
    sentray.wait_for_idle()
    finished = made(recipe["storage"])
    assert before.items() <= finished.items()
    for kind in {stage.partition(":")[0] for stage in stages}.intersection(PUBLISH_ONCE):
        assert not [n for n in finished if n.startswith(kind) and n.endswith("manifest.json")]
        if "shards" in ledger:
            num_made = len([name for name in finished if name.startswith(f"{kind}/")])
            assert 0 < num_made < NUM_SHARDS
            missing = f"missing {NUM_SHARDS - num_made} of {NUM_SHARDS} shards"
            assert missing in sentray("plan", file)
    if stages == ["train"]:
        assert "continues at its newest checkpoint" in sentray("plan", file)
    return finished


@pytest.fixture
def long_recipe(tiny_recipe, tmp_path):
    """Many shards and steps, so that a kill finds work half done."""
    text = tmp_path / "many.txt"
    text.write_text("\n".join(make_sentences(64 * NUM_SHARDS)) + "\n")

    def build(*overrides):
        return tiny_recipe(
            f"sentences.path={text}", "sentences.rows_per_shard=64", "train.max_steps=80",
            "train.checkpoint_every_steps=5", "evaluate.speed=false", *overrides,
        )  # fmt: skip

    return build


@pytest.mark.thorough
def test_a_driver_killed_again_and_again_makes_the_student_of_an_undisturbed_run(
    sentray, long_recipe, tmp_path
):
    """Each victim goes on where the one before was killed."""
    recipe = long_recipe(*RANKS)
    finished = kill_and_check(sentray, recipe, *KILLS[0], {})
    sentray("run", sentray.recipe_file(recipe), "--only", "sentences")
    for kill in KILLS[1:]:
        finished = kill_and_check(sentray, recipe, *kill, finished)
    sentray("run", sentray.recipe_file(recipe))
    assert finished.items() <= made(recipe["storage"]).items()
    undisturbed = long_recipe(*RANKS, f"storage={tmp_path}/undisturbed")
    make_here(Recipe.model_validate(undisturbed), "train")
    assert student_weights(recipe["storage"]) == student_weights(undisturbed["storage"])


class Deadly:
    """A shard whose process dies once, as soon as it is stored: nobody hears that it is."""

    def __init__(self, shard, looks):
        self.files, self._num_rows, self._looks = shard.files, shard.num_rows, looks

    @property
    def num_rows(self):
        with open(self._looks, "a") as looks:  # the first look is for the record, the next after
            if looks.tell() == 1:
                os._exit(1)
            looks.write("x")
        return self._num_rows


@dataclass(frozen=True)
class Watched:
    """A row-wise stage that writes down what it makes; the third shard is deadly."""

    stage: RowWise
    folder: Path

    def passes(self):
        return [self.open]

    def open(self, work):
        make = self.stage.open(work)

        def make_shard(number):
            with open(self.folder / "made", "a") as made:
                made.write(f"{number}\n")
            shard = make(number)
            return Deadly(shard, self.folder / "looks") if number == 2 else shard

        return make_shard


@pytest.mark.thorough
def test_a_shard_that_is_stored_is_not_made_again_when_its_process_dies(
    sentray, tiny_recipe, tmp_path
):
    """Ray asks for an answer that was lost anew; the actor that was started again has it."""
    recipe = tiny_recipe("sentences.rows_per_shard=64")
    sentray("run", sentray.recipe_file(recipe), "--only", "sentences")
    plan = make_plan(load_recipe(sentray.recipe_file(recipe)))
    work = works_of([plan.graph["tokens"]], recipe["storage"], plan.folders)["tokens"]
    log = RunLog(work.root, "history/log", print)
    progress = Progress(print, log, RunMetrics("tiny")).of("tokens")
    todo = work.missing_shards()
    assert len(todo) > 3
    make_rows(work, Watched(work.node.stage, tmp_path), progress, start_board())
    assert (tmp_path / "looks").read_text() == "x"  # it died
    assert not work.missing_shards()
    assert sorted(map(int, (tmp_path / "made").read_text().split())) == todo


@dataclass(frozen=True)
class Failing:
    """A row-wise stage whose third shard cannot be made."""

    stage: RowWise
    fail: Callable[[], None]

    def passes(self):
        return [self.open]

    def open(self, work):
        make = self.stage.open(work)
        return lambda number: make(number) if number < 2 else self.fail()


def die():
    os._exit(1)


def refuse():
    raise UserError("no")


@pytest.mark.parametrize(
    ("fail", "told"), [(die, "were lost more than train.max_failures"), (refuse, "no")]
)
def test_a_failed_stage_leaves_its_cores_to_others(sentray, tiny_recipe, fail, told):
    """Its error is kept until all others are made."""
    recipe = tiny_recipe("sentences.rows_per_shard=64", "train.max_failures=0")
    sentray("run", sentray.recipe_file(recipe), "--only", "sentences")
    plan = make_plan(load_recipe(sentray.recipe_file(recipe)))
    work = works_of([plan.graph["tokens"]], recipe["storage"], plan.folders)["tokens"]
    progress = Progress(print, RunLog(work.root, "history/log", print), RunMetrics("tiny"))
    stage = Failing(work.node.stage, fail)
    with pytest.raises(UserError, match=told) as caught:
        make_rows(work, stage, progress.of("tokens"), start_board())
    sentray.wait_for_idle()
    assert caught.value


def test_work_that_waits_for_machines_says_so(sentray, tiny_recipe, monkeypatch):
    """A row-wise stage's, too: Ray would wait without a word."""
    recipe = tiny_recipe()
    plan = make_plan(load_recipe(sentray.recipe_file(recipe)))
    works = works_of([plan.graph["tokens"]], recipe["storage"], plan.folders)
    said, told = [], threading.Event()

    def say(text, **_):
        said.append(text)
        told.set()

    monkeypatch.setattr(hosts, "SECONDS_BETWEEN_LOOKS_FOR_ROOM", 0.01)
    monkeypatch.setattr(hosts, "room_for", lambda work, where: 0)
    monkeypatch.setattr(hosts, "make_rows", lambda *_: told.wait(60))
    monkeypatch.setattr(type(works["tokens"].node.stage), "finish", lambda *_: None)
    hosts.make_nodes([works["tokens"]], start_board(), lambda name: say)
    assert said == [
        "waits for machines: there is room for 0 of 1 workers of 1 core(s) and 0 GPU(s); it goes "
        "on from what is finished"
    ]
