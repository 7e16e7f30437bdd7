"""`sentray evaluate` and `sentray compare`."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from stages.errors import UserError

if TYPE_CHECKING:
    from pipeline.report.figures import Results


def add_compare(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds both commands to the command line."""
    evaluate = commands.add_parser(
        "evaluate", help="test any models, without a recipe",
        description="Test encoders without a recipe, and compare them with the first one.",
    )  # fmt: skip
    evaluate.add_argument(
        "model", nargs="+",
        help="a folder, Hugging Face id, package:NAME, or the name of a run, for its student",
    )  # fmt: skip
    evaluate.set_defaults(command=_evaluate)
    compare = commands.add_parser(
        "compare", help="compare finished runs on the tests that they share",
        description="Compare the students of finished runs on the tests that they share; with "
        "--on any models on these tests, as `sentray evaluate` does.",
    )  # fmt: skip
    compare.add_argument(
        "model", nargs="+", metavar="run",
        help="names of recipes that were run; NAME:before and NAME:TEACHER for its other rows; "
        "with --on what `sentray evaluate` takes",
    )  # fmt: skip
    compare.set_defaults(command=_compare)
    for command in (evaluate, compare):
        command.add_argument(
            "--on", nargs="+", required=command is evaluate, metavar="FILE",
            help="a recipe or another YAML file with tests as under `evaluate`; or tables, told by "
            "their columns: sentence1, sentence2, score; sentence1, sentence2, label; query, "
            "candidate, label; text, label (transfer); or KIND:FILE, such as classification:my.tsv",
        )  # fmt: skip
        command.add_argument(
            "--pooling", choices=("cls", "mean", "last"),
            help="of models that do not say how they pool, such as bare transformers",
        )  # fmt: skip
        command.add_argument(
            "--max-length", type=int, metavar="N",
            help="most tokens of a test sentence (default: the file's evaluate.max_length, or 128)",
        )  # fmt: skip
        command.add_argument("--storage", default="runs", help="storage root (default: runs)")
        command.add_argument("--json", metavar="FILE", help="write figures and differences there")
        command.add_argument(
            "--page", metavar="FILE", help="write an HTML page with pictures there"
        )


def _evaluate(options: argparse.Namespace) -> int:
    from pipeline.compare.models import evaluate_models
    from pipeline.compare.tests import read_tests

    _check_files(options)
    tests = read_tests(options.on, options.max_length)

    def out(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    models, pooling = options.model, options.pooling
    results = evaluate_models(models, tests, options.storage, out, pooling)
    return _shown(results, options)


def _compare(options: argparse.Namespace) -> int:
    from pipeline.compare.runs import compare_runs

    _check_files(options)
    if len(options.model) < 2:
        raise UserError("compare: name two runs at least; `sentray show` is for one")
    if options.on:
        return _evaluate(options)
    if options.pooling or options.max_length is not None:
        raise UserError("compare: --pooling and --max-length are for models on tests; add --on")
    return _shown(compare_runs(options.model, options.storage), options)


def _shown(results: "Results", options: argparse.Namespace) -> int:
    from pipeline.report.table import differences_text, results_table

    print(results_table(results))
    if told := differences_text(results):
        print(f"\n{told}")
    if options.json is not None:
        Path(options.json).write_text(results.json(), encoding="utf-8")
    if options.page is not None:
        from pipeline.report.page import comparison
        from pipeline.store.artifacts import ArtifactStore

        page = comparison(ArtifactStore(options.storage), results)
        Path(options.page).write_text(page, encoding="utf-8")
    return 0


def _check_files(options: argparse.Namespace) -> None:
    """Before anything is computed.

    Raises:
        UserError: a file cannot be written.
    """
    # of KIND:FILE the file
    read = [name for file in options.on or [] for name in (file, file.partition(":")[2]) if name]
    taken = {os.path.realpath(name) for name in read}
    for name in ("json", "page"):
        if getattr(options, name) is None:
            continue
        given = getattr(options, name)
        file, target = Path(given), os.path.realpath(given)
        if target in taken:
            raise UserError(f"--{name} {given}: this file is named twice; write to another one")
        taken.add(target)
        try:
            is_new = not file.exists()
            file.open("a").close()
            if is_new:
                os.unlink(target)
        except OSError as error:
            raise UserError(f"--{name} {given}: cannot be written ({error.strerror})") from None
