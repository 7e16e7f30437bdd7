"""Ray: where nodes run. Row-wise nodes on Ray Data actor pools over shard ids, training under Ray
Train (DeepSpeed) or as a Ray task (one device), everything else as Ray tasks.

Nothing home-made schedules, retries or moves data. What is ours is the ledger of shards and the
checkpoints, so a worker that dies costs its open shard, or the steps since its last checkpoint.
"""

import errno
import logging
import os
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # read when Ray is imported

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.graph import ROW_WISE
from pipeline.job import Job, Say, clock, missing_shards, row_source
from pipeline.perturbation import (
    TranslationFilter,
    TranslationWorker,
    make_offline_rewriting,
    make_pairs,
    make_rewriting,
    publish_rewrites,
    source_of,
)
from pipeline.work import MAKERS, ShardWorker, make_training
from stages.errors import UserError
from stages.ranks.corpus import sample_rows
from stages.train.settings import batch_too_large

GPU_KINDS = ("embed", "translate")


@contextmanager
def ray_session(address: str | None) -> Iterator[None]:
    """Joins the cluster at `address` (or the job's own), else starts Ray on this machine.

    Within a session another one is the same.

    Raises:
        UserError: nothing answers at `address`.
    """
    if ray.is_initialized():
        yield
        return
    environment = {"env_vars": {"TOKENIZERS_PARALLELISM": "false", "RAY_AIR_NEW_OUTPUT": "0"}}
    os.environ.setdefault("RAY_TRAIN_ENABLE_STATE_TRACKING", "0")
    address = address or os.environ.get("RAY_ADDRESS")
    if address is not None:
        _check_reachable(address)
    try:
        with _silent_stderr():
            ray.init(
                address=address or "local",
                runtime_env=environment,
                logging_level=logging.ERROR,
                log_to_driver=False,
            )
    except (ConnectionError, ValueError, RuntimeError) as error:
        if address is None:
            raise
        raise UserError(
            f"--address {address}: no Ray cluster can be joined there ({error}). Check the address "
            "and, if the cluster asks for a token, RAY_AUTH_MODE and RAY_AUTH_TOKEN."
        ) from None
    try:
        yield
    finally:
        # after an error other nodes may still run: Ray Data would print a trace for each of them
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raises UserError within seconds where `ray.init` would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise UserError(
            f"--address {address}: no Ray cluster can be joined there ({error}). Check the address "
            "and that the cluster runs."
        ) from None


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Ray's C++ core announces its log level on stderr at every start; Python errors still rise."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@ray.remote(num_cpus=0)
class Board:
    """Collects what workers say until the driver takes it."""

    def __init__(self) -> None:
        self._news: list[tuple[str, str, bool]] = []
        self._errors: dict[str, UserError] = {}

    def post(self, node: str, text: str, important: bool) -> None:
        self._news.append((node, text, important))

    def post_error(self, node: str, error: UserError) -> None:
        self._errors[node] = error

    def error(self, node: str) -> UserError | None:
        return self._errors.get(node)

    def take(self) -> list[tuple[str, str, bool]]:
        news, self._news = self._news, []
        return news


def start_board() -> Any:
    """The board, on the driver's machine while that lives, and started again if it is lost."""
    here = ray.get_runtime_context().get_node_id()
    near = NodeAffinitySchedulingStrategy(here, soft=True)
    options = {"scheduling_strategy": near, "max_restarts": -1, "max_task_retries": -1}
    return Board.options(**options).remote()  # type: ignore[attr-defined]


def poster(job: Job, board: Any) -> Say:
    """What a worker says goes to the board."""

    def say(text: str, important: bool = False) -> None:
        board.post.remote(job.node.name, text, important)

    return say


def make_node(job: Job, board: Any, say: Say) -> None:
    """Makes one node on Ray and returns when it is published.

    Raises:
        UserError: as the stage raised it, without Ray's wrapping.
    """
    if job.node.kind in ("embed", "tokens", "train"):
        _check_sizes(job)
    if job.node.kind == "translate":
        with _CHAIN:
            _make_rows(job, say, [partial(TranslationWorker, back=back) for back in (False, True)])
        job.publish({})
    elif job.node.kind == "perturb":
        _perturb(job, board, say)
    elif job.node.kind in ROW_WISE:
        _make_rows(job, say, [ShardWorker])
        job.publish({})
    elif job.node.kind == "train":
        if job.recipe.train.resolved_engine == "plain":
            _train_plain(job, board)
        else:
            train_deepspeed(job, board)
    else:
        computes = job.node.kind in ("evaluate", "speed") or job.node.name == "corpus:after"
        options = {
            "num_cpus": 1,
            "num_gpus": 1 if computes and ray.cluster_resources().get("GPU") else 0,
            "max_retries": job.recipe.train.max_failures,
        }
        _task(_make, options, job, board)


def _check_sizes(job: Job) -> None:
    """Says as soon as the sentences are counted what would else be found hours later."""
    num_rows = row_source(job).manifest.num_rows
    if job.recipe.train.batch_size > num_rows:
        raise batch_too_large(job.recipe.train.batch_size, num_rows)
    if job.recipe.ranks is not None:
        sample_rows(num_rows, job.recipe.ranks)


def _task(
    function: Callable[..., None], options: dict[str, Any], job: Job, board: Any, *more: Any
) -> None:
    remote = ray.remote(**options)(function)
    try:
        ray.get(remote.remote(job, board, *more))
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, UserError):
            raise cause from None
        if isinstance(cause, OSError) and cause.errno == errno.ENOSPC:
            raise UserError(
                f"{job.node.name}: the disk of the temporary folder is full. Free some space or "
                "set TMPDIR to a larger place, and run again to continue."
            ) from None
        raise


def _make(job: Job, board: Any) -> None:
    use_assigned_cores()
    MAKERS[job.node.kind](job, poster(job, board))


def use_assigned_cores() -> None:
    """As many torch threads as Ray gave this process cores, and no GPU that it did not give."""
    if not ray.get_gpu_ids():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # read when torch first asks for a GPU
    import torch

    cores = ray.get_runtime_context().get_assigned_resources().get("CPU", 1)
    torch.set_num_threads(max(1, int(cores)))


class ShardActor:
    """Ray Data's view of a worker: rows of shard numbers in, the same with row counts out.

    A user error travels as data: Ray Data would otherwise retry it or wrap it beyond reading.
    """

    def __init__(self, job: Job, build: Callable[[Job], Callable[[int], int]]) -> None:
        use_assigned_cores()
        self._job = job
        self._build = build
        self._worker: Callable[[int], int] | None = None

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        if row.get("error"):  # of the pass before
            return row
        try:
            if self._worker is None:
                self._worker = self._build(self._job)
            return {"shard": row["shard"], "rows": self._worker(int(row["shard"])), "error": ""}
        except UserError as error:
            return {"shard": row["shard"], "rows": 0, "error": str(error)}


# Only one node at a time may chain pools: the first passes of several could take all the cores
# and wait for second passes that never get one.
_CHAIN = threading.Lock()
# Two nodes that ask the same model may ask the same: the second one finds the first one's answers.
_ASKING: dict[str, threading.Lock] = {}


def _perturb(job: Job, board: Any, say: Say) -> None:
    source, _ = source_of(job)
    retries = {"max_retries": job.recipe.train.max_failures}
    if source.pairs is not None:
        _task(_make_with, {"num_cpus": 1} | retries, job, board, make_pairs)
    elif source.backtranslation is not None:
        _make_rows(job, say, [TranslationFilter])
        publish_rewrites(job, say)
    elif source.rewriting is not None and source.rewriting.engine == "vllm":
        with _asking(source.rewriting.model):
            make_offline_rewriting(job, say)
    else:
        assert source.rewriting is not None
        from stages.perturb.endpoint import read_key, read_variables

        key, variables = read_key(source.rewriting), read_variables(source.rewriting)
        # it waits for a network: no core is set aside for that
        with _asking(source.rewriting.model):
            _task(_make_with, {"num_cpus": 0} | retries, job, board, make_rewriting, key, variables)


def _asking(model: str) -> threading.Lock:
    return _ASKING.setdefault(model, threading.Lock())


def _make_with(job: Job, board: Any, make: Callable[..., None], *more: Any) -> None:
    make(job, poster(job, board), *more)


def _make_rows(job: Job, say: Say, passes: Sequence[Callable[[Job], Callable[[int], int]]]) -> None:
    """Makes the missing shards: each goes through the passes, one actor pool for each."""
    from ray.data import ActorPoolStrategy, DataContext

    todo, total = missing_shards(job)
    if todo:
        logging.getLogger("ray.data").setLevel(logging.ERROR)  # our own lines say how far it is
        DataContext.get_current().enable_progress_bars = False
        cores = ray.cluster_resources().get("CPU", 1)
        gpus = ray.cluster_resources().get("GPU", 0) if job.node.kind in GPU_KINDS else 0
        most = min(len(todo), max(1, int(gpus or cores)))
        share = 1.0 if (gpus or cores) >= len(passes) else 1 / len(passes)  # all must fit at once
        results: Any = ray.data.from_items(
            [{"shard": number} for number in todo], override_num_blocks=len(todo)
        )
        # no other way to say this exists in Ray 2.60; pyproject.toml stays below 2.64
        warnings.filterwarnings("ignore", message="`ray_remote_args_fn` is deprecated")
        retries = job.recipe.train.max_failures
        for build in passes:
            results = results.map(
                ShardActor,
                fn_constructor_args=(job, build),
                compute=ActorPoolStrategy(min_size=1, max_size=most, initial_size=1),
                num_cpus=share if not gpus else min(1.0, cores / len(passes)),
                num_gpus=share if gpus else 0,
                ray_remote_args_fn=lambda: dict.fromkeys(
                    ("max_restarts", "max_task_retries"), retries
                ),
            )
        started = time.monotonic()
        rows = 0
        for made, result in enumerate(results.iter_rows(), start=1):
            if result["error"]:
                raise UserError(result["error"])
            rows += result["rows"]
            seconds = time.monotonic() - started
            say(
                f"{total - len(todo) + made}/{total} shards  {rows:,} rows  "
                f"{rows / seconds:,.0f} rows/s  ETA {clock((len(todo) - made) * seconds / made)}"
            )


def _train_plain(job: Job, board: Any) -> None:
    settings = job.recipe.train
    cores, gpus = worker_resources(job)
    options = {"num_cpus": cores, "num_gpus": gpus, "max_retries": settings.max_failures}
    _task(_train_plain_here, options, job, board)


def _train_plain_here(job: Job, board: Any) -> None:
    from stages.train.engine import PlainEngine

    use_assigned_cores()
    make_training(job, PlainEngine, poster(job, board))


def worker_resources(job: Job) -> tuple[int, int]:
    """Cores and GPUs of one training worker.

    Raises:
        UserError: the cluster can never give that much at once.
    """
    settings = job.recipe.train
    have = ray.cluster_resources()
    workers = settings.num_workers
    gpus = settings.gpus_per_worker
    if gpus is None:
        gpus = 1 if have.get("GPU", 0) >= workers else 0
    nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]

    def fitting(cores: int) -> int:
        return sum(node // cores for node in nodes)

    cores = settings.cpus_per_worker or max(1, min(max(nodes), sum(nodes) // workers))
    if settings.cpus_per_worker is None:
        while cores > 1 and fitting(cores) < workers:  # workers do not span machines
            cores -= 1
    if fitting(cores) < workers or gpus * workers > have.get("GPU", 0):
        raise UserError(
            f"train: {workers} worker(s) with {cores} core(s) and {gpus} GPU(s) each do not fit "
            f"into this cluster ({sum(nodes)} cores, {int(have.get('GPU', 0))} GPUs); "
            "lower train.num_workers, cpus_per_worker or gpus_per_worker"
        )
    return cores, gpus


def train_deepspeed(
    job: Job, board: Any, make: Callable[[Job, Any, Say], None] = make_training
) -> None:
    """Runs `make` on every training worker, in a process group of them."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchConfig, TorchTrainer

    settings = job.recipe.train
    cores, gpus = worker_resources(job)
    # Ray's own record of the run is scratch: checkpoints are ours (stages/train/checkpoint.py)
    root = job.store.root
    scratch = f"work/ray/{job.node.fingerprint[:8]}-{time.time_ns()}"
    trainer = TorchTrainer(
        _train_deepspeed_here,
        train_loop_config={"job": job, "board": board, "make": make},
        torch_config=TorchConfig(backend="nccl" if gpus else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=settings.num_workers,
            use_gpu=gpus > 0,
            resources_per_worker={"CPU": cores} | ({"GPU": gpus} if gpus else {}),
        ),
        run_config=RunConfig(
            name="train",
            storage_path=root.path(scratch),
            storage_filesystem=root.fs,
            failure_config=FailureConfig(max_failures=settings.max_failures),
        ),
    )
    try:
        trainer.fit()
    except TrainingFailedError:
        error = ray.get(board.error.remote(job.node.name))
        if error is None:
            raise
        raise error from None
    finally:
        root.delete(scratch)


def _train_deepspeed_here(config: dict[str, Any]) -> None:
    import torch

    job, board = config["job"], config["board"]
    if error := ray.get(board.error.remote(job.node.name)):
        raise error  # a restart cannot mend what the user must
    cores, gpus = worker_resources(job)
    torch.set_num_threads(cores)
    os.environ["OMP_NUM_THREADS"] = str(cores)
    # DeepSpeed compiles an operator at its first start and looks for ninja on the PATH
    os.environ["PATH"] = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
    if not gpus:
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    from stages.train.engine import DeepSpeedEngine

    deepspeed.init_distributed(dist_backend="nccl" if gpus else "gloo", auto_mpi_discovery=False)
    try:
        config["make"](job, DeepSpeedEngine, poster(job, board))
    except UserError as error:
        ray.get(board.post_error.remote(job.node.name, error))
        raise  # so that Ray Train ends the other workers, which may wait for this one
