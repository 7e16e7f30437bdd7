"""Commands about clusters: `submit`, `manifest`, `jobs`, `doctor`, `pull`.

Imports no Ray before one of them needs it.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.options import add_run_options, add_set, run_options
from stages.errors import UserError

if TYPE_CHECKING:
    from cluster.server import JobServer
    from cluster.settings import ClusterSettings


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds them to the command line."""
    # `submit my.yaml --cluster lab tune --set ...`: options and words in any order, which only
    # parse_intermixed_args can, and that not below a subparser. So here every word is taken.
    for name, handler, text in (
        ("submit", _submit, "run or tune a recipe on a cluster"),
        ("manifest", _manifest, "write what starts a recipe on Kubernetes, SLURM or a cloud"),
    ):
        command = commands.add_parser(name, help=text, prefix_chars="\0", add_help=False)
        command.add_argument("words", nargs=argparse.REMAINDER)
        command.set_defaults(command=handler)

    jobs = commands.add_parser("jobs", help="list, describe, follow or stop jobs of a cluster")
    actions = jobs.add_subparsers(required=True, metavar="ACTION")
    for name, handler, text in (
        ("list", _list, "jobs, newest first"),
        ("status", _status, "one job"),
        ("logs", _logs, "what a job has printed, followed until it ends"),
        ("stop", _stop, "end a job; what is finished is kept"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        if name != "list":
            action.add_argument("job", help="a job, or a recipe's name for its newest job")
        _add_cluster(action)
        action.set_defaults(command=handler)

    doctor = commands.add_parser("doctor", help="look for what is wrong with a cluster")
    doctor.add_argument("recipe", nargs="?", help="a recipe whose data and models must be there")
    _add_cluster(doctor)
    _add_storage(doctor)
    doctor.set_defaults(command=_doctor)

    pull = commands.add_parser("pull", help="fetch report, table and student from a cluster")
    pull.add_argument("name", help="a recipe's or search's name")
    pull.add_argument("--to", metavar="FOLDER", help="where to put them (default: pulled/NAME)")
    place = pull.add_mutually_exclusive_group(required=True)
    place.add_argument("--cluster", metavar="NAME", help="clusters/NAME.yaml, or a file's path")
    place.add_argument("--storage", metavar="ROOT", help="the storage root itself")
    pull.set_defaults(command=_pull)


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--cluster", metavar="NAME", help="clusters/NAME.yaml, or a file's path")
    place.add_argument("--address", metavar="URL", help="a dashboard: http://HOST:8265")


def _add_storage(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--storage", metavar="ROOT",
        help="with --address: the storage root that all machines share (s3://..., /shared/folder)",
    )  # fmt: skip


def _cluster(options: argparse.Namespace, storage: str = "/") -> "ClusterSettings":
    from cluster.settings import load_cluster, unprepared

    if options.cluster is not None:
        return load_cluster(options.cluster)
    return unprepared(options.address, storage)


def _cluster_and_storage(options: argparse.Namespace) -> "ClusterSettings":
    if options.address is not None and options.storage is None:
        raise UserError("--address needs --storage: the storage root that all machines share")
    if options.cluster is not None and options.storage is not None:
        raise UserError("--storage goes with --address; the cluster's file has its own")
    return _cluster(options, options.storage)


def _work(name: str) -> argparse.ArgumentParser:
    """The options of a command that has a recipe run or tuned somewhere else."""
    parser = argparse.ArgumentParser(prog=f"sentray {name}")
    parser.add_argument("recipe", help="recipe file (YAML)")
    parser.add_argument(
        "what", nargs="?", choices=("run", "tune"), default="run", help="default: run"
    )
    add_set(parser)
    add_run_options(parser)
    return parser


def _chosen(given: argparse.Namespace, name: str) -> list[str]:
    """What of the recipe is run."""
    chosen = run_options(given)
    if given.what == "tune" and chosen:
        raise UserError(f"{name} ... tune: {chosen[0]} is an option of `run`")
    return chosen


def _submit(options: argparse.Namespace) -> int:
    parser = _work("submit")
    _add_cluster(parser)
    _add_storage(parser)
    parser.add_argument("--detach", action="store_true", help="do not follow the job")
    given = parser.parse_intermixed_args(options.words)
    chosen = _chosen(given, "submit")
    cluster = _cluster_and_storage(given)

    from cluster.package import pack

    package = pack(given.what, given.recipe, given.set, chosen, cluster)
    server = _server(cluster)
    from cluster.jobs import submit

    job_id = submit(package, server, _say)
    return 0 if given.detach else _follow(server, job_id)


def _manifest(options: argparse.Namespace) -> int:
    parser = _work("manifest")
    parser.add_argument(
        "--cluster", metavar="NAME", required=True, help="clusters/NAME.yaml, or a file's path"
    )
    parser.add_argument(
        "--for", dest="place", required=True, choices=("kuberay", "slurm", "ray-up"),
        help="what starts it",
    )  # fmt: skip
    parser.add_argument(
        "--schedule", metavar="CRON",
        help="with kuberay: when, in five fields; '0 3 * * 1' is Monday at 3:00",
    )  # fmt: skip
    parser.add_argument("--to", metavar="FOLDER", help="where to (default: manifests/NAME)")
    given = parser.parse_intermixed_args(options.words)
    chosen = _chosen(given, "manifest")
    from cluster.manifests.make import make_manifests

    name, made = make_manifests(given, chosen, _say)
    folder = Path(given.to or f"manifests/{name}")
    made.write(folder)
    print(made.text(folder))
    return 0


def _server(cluster: "ClusterSettings") -> "JobServer":
    from stages.packages import need  # here, as it imports pyarrow

    need("cluster", "a cluster's jobs")
    from cluster.server import JobServer

    return JobServer(cluster)


def _follow(server: "JobServer", job_id: str) -> int:
    from cluster.jobs import describe, follow
    from cluster.server import about

    try:
        job = follow(server, job_id, _write)
    except KeyboardInterrupt:
        print(f"\nsentray: {job_id} goes on; `sentray jobs logs {job_id}` follows it again")
        return 130
    if job.status == "SUCCEEDED":
        print(f"\n`sentray pull {about(job)['recipe']}` fetches what it made")
        return 0
    print(f"sentray: {describe(job)}", file=sys.stderr)
    return job.driver_exit_code or 1


def _list(options: argparse.Namespace) -> int:
    jobs = _server(_cluster(options)).ours()
    from cluster.jobs import table

    print(table(jobs) if jobs else "no jobs of Sentray")
    return 0


def _status(options: argparse.Namespace) -> int:
    job = _server(_cluster(options)).find(options.job)
    from cluster.jobs import describe

    print(describe(job))
    return 0


def _logs(options: argparse.Namespace) -> int:
    server = _server(_cluster(options))
    return _follow(server, str(server.find(options.job).submission_id))


def _stop(options: argparse.Namespace) -> int:
    server = _server(_cluster(options))
    from cluster.jobs import stop

    stop(server, options.job, _say)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    cluster = _cluster_and_storage(options)
    from cluster.package import pack

    paths = pack("run", options.recipe, [], [], cluster).paths if options.recipe else []
    server = _server(cluster)
    from cluster.doctor import examine

    machines, found = examine(server, paths)
    print(f"{cluster.address}: Ray {server.ray_version}, {len(machines)} machine(s)")
    for finding in found:
        print(finding)
    if not found:
        print("nothing is wrong: storage, versions, GPUs, disks, clocks and pools are as promised")
    return 2 if any(finding.must for finding in found) else 0


def _pull(options: argparse.Namespace) -> int:
    from cluster.pull import pull
    from cluster.settings import load_cluster

    target = Path(options.to or f"pulled/{options.name}")
    if options.storage is not None:
        print(pull(options.name, options.storage, target))
        return 0
    cluster = load_cluster(options.cluster)
    with cluster.variables_set():
        print(pull(options.name, cluster.storage, target))
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


def _write(text: str) -> None:
    print(text, end="", flush=True)
