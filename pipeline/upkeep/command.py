"""`sentray status`, `sentray du` and `sentray gc`."""

import argparse

from stages.errors import UserError


def add_upkeep(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the commands to the command line."""
    status = commands.add_parser("status", help="what runs are doing, or how they ended")
    status.add_argument("name", nargs="?", help="a recipe, for its newest runs (default: all)")
    status.add_argument(
        "--log", action="store_true",
        help="all that its newest run said, wherever it ran (of a search: all its runs)",
    )  # fmt: skip
    status.set_defaults(command=_status)
    du = commands.add_parser("du", help="what takes the space of a storage root")
    du.set_defaults(command=_du)
    gc = commands.add_parser(
        "gc", help="remove what no run needs any more",
        description="Say what no run of the history, no search and nobody at work needs; with "
        "--delete remove it.",
    )  # fmt: skip
    gc.add_argument(
        "--keep", nargs="+", default=[], metavar="NAME",
        help="only what the newest runs of these recipes, and these searches, need is needed",
    )  # fmt: skip
    gc.add_argument("--delete", action="store_true", help="remove it (default: only say)")
    gc.set_defaults(command=_gc)
    for command in (status, du, gc):
        command.add_argument("--storage", default="runs", help="storage root (default: runs)")


def _status(options: argparse.Namespace) -> int:
    from pipeline.upkeep.status import log_lines, status

    if options.log:
        if options.name is None:
            raise UserError("status --log: say whose log: sentray status NAME --log")
        for line in log_lines(options.storage, options.name):
            print(line)
        return 0
    print(status(options.storage, options.name))
    return 0


def _du(options: argparse.Namespace) -> int:
    from pipeline.upkeep.usage import usage_text

    print(usage_text(options.storage))
    return 0


def _gc(options: argparse.Namespace) -> int:
    from pipeline.upkeep.clearing import clear

    print(clear(options.storage, options.keep, options.delete))
    return 0
