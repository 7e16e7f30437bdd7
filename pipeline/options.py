"""Options of the command line that several commands take."""

import argparse


def add_set(parser: argparse.ArgumentParser) -> None:
    """`--set`, of all commands that read a recipe."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help="override a setting, e.g. train.batch_size=128",
    )  # fmt: skip


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """What of a recipe is made, or made again."""
    parser.add_argument(
        "--from", dest="start", metavar="STAGE", help="make it and what follows again"
    )
    parser.add_argument("--only", metavar="STAGE", help="make nothing but this stage")
    parser.add_argument(
        "--force", action="append", default=[], metavar="STAGE", help="make this stage again"
    )


def run_options(options: argparse.Namespace) -> list[str]:
    """The options of `add_run_options`, as they are written."""
    found = [f"--from={options.start}"] if options.start is not None else []
    found += [f"--only={options.only}"] if options.only is not None else []
    return found + [f"--force={stage}" for stage in options.force]
