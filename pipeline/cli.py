"""The command line. `plan`, `show` and a `run` with nothing to do import neither torch nor Ray."""

import argparse
import errno
import io
import os
import select
import signal
import sys
from pathlib import Path
from typing import NoReturn

from pipeline.options import add_run_options, add_set
from pipeline.run.stopping import Ended, end_process, ended_by_signals
from stages.errors import Stopped, UserError
from stages.kinds import KINDS
from stages.plain import check_scalar, for_people, printable, shortened


def command() -> NoReturn:
    """The command `sentray`. It ends as by SIGPIPE where whoever read what it prints has gone, as
    `head` does."""
    exit_code = 0
    try:
        exit_code = main()
        if sys.stdout is not None:  # as it is where it was closed from the start
            sys.stdout.flush()
    except BrokenPipeError:
        reader = select.poll()
        reader.register(sys.stdout, 0)
        if not reader.poll(0):
            raise  # another pipe's
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more
        exit_code = exit_code or 128 + signal.SIGPIPE
    end_process(exit_code)


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: 0 done, 2 the user can correct it, 75 stopped on request with its work put away,
    128 + N ended by signal N; unexpected failures keep their traceback."""
    options = _parser().parse_args(arguments)
    try:
        _check_arguments(options)
        with ended_by_signals():
            return int(options.command(options))
    except Stopped as error:
        print(f"sentray: {error}", file=sys.stderr)
        return 75
    except Ended as end:
        print("sentray: ended; run again to continue", file=sys.stderr)
        return end.exit_code
    except (UserError, OSError, ValueError, RuntimeError) as error:
        told = _told(error)
        if told is None:
            raise
        from stages.variables import hide_values

        print(f"sentray: {for_people(hide_values(told))}", file=sys.stderr)
        return 2


def _check_arguments(options: argparse.Namespace) -> None:
    """Raises UserError: what no file, model or setting can be called."""
    for name, value in vars(options).items():
        for one in value if isinstance(value, list) else [value]:
            try:
                check_scalar(one)
            except ValueError as error:
                raise UserError(f"{name.replace('_', ' ')}: {error}") from None


def _told(error: Exception) -> str | None:
    """What to tell the user, if that is who can mend it."""
    if isinstance(error, UserError):
        return "\n".join([str(error), *getattr(error, "__notes__", [])])
    if isinstance(error, OSError):
        too_long = error.errno == errno.ENAMETOOLONG
        return f"{shortened(str(error.filename))}: the name is too long" if too_long else None
    if isinstance(error, RuntimeError):
        if "home directory" not in str(error):
            return None
        return "a path begins with ~ and a user whom this machine does not know"  # pathlib's
    # settings that were made of arguments; pydantic is there where it raised
    pydantic = sys.modules.get("pydantic")
    if pydantic is None or not isinstance(error, pydantic.ValidationError):
        return None
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg'].removeprefix('Value error, ')}"


def _run(options: argparse.Namespace) -> int:
    from pipeline.recipe.read import load_recipe
    from pipeline.run.pools import read_pools
    from pipeline.run.runner import run
    from pipeline.run.student import check_published

    recipe = load_recipe(options.recipe, options.set)
    pools = read_pools(options.pools)
    busy = run(recipe, options.address, options.start, options.only, options.force, pools)
    from pipeline.report.show import show_result

    if not busy:
        print(f"{recipe.name}: nothing to do")
    print(show_result(recipe), flush=True)
    check_published(recipe)
    return 0


def _plan(options: argparse.Namespace) -> int:
    from pipeline.plan.plan import make_plan, plan_text
    from pipeline.recipe.read import load_recipe

    print(plan_text(make_plan(load_recipe(options.recipe, options.set))))
    return 0


def _tune(options: argparse.Namespace) -> int:
    from pipeline.run.pools import read_pools
    from tune.definition import Search
    from tune.page import write_report
    from tune.phases import run_search
    from tune.report import outcome_text

    search = Search(options.recipe, options.set, read_pools(options.pools))
    outcome = run_search(search, options.address, lambda line: print(line, flush=True))
    print(outcome_text(outcome))
    write_report(outcome)
    return 0


def _show(options: argparse.Namespace) -> int:
    from pipeline.report.show import show

    print(printable(show(options.what, options.storage, options.rows, options.plugin)))
    return 0


def _similarity(options: argparse.Namespace) -> int:
    from stages.ranks.similarity import load_student

    model = load_student(options.model, options.rank_weight)
    print(f"{model.similarity([options.a], [options.b])[0, 0]:.4f}")
    return 0


def _encode(options: argparse.Namespace) -> int:
    from stages.ranks.similarity import load_student, write_vectors

    target = Path(options.vectors)
    if target.suffix != ".npy":
        raise UserError(f"encode: vectors are written as .npy; give {target}.npy, or another name")
    texts = _lines(options.text)
    model = load_student(options.model, options.rank_weight, options.precision)
    if options.precision != "float32" or "WARNING" in model.encoder.arithmetic:
        print(model.encoder.arithmetic, file=sys.stderr)
    if options.kind and not model.encoder.settings.prompts:
        print(
            f"WARNING: {options.model} has no prompts, so --kind changes nothing", file=sys.stderr
        )
    number, dimensions = write_vectors(model, texts, target, options.kind)
    print(f"{number:,} vectors of {dimensions:,} dimensions -> {options.vectors}")
    return 0


def _lines(path: str) -> list[str]:
    """Lines of a text file, one sentence each."""
    try:
        if path != "-" and Path(path).is_char_device():  # /dev/zero never ends
            raise UserError(f"{path}: is a device; name a text file, or - for standard input")
        if path == "-" and isinstance(sys.stdin, io.TextIOWrapper):  # whatever the locale
            sys.stdin.reconfigure(encoding="utf-8-sig", errors="strict")
        with sys.stdin if path == "-" else open(path, encoding="utf-8-sig") as file:
            texts = [line.strip() for line in file]
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a UTF-8 text file") from None
    if not texts:
        raise UserError(f"{path}: there is no line in it")
    return texts


def _parser() -> argparse.ArgumentParser:
    from cluster.commands import add_commands
    from pipeline.compare.command import add_compare
    from pipeline.new.command import add_new
    from pipeline.upkeep.command import add_upkeep

    parser = argparse.ArgumentParser(
        prog="sentray", description="Train small sentence encoders from unlabelled text."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_new(commands)
    run = commands.add_parser("run", help="make what is missing of a recipe")
    plan = commands.add_parser("plan", help="say what run would make, and why")
    tune = commands.add_parser("tune", help="search settings of a recipe")
    for command in (run, plan, tune):
        command.add_argument("recipe", help="recipe file (YAML)")
        add_set(command)
    add_run_options(run)
    for command in (run, tune):
        command.add_argument("--address", help="Ray cluster to join; without it Ray starts here")
        command.add_argument(
            "--pools", metavar="FILE", help="which machines make which stages (docs/cluster.md)"
        )
    run.set_defaults(command=_run)
    tune.set_defaults(command=_tune)
    plan.set_defaults(command=_plan)
    show = commands.add_parser("show", help="describe a run or an artifact")
    show.add_argument("what", help="a recipe's name, or an artifact such as embed/minilm-3f9a1c2b")
    show.add_argument("--storage", default="runs", help="storage root (default: runs)")
    show.add_argument(
        "--plugin", action="append", default=[], metavar="PACKAGE",
        help="a plug-in that made the artifact, to show a sample of it",
    )  # fmt: skip
    show.add_argument("--rows", type=int, default=5, help="rows of the sample (default: 5)")
    show.set_defaults(command=_show)
    similarity = commands.add_parser("similarity", help="similarity of two sentences")
    encode = commands.add_parser("encode", help="sentences of a text file to vectors")
    for command in (similarity, encode):
        command.add_argument(
            "model",
            help="an exported student's folder, or another encoder whose files say how to pool",
        )
        command.add_argument(
            "--rank-weight", type=float, metavar="W",
            help="share of rank similarity (Eq. 7) instead of the exported one; 0: cosine alone",
        )  # fmt: skip
    similarity.add_argument("a", help="a sentence")
    similarity.add_argument("b", help="another sentence")
    similarity.set_defaults(command=_similarity)
    encode.add_argument("text", help="UTF-8 text, one sentence a line; - for standard input")
    encode.add_argument("vectors", help="file to write: .npy, float32, one row a line")
    encode.add_argument(
        "--kind", choices=KINDS, help="encode the lines as queries, or as documents: each kind "
        "has a prompt of its own",
    )  # fmt: skip
    encode.add_argument(
        "--precision", choices=("float32", "bfloat16", "float16"), default="float32",
        help="type to compute in: bfloat16 is faster where the hardware has it, and less exact",
    )  # fmt: skip
    encode.set_defaults(command=_encode)
    add_compare(commands)
    add_upkeep(commands)
    add_commands(commands)
    return parser


if __name__ == "__main__":
    command()
