"""What a pod does before Kubernetes ends it: its jobs put their work away first.

    python -m cluster.drain ray-head       asks the head's jobs to end, and waits until they have
    python -m cluster.drain ray-worker     waits until the head is gone, which still needs it

Kubernetes ends whatever has not ended after the pod's terminationGracePeriodSeconds.
"""

import os
import socket
import sys
import time

DASHBOARD = "http://127.0.0.1:8265"
PORT = 6379


def main(arguments: list[str]) -> int:
    if arguments == ["ray-head"]:
        _end_jobs()
    else:
        _wait_for_head(os.environ["FQ_RAY_IP"])  # set by KubeRay
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


def _wait_for_head(host: str) -> None:
    while True:
        try:
            socket.create_connection((host, PORT), timeout=5).close()
        except OSError:
            return
        time.sleep(2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
