"""Row-wise stages on Ray Data: actor pools over shard numbers. The ledger of shards is ours."""

import gc
import logging
import os
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import ray

from pipeline.run.board import (
    asked_of,
    begin,
    machine_is_leaving,
    poster,
    tell_stumbles,
    wait_until_told,
)
from pipeline.run.losses import LOST, first_line, too_many
from pipeline.run.meter import Meter
from pipeline.run.placement import Place, assigned_cores, place_of, use_assigned_cores
from pipeline.run.progress import NodeProgress
from pipeline.run.work import NodeWork
from pipeline.store.copies import used_meanwhile
from pipeline.store.manifest import NO_USAGE, Usage, shard_line
from stages.contract import RowWise, Shard
from stages.errors import Stopped, StorageSilent, UserError
from stages.text import clock

# What a shard that nobody began says instead of an error.
STOPPED = "stopped"
# How often an actor asks whether its machine leaves; all actors ask one process of Ray's head.
SECONDS_BETWEEN_LOOKS = 5.0


class ShardActor:
    """Ray Data's view of a pass: rows of shard numbers in, the same with row counts out.

    A user error travels as data: Ray Data would otherwise retry it or wrap it beyond reading.
    """

    def __init__(
        self,
        work: NodeWork,
        open_pass: Callable[[NodeWork], Callable[[int], Shard | None]],
        board: Any,
    ) -> None:
        use_assigned_cores()
        self._open, self._board = open_pass, board
        self._at_work, self._idle_since = threading.Lock(), time.monotonic()
        threading.Thread(target=self._leave, daemon=True).start()
        self._make: Callable[[int], Shard | None] | None = None
        self._meter = Meter(assigned_cores())
        self._restarted = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        tell_stumbles(work.name, board)
        tell = poster(work.name, board, once=True)
        self._work = replace(work, tell=tell, stopping=asked_of(board), meter=self._meter)

    def _leave(self) -> None:
        """Ends this process once its machine is taken away and its shard is made.

        Ray Data gives it nothing more then, but keeps it, and may have no other.
        """
        while not machine_is_leaving():
            time.sleep(SECONDS_BETWEEN_LOOKS)
        while True:
            with self._at_work:
                if time.monotonic() - self._idle_since > 1.0:  # the last answer has been sent
                    os._exit(0)  # Ray starts it again elsewhere
            time.sleep(0.2)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        with self._at_work:
            result = self._result(row)
            self._idle_since = time.monotonic()
        return result

    def _result(self, row: dict[str, Any]) -> dict[str, Any]:
        if row.get("error"):  # of the pass before
            return row
        number, rows, record = int(row["shard"]), 0, b""
        usage = Usage(*(row.get(field.name, 0) for field in fields(Usage)))  # of the passes before
        try:
            if self._work.stopping():
                raise Stopped
            # its process died, and with it answers that nobody had fetched yet
            if self._restarted and (made := self._work.finished_shard(number)):
                return _answer(number, made.num_rows, made.usage, record=shard_line(made))
            if self._make is None:
                begin(self._work.name, self._board)
                self._make = self._open(self._work)
                wait_until_told(self._board)
            with used_meanwhile():
                shard = self._make(number)
            usage += self._meter.lap()
            if shard is not None:
                record = self._work.store_shard(number, shard, usage)
                rows = shard.num_rows
            return _answer(number, rows, usage, record=record)
        except Stopped:
            return _answer(number, 0, usage, STOPPED)
        except UserError as error:
            silent = isinstance(error, StorageSilent)
            return _answer(number, 0, usage, str(error), silent=silent)


def _answer(
    number: int,
    rows: int,
    usage: Usage,
    error: str = "",
    record: bytes = b"",
    silent: bool = False,
) -> dict[str, Any]:
    """A row of Ray Data's; record: a finished shard's line; silent: the error is StorageSilent."""
    told = {"shard": number, "rows": rows, "error": error, "record": record, "silent": silent}
    return told | asdict(usage)


class Pace:
    """How fast shards are made now: since the last one of the first half of the time.

    Before the first shard there are cores to wait for and models to load, which the estimate of a
    long stage's end should forget.
    """

    def __init__(self) -> None:
        self._marks = deque([(0.0, 0, 0)])

    def after(self, seconds: float, shards: int, rows: int) -> tuple[float, float]:
        """Shards and rows a second, once this many are made in all, after these seconds."""
        self._marks.append((seconds, shards, rows))
        while self._marks[1][0] <= seconds / 2:
            self._marks.popleft()
        begun, shards_before, rows_before = self._marks[0]
        passed = seconds - begun
        return (shards - shards_before) / passed, (rows - rows_before) / passed


def make_rows(work: NodeWork, stage: RowWise, progress: NodeProgress, board: Any) -> None:
    """Makes the missing shards.

    A machine that is lost may end all of Ray Data's work (its actors are "unavailable", for which
    Ray has no retry). Then what is missing is begun again; losses without a shard between them
    count against `train.max_failures`.

    Raises:
        UserError: there were too many of them.
    """
    losses, missing, where = 0, work.missing_shards(), place_of(work)
    while missing:
        try:
            _make_missing(missing, work, where, stage, progress, board)
        except Exception as error:
            _let_go(error)
            if not isinstance(error, (*LOST, ray.exceptions.RaySystemError)):
                raise
            before, missing = missing, work.missing_shards()
            losses = losses + 1 if len(missing) == len(before) else 1
            if losses > work.node.retries:
                if isinstance(error, LOST):
                    raise too_many(work.name, error) from error
                raise
            said = f"a machine or process was lost ({first_line(error)[:120]}); goes on"
            progress(said, important=True)
        else:
            return


def _let_go(error: BaseException) -> None:
    """Ends the actors of a dataset that failed, whatever keeps its error.

    They live as long as somebody refers to them: the frames of the error do, and Ray Data's own
    cycles. They would keep their cores, and whoever needs those would wait for ever.
    """
    one: BaseException | None = error
    while one is not None:
        traceback.clear_frames(one.__traceback__)
        one = one.__cause__ or one.__context__
    gc.collect()


def _make_missing(
    todo: Sequence[int],
    work: NodeWork,
    where: Place,
    stage: RowWise,
    progress: NodeProgress,
    board: Any,
) -> None:
    """Makes these shards: each goes through the passes, one actor pool for each."""
    from ray.data import ActorPoolStrategy, DataContext

    total = len(work.expected_rows())
    passes = stage.passes()
    # our own lines say how far it is, and what fails is raised: it would print a trace besides
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    DataContext.get_current().enable_progress_bars = False
    # Ray Data gives it no more than there is; machines that join later are used so
    most = min(len(todo), where.slots) if where.labels else len(todo)
    share = 1.0 if where.slots >= len(passes) else 1 / len(passes)  # all must fit at once
    results: Any = ray.data.from_items(
        [{"shard": number} for number in todo], override_num_blocks=len(todo)
    )
    # no other way to say this exists in Ray 2.60; pyproject.toml stays below 2.64
    warnings.filterwarnings("ignore", message="`ray_remote_args_fn` is deprecated")
    retries = work.node.retries
    for open_pass in passes:
        results = results.map(
            ShardActor,
            fn_constructor_args=(work, open_pass, board),
            compute=ActorPoolStrategy(min_size=1, max_size=most, initial_size=1),
            num_cpus=where.cpus * share,
            num_gpus=where.gpus * share,
            label_selector=where.labels,
            ray_remote_args_fn=lambda: dict.fromkeys(("max_restarts", "max_task_retries"), retries),
        )
    started, pace = time.monotonic(), Pace()
    rows, taken, stopped = 0, NO_USAGE, False
    for made, result in enumerate(results.iter_rows(), start=1):
        if result["error"] == STOPPED:
            stopped = True
            continue
        if result["error"]:
            raise (StorageSilent if result["silent"] else UserError)(result["error"])
        work.note_finished(result["record"])
        usage = Usage(*(result[field.name] for field in fields(Usage)))
        rows, taken = rows + result["rows"], taken + usage
        seconds, done = time.monotonic() - started, total - len(todo) + made
        shards_per_second, rows_per_second = pace.after(seconds, made, rows)
        progress.made(result["rows"], 1, usage)
        progress(
            f"{done}/{total} shards  {rows:,} rows  {rows_per_second:,.0f} rows/s  "
            f"ETA {clock((len(todo) - made) / shards_per_second)}",
            figures={
                "shards": done,
                "num_shards": total,
                "rows_per_second": rows_per_second,
                "processes_busy": taken.seconds / seconds,
                "padding_share": taken.padding_share,
            },
        )
    work.finish_segments()
    if stopped:
        raise Stopped
