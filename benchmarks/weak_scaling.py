"""Weak scaling of embedding over Ray nodes, and what the driver pays for shards and nodes.

    SENTRAY_DATA=/path/to/data python benchmarks/weak_scaling.py
    SENTRAY_DATA=/path/to/data python benchmarks/weak_scaling.py --driver

Every Ray node has one core (`ray.cluster_utils`, all on this machine, the head has none). One node
embeds N Wikipedia sentences with MiniLM, two embed 2 N, in turns; efficiency is the time of one
over the time of two. Counted is the stage as a user waits for it, actors and loading included,
Ray's own start not.

`--driver` makes the tokens stage in shards of eight sentences instead, which costs little besides
the bookkeeping, and reports CPU seconds of the driver's process by numbers of shards and nodes.
"""

import argparse
import os
import statistics
import tempfile
import time

from ray.cluster_utils import Cluster

from pipeline.plan.plan import make_plan
from pipeline.recipe.read import load_recipe
from pipeline.run.runner import make, run
from pipeline.run.session import ray_session


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sentences", type=int, default=16_000, help="for each node")
    parser.add_argument("--driver", action="store_true")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as storage:
        if options.driver:
            driver_cost(storage)
        else:
            weak_scaling(storage, options.sentences, options.rounds)


def prepared(storage: str, name: str, num_sentences: int, rows_per_shard: int):  # type: ignore[no-untyped-def]
    """A recipe whose sentences are there, and its plan."""
    recipe = load_recipe(
        "recipes/wiki-minilm.yaml",
        [
            f"storage={storage}", f"name={name}", f"sentences.limit={num_sentences}",
            f"sentences.rows_per_shard={rows_per_shard}", "teachers.0.max_length=128",
            "teachers.0.precision=float32",
        ],
    )  # fmt: skip
    run(recipe, only="sentences", out=lambda line: None)
    return make_plan(recipe)


def measured(plan, stage: str, num_nodes: int) -> tuple[float, float]:  # type: ignore[no-untyped-def]
    """Seconds, and CPU seconds of this process, to make a node of the graph on so many nodes."""
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    for _ in range(num_nodes):
        cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    node = plan.graph[stage]
    try:
        with ray_session(cluster.address):
            started, cpu_started = time.perf_counter(), time.process_time()
            make(plan, [node], {stage}, lambda line: None, {}, "history/scaling")
            return time.perf_counter() - started, time.process_time() - cpu_started
    finally:
        cluster.shutdown()


def weak_scaling(storage: str, num_sentences: int, rounds: int) -> None:
    plans = {n: prepared(storage, f"of-{n}", n * num_sentences, 1000) for n in (1, 2)}
    ratios = []
    for number in range(rounds):
        seconds = {n: measured(plan, "embed:minilm", n)[0] for n, plan in plans.items()}
        ratios.append(seconds[1] / seconds[2])
        usage = plans[2].store.manifest(plans[2].folders["embed:minilm"]).usage
        print(
            f"round {number + 1}: one node {seconds[1]:.1f} s for {num_sentences:,}, two "
            f"{seconds[2]:.1f} s for {2 * num_sentences:,}: {ratios[-1]:.3f} ({usage})"
        )
    median = statistics.median(ratios)
    print(f"weak scaling 1 to 2: {median:.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


def driver_cost(storage: str) -> None:
    for num_shards in (500, 2000):
        plan = prepared(storage, f"shards-{num_shards}", 8 * num_shards, 8)
        for num_nodes in (1, 2, 4):
            seconds, cpu = measured(plan, "tokens", num_nodes)
            print(f"{num_shards} shards, {num_nodes} nodes: {seconds:.1f} s, driver {cpu:.2f} s")
        started = time.process_time()
        make_plan(plan.recipe)
        print(f"{num_shards} shards: plan {time.process_time() - started:.2f} s")


if __name__ == "__main__":
    main()
