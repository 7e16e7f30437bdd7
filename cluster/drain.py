"""What a machine does before it goes: its work is put away first.

    python -m cluster.drain ray-head       asks the head's jobs to end, and waits until they have
    python -m cluster.drain ray-worker     a machine that joined one: Ray gives it nothing more,
                                           trainings move on, open shards are finished; waits for it

Kubernetes calls it as a pod's preStop hook, and ends what has not ended after the pod's
terminationGracePeriodSeconds; a cloud's spot notice, or whoever takes a machine away, may too.
"""

import logging
import os
import socket
import subprocess
import sys
import time

DASHBOARD = "http://127.0.0.1:8265"
PORT = 6379
# Deadline that Ray is told, in seconds; nothing of Sentray's depends on it.
NOTICE_SECONDS = 120


def main(arguments: list[str]) -> int:
    if arguments == ["ray-head"]:
        _end_jobs()
    else:
        _leave(os.environ["FQ_RAY_IP"])  # set by KubeRay: the head's name or address
    return 0


def _end_jobs() -> None:
    from cluster.server import JobServer
    from cluster.settings import ClusterSettings

    server = JobServer(ClusterSettings(address=DASHBOARD, storage="/"))
    running = [
        str(job.submission_id)
        for job in server.list_jobs()
        if job.submission_id and not job.status.is_terminal()
    ]
    for job_id in running:
        server.stop_job(job_id)
    while any(not server.get_job_status(job_id).is_terminal() for job_id in running):
        time.sleep(1)


def _leave(head: str) -> None:
    """Until nothing is at work here, or the head is gone, which then has ended its jobs."""
    import ray

    ray.init(address=f"{head}:{PORT}", logging_level=logging.ERROR, log_to_driver=False)
    node = ray.get_runtime_context().get_node_id()
    command = [
        "ray", "drain-node", f"--address={head}:{PORT}", f"--node-id={node}",
        "--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=the machine is taken away",
        f"--deadline-remaining-seconds={NOTICE_SECONDS}",
    ]  # fmt: skip
    told = False
    while _answers(head):
        # a busy head may not take it at once, and nothing would ever end here
        told = told or subprocess.run(command, check=False).returncode == 0
        if told and not _is_at_work(node):
            return
        time.sleep(0.5)


def _is_at_work(node: str) -> bool:
    """Whether a machine's cores or GPUs are taken."""
    import ray

    free = ray._private.state.available_resources_per_node().get(node, {})
    whole = next(one["Resources"] for one in ray.nodes() if one["NodeID"] == node)
    return any(free.get(kind, 0.0) < whole.get(kind, 0.0) for kind in ("CPU", "GPU"))


def _answers(head: str) -> bool:
    try:
        socket.create_connection((head, PORT), timeout=5).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
