"""Jobs of a cluster: submitted, followed, listed, stopped.

Ray does not retry jobs. So a job's id comes from what it does: submitting the same again follows
the job that runs, or starts another that goes on where the last one stopped.
"""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ray.job_submission import JobDetails

from cluster.package import Package
from cluster.server import JobServer, Unreachable, about
from cluster.settings import ClusterSettings
from pipeline.run.passed import PAD, VARIABLE, split
from stages.errors import UserError
from stages.text import clock, user_name

Out = Callable[[str], None]
# A connection without a line for so long is made anew.
QUIET_SECONDS = 60.0
# How long a cluster may not answer before following it ends.
LOST_SECONDS = 120.0


def submit(package: Package, server: JobServer, out: Out) -> str:
    """Starts a job, or finds the one that is running already; returns its id.

    Raises:
        UserError: the cluster cannot be asked, another Ray is there, a variable is not set, or the
            id is in use.
    """
    passed = passed_variables(server.cluster)
    digest = package.digest
    same = [job for job in server.ours() if about(job).get("digest") == digest]
    for job in same:
        if not job.status.is_terminal():
            out(f"{job.submission_id} is {job.status.lower()} already, {since(job)}")
            return str(job.submission_id)
    check_ray(server)
    first = f"{package.name}-{digest[:8]}"
    # not their count, as some may have been deleted
    last = max((_number(str(job.submission_id), first) for job in same), default=0)
    job_id = f"{first}-{last + 1}" if same else first
    for setting in package.elsewhere:
        out(f"on the cluster: {setting}")
    metadata = {
        "sentray": package.arguments[0],
        "recipe": package.name,
        "user": user_name(),
        "digest": digest,
    }
    try:
        start_job(server, job_id, package, passed, metadata, out)
    except UserError:
        taken = server.job(job_id)
        if taken is None:
            raise
        if about(taken).get("digest") != digest or taken.status.is_terminal():
            raise UserError(
                f"{server.cluster.address}: the submission id {job_id} is in use by another job "
                f"({taken.entrypoint}, {taken.status.lower()}); rename the recipe"
            ) from None
        # else the same was submitted a moment ago, by another process
    out(f"submitted {job_id}" + (f", which goes on after {same[0].submission_id}" if same else ""))
    out(f"{server.cluster.address}/#/jobs/{job_id}")
    return job_id


def _number(job_id: str, first: str) -> int:
    """Which submission of the same it is: `first` is 1, `first`-2 the second."""
    said = job_id.removeprefix(f"{first}-")
    return int(said) if said.isdigit() else 1


def passed_variables(cluster: ClusterSettings) -> dict[str, str]:
    """Environment variables that a job gets from whoever submits it.

    Raises:
        UserError: one that is to be passed is not set.
    """
    unset = [name for name in cluster.pass_variables if name not in os.environ]
    if unset:
        raise UserError(
            f"pass_variables: not set here: {', '.join(unset)}; set them, or take them off the list"
        )
    return {name: os.environ[name] for name in cluster.pass_variables}


def check_ray(server: JobServer) -> None:
    """Raises UserError where the cluster's Ray is another minor version than this one."""
    import ray

    here, there = ray.__version__.split("."), server.ray_version.split(".")
    if here[:2] != there[:2]:
        raise UserError(
            f"{server.cluster.address}: Ray is {server.ray_version} there and {ray.__version__} "
            "here; install the same version on both sides"
        )


def start_job(
    server: JobServer,
    job_id: str,
    package: Package,
    passed: dict[str, str],
    metadata: dict[str, str],
    out: Out,
) -> None:
    """Uploads a package, whose size it tells first, and starts what is in it."""
    # after Ray's 3 s a job would be killed in the middle of its checkpoint
    waits = {"RAY_JOB_STOP_WAIT_TIME_S": str(server.cluster.stop_seconds)}
    environment = server.cluster.variables | waits
    if passed:
        environment[VARIABLE], package.code[PAD] = split(passed)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "package.zip"
        package.write(file)
        large = package.large()
        size = f"package: {file.stat().st_size / 1e6:,.1f} MB"
        out(f"{size}; large: {large}" if large else size)
        server.submit_job(
            entrypoint=f"{server.cluster.python} start.py",
            submission_id=job_id,
            runtime_env={"working_dir": str(file), "env_vars": environment},
            metadata=metadata,
        )


def follow(server: JobServer, job_id: str, out: Out) -> JobDetails:
    """Prints a job's log until it ends, through lost connections; returns how it ended.

    Args:
        out: takes text with its line ends.

    Raises:
        UserError: the cluster has not answered for minutes, or does not know the job any more.
    """
    shown, lost_at = 0, 0.0
    while True:
        try:
            job = server.job(job_id)
            if job is None:
                raise UserError(
                    f"{server.cluster.address} does not know {job_id} (any more): a head that was "
                    "started again has forgotten its jobs. Submit again: it goes on with what is "
                    "stored"
                )
            if job.status.is_terminal():
                if job.driver_agent_http_address:
                    out(server.get_job_logs(job_id)[shown:])
                return job
            shown = server.print_log(job_id, shown, QUIET_SECONDS, out)
            lost_at = 0.0
        except Unreachable as error:
            shown = max(shown, error.shown)
            if not lost_at:
                out(f"(connection lost, trying again: {error})\n")
                lost_at = time.monotonic()
            elif time.monotonic() - lost_at > LOST_SECONDS:
                raise UserError(
                    f"{error}. {job_id} may still run: `sentray jobs logs` follows it again"
                ) from None
            time.sleep(2)


def stop(server: JobServer, name: str, out: Out) -> None:
    """Asks a job to end, and waits until it has.

    Raises:
        UserError: there is no such job, or it has ended.
    """
    job = server.find(name)
    job_id = str(job.submission_id)
    if job.status.is_terminal():
        raise UserError(f"{job_id} has ended already: {job.status.lower()}, {since(job)}")
    out(f"stopping {job_id}; it may take up to {clock(server.cluster.stop_seconds)}")
    server.stop_job(job_id)
    while (now := server.job(job_id)) is not None and not now.status.is_terminal():
        time.sleep(0.5)
    out(f"{job_id} has ended; what is finished is kept: submit it again to go on")


def table(jobs: list[JobDetails]) -> str:
    """Jobs as lines."""
    rows = [("JOB", "RECIPE", "COMMAND", "USER", "STATUS", "")]
    for job in jobs:
        said = about(job)
        rows.append(
            (
                str(job.submission_id), said["recipe"], said["sentray"], said["user"],
                job.status.lower(), since(job),
            )
        )  # fmt: skip
    widths = [max(len(row[place]) for row in rows) for place in range(5)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False))
        + f"  {row[5]}"
        for row in rows
    )


def describe(job: JobDetails) -> str:
    """A job in some lines."""
    said = about(job)
    lines = [
        f"{job.submission_id}: {job.status.lower()}, {since(job)}",
        f"  {said['sentray']} of {said['recipe']} by {said['user']}",
    ]
    if job.status.is_terminal() and job.driver_exit_code is not None:
        lines.append(f"  exit code {job.driver_exit_code}")
    if job.message and job.status == "FAILED":
        lines += ["  " + line for line in job.message.strip().splitlines()[-5:]]
    return "\n".join(lines)


def since(job: JobDetails) -> str:
    """When it started, and how long it took or has taken."""
    if not job.start_time:
        return "not started yet"
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(job.start_time / 1000))
    end = job.end_time / 1000 if job.end_time else time.time()
    took = "took" if job.end_time else "for"
    return f"started {started}, {took} {clock(end - job.start_time / 1000)}"
