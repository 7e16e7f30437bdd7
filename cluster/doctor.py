"""`sentray doctor`: is a cluster fit for work? A small job looks around on every machine."""

import json
import time

from cluster.findings import Finding, findings
from cluster.jobs import check_ray, passed_variables, start_job
from cluster.package import Package, add_sentray
from cluster.probe import MARK
from cluster.server import JobServer
from stages.errors import UserError
from stages.text import user_name

# For the job to start; a cluster that needs longer is full, or broken.
WAIT_SECONDS = 300.0


def examine(server: JobServer, paths: list[str]) -> tuple[list[str], list[Finding]]:
    """Looks around on every machine of a cluster.

    Args:
        paths: what recipes read there.

    Returns:
        the machines' addresses, and what is wrong.

    Raises:
        UserError: no job can be run there at all.
    """
    check_ray(server)
    cluster = server.cluster
    asked = json.dumps({"storage": cluster.storage, "paths": paths})
    package = Package("doctor", [asked], module="cluster.probe")
    if cluster.sentray == "sent":
        add_sentray(package)
    job_id = f"doctor-{user_name()}-{time.time_ns() // 10**6}"
    start_job(server, job_id, package, passed_variables(cluster), {}, lambda line: None)
    _wait(server, job_id)
    log = server.get_job_logs(job_id)
    told = [line for line in log.splitlines() if line.startswith(MARK)]
    if not told:
        raise UserError(
            f"{cluster.address}: a small job failed there: {_last_line(log) or 'no output'}"
        )
    server.delete_job(job_id)
    facts = json.loads(told[-1].removeprefix(MARK))
    return [node["address"] for node in facts["nodes"]], findings(facts, cluster)


def _wait(server: JobServer, job_id: str) -> None:
    begun = time.monotonic()
    while (job := server.job(job_id)) is None or not job.status.is_terminal():
        if time.monotonic() - begun > WAIT_SECONDS:
            server.stop_job(job_id)
            raise UserError(
                f"{server.cluster.address}: a job that needs nothing has not ended after "
                f"{WAIT_SECONDS:.0f} s; look at the head's dashboard and its logs"
            )
        time.sleep(0.5)
    if job.status == "FAILED" and job.driver_exit_code is None:
        raise UserError(f"{server.cluster.address}: a small job failed there: {job.message}")


def _last_line(log: str) -> str:
    lines = [line for line in log.splitlines() if line.strip()]
    return lines[-1] if lines else ""
