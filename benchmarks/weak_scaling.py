"""Weak scaling of embedding over Ray nodes, and what the driver pays for shards and nodes.

    SENTRAY_DATA=/path/to/data python benchmarks/weak_scaling.py
    SENTRAY_DATA=/path/to/data python benchmarks/weak_scaling.py --unpinned
    SENTRAY_DATA=/path/to/data python benchmarks/weak_scaling.py --driver

One machine embeds N Wikipedia sentences with MiniLM, two embed 2 N, in turns; efficiency is the
time of one over the time of two. A machine is a core of this one with all that runs on it: Ray's
daemons and the processes that embed; the first has the head and the driver too. `--unpinned` lets
everything run anywhere, so that one machine has a second core for Ray and the driver, and two have
none. Counted is the stage as a user waits for it, actors and loading included, Ray's own start not.

Beside it, in the same rounds, the same work in plain processes without Ray, a core each, with a
fixed half of the shards.

`--driver` makes the tokens stage in shards of eight sentences instead, which costs little besides
the bookkeeping, and reports CPU seconds of the driver's process by numbers of shards and nodes.
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections import defaultdict
from typing import Any

import ray
from ray.cluster_utils import Cluster

from pipeline.plan.plan import make_plan
from pipeline.recipe.read import load_recipe
from pipeline.run.log import RunLog
from pipeline.run.runner import make, run
from pipeline.run.session import ray_session
from pipeline.run.work import NodeWork, works_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sentences", type=int, default=16_000, help="for each node")
    parser.add_argument("--driver", action="store_true")
    parser.add_argument("--unpinned", action="store_true")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as storage:
        if options.driver:
            driver_cost(storage)
        else:
            weak_scaling(storage, options.sentences, options.rounds, not options.unpinned)


def prepared(storage: str, name: str, num_sentences: int, rows_per_shard: int):  # type: ignore[no-untyped-def]
    """A recipe whose sentences are there, and its plan."""
    recipe = load_recipe(
        "recipes/wiki-minilm.yaml",
        [
            f"storage={storage}", f"name={name}", f"sentences.limit={num_sentences}",
            f"sentences.rows_per_shard={rows_per_shard}", "sentences.max_chars=250",
            "teachers.0.max_length=128", "teachers.0.precision=float32",
        ],
    )  # fmt: skip
    run(recipe, only="sentences", out=lambda line: None)
    return make_plan(recipe)


def measured(  # type: ignore[no-untyped-def]
    plan, stage: str, num_nodes: int, pinned: bool = False
) -> tuple[float, float]:
    """Seconds, and CPU seconds of this process, to make a node of the graph on so many nodes."""
    everywhere = os.sched_getaffinity(0)
    with_first = {min(everywhere)} if pinned else everywhere
    os.sched_setaffinity(0, with_first)  # what this process starts inherits it
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    for number in range(num_nodes):
        if pinned:
            os.sched_setaffinity(0, {sorted(everywhere)[number]})
        cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    os.sched_setaffinity(0, with_first)
    node = plan.graph[stage]
    try:
        with ray_session(cluster.address):
            started, cpu_started = time.perf_counter(), time.process_time()
            with RunLog(plan.store.root, "history/scaling/log", print) as log:
                make(plan, [node], {stage}, lambda line: None, {}, "history/scaling", log)
            return time.perf_counter() - started, time.process_time() - cpu_started
    finally:
        ray.shutdown()
        cluster.shutdown()
        os.sched_setaffinity(0, everywhere)


def without_ray(plan, stage: str, num_processes: int) -> float:  # type: ignore[no-untyped-def]
    """Seconds to do the same in plain processes of one thread, loading included."""
    (work,) = works_of([plan.graph[stage]], plan.recipe.storage, plan.folders).values()
    work.store.remove(work.folder)
    todo = work.missing_shards()
    spawn = multiprocessing.get_context("spawn")
    started = time.perf_counter()
    processes = [
        spawn.Process(target=make_shards, args=(work, todo[number::num_processes]))
        for number in range(num_processes)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    seconds = time.perf_counter() - started
    assert not work.missing_shards()
    return seconds


def make_shards(work: NodeWork, todo: list[int]) -> None:
    import torch

    torch.set_num_threads(1)
    stage: Any = work.node.stage
    (open_pass,) = stage.passes()
    make_shard = open_pass(work)
    for number in todo:
        work.put_shard(number, make_shard(number))


def weak_scaling(storage: str, num_sentences: int, rounds: int, pinned: bool) -> None:
    plans = {n: prepared(storage, f"of-{n}", n * num_sentences, 1000) for n in (1, 2)}
    stage, ratios = "embed:minilm", defaultdict(list)
    for number in range(rounds):
        ray_seconds = {n: measured(plan, stage, n, pinned)[0] for n, plan in plans.items()}
        usage = plans[2].store.manifest(plans[2].folders[stage]).usage
        plain_seconds = {n: without_ray(plan, stage, n) for n, plan in plans.items()}
        print(f"round {number + 1}, {num_sentences:,} sentences for each, {usage}")
        for title, seconds in (("Ray", ray_seconds), ("without", plain_seconds)):
            ratios[title].append(seconds[1] / seconds[2])
            print(
                f"  {title:8} one {seconds[1]:.1f} s, two {seconds[2]:.1f} s: "
                f"{ratios[title][-1]:.3f}", flush=True,
            )  # fmt: skip
        ratios["both"].append(ratios["Ray"][-1] / ratios["without"][-1])
    for title, found in ratios.items():
        print(f"{title}: {statistics.median(found):.3f} ({min(found):.3f} to {max(found):.3f})")


def driver_cost(storage: str) -> None:
    for num_shards in (500, 2000):
        plan = prepared(storage, f"shards-{num_shards}", 8 * num_shards, 8)
        for num_nodes in (1, 2, 4):
            seconds, cpu = measured(plan, "tokens", num_nodes)
            print(
                f"{num_shards} shards, {num_nodes} nodes: {seconds:.1f} s, driver {cpu:.2f} s",
                flush=True,
            )
        started = time.process_time()
        make_plan(plan.recipe)
        print(f"{num_shards} shards: plan {time.process_time() - started:.2f} s")


if __name__ == "__main__":
    main()
