"""`sentray new`: from a text and a look at the machine, a recipe that runs.

It asks on a terminal only, and for nothing that a flag says. Elsewhere, and with --yes, it takes
what it would propose. Imports no torch before it times anything.
"""

import argparse
import math
import os
import shlex
import sys
from collections.abc import Callable, Collection
from pathlib import Path

from stages.errors import UserError
from stages.variables import VARIABLE

DEFAULT_MINUTES, MOST_MINUTES = "10", 100_000
MOST_ANSWERS = 3

# A question, what is proposed, and what checks an answer (or raises UserError).
Ask = Callable[[str, str, Callable[[str], object]], str]


def add_new(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the command line."""
    about = (
        "Write a recipe for a text of your own: look at the text and the machine, time some "
        "seconds of work, explain what was chosen. Asks on a terminal only."
    )
    new = commands.add_parser("new", help="write a recipe for your own text", description=about)
    new.add_argument("text", help="text (a sentence a line), CSV, TSV, JSONL, Parquet; or a folder")
    new.add_argument("--teacher", metavar="MODEL", help="folder, Hugging Face id or package:NAME")
    new.add_argument(
        "--layers", metavar="N",
        help="layers of the teacher that the student keeps; 0: a static table; auto: half, fewer "
        "where the time is short (default)",
    )  # fmt: skip
    new.add_argument(
        "--minutes", metavar="M", help=f"for a run on this machine (default: {DEFAULT_MINUTES})"
    )
    new.add_argument("--column", metavar="NAME", help="column of the text in a table")
    new.add_argument(
        "--query", metavar="NAME",
        help="column of queries (titles, questions), with --document, for a student for search",
    )  # fmt: skip
    new.add_argument("--document", metavar="NAME", help="column of the documents that answer them")
    new.add_argument("--out", metavar="FILE", help="recipe to write (default: NAME.yaml)")
    new.add_argument("--yes", action="store_true", help="ask nothing")
    new.set_defaults(command=_new)


def _new(options: argparse.Namespace) -> int:
    from pipeline.new.fit import fit
    from pipeline.new.models import read_teacher
    from pipeline.new.text import find_source, look
    from pipeline.new.write import recipe_text, screen, slug

    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    ask = _on_terminal if on_terminal and not options.yes else _as_proposed
    name = slug(Path(options.out or options.text).name.partition(".")[0], "student")
    out = Path(options.out or f"{name}.yaml")
    _check_out(out)
    source = find_source(options.text, _columns(options))
    if len(source.columns) > 1:
        columns = source.columns
        question = f"Column of the text ({', '.join(columns)})"
        column = ask(question, source.chosen["--column"], _one_of(columns))
        source = find_source(options.text, {"--column": column})
    model, others = _model(options.teacher, ask)
    _check_names(str(out), options.text, model, *source.chosen.values())
    teacher = read_teacher(model)

    def layers_of(answer: str) -> int | None:
        return _layers(answer, teacher.layers)

    question = f"Layers of the student, of {teacher.layers} (0: a static table)"
    layers, minutes = options.layers, options.minutes
    if layers is None:
        layers = ask(question, "auto", layers_of)
    if minutes is None:
        minutes = ask("Minutes for a run", DEFAULT_MINUTES, _minutes)
    kept, budget = layers_of(layers), _minutes(minutes)
    _say(f"reading {options.text}")
    found = fit(look(source), teacher, kept, budget, _say)
    flags = {"--teacher": model, "--layers": layers, "--minutes": minutes, **source.chosen}
    flags |= {} if options.out is None else {"--out": options.out}
    words = ["sentray", "new", options.text, *(word for flag in flags.items() for word in flag)]
    _write(out, recipe_text(name, str(out), shlex.join(words), found))
    print(screen(str(out), found, others))
    return 0


def _columns(options: argparse.Namespace) -> dict[str, str]:
    """The columns that flags name."""
    column, query, document = options.column, options.query, options.document
    if (query is None) != (document is None):
        raise UserError("--query and --document name the two columns of a pair; give both")
    if query is None:
        return {} if column is None else {"--column": column}
    if column is not None:
        raise UserError("--column is for one column, --query and --document for two; choose")
    if query == document:
        raise UserError(f"--query and --document are both {query}; for one column give --column")
    return {"--query": query, "--document": document}


def _model(given: str | None, ask: Ask) -> tuple[str, str]:
    """The teacher, and what is said of those that could be it instead."""
    from pipeline.new.models import NONE_AT_HAND, read_teacher, teachers_at_hand

    if given is not None:
        if not given:
            raise UserError("--teacher is empty; give a folder, a Hugging Face id or package:NAME")
        return given, ""
    at_hand = [one.model for one in teachers_at_hand()]
    if not at_hand:
        raise UserError(NONE_AT_HAND)
    if len(at_hand) == 1:
        return at_hand[0], "; the only one at hand, another: --teacher"
    print("\n".join(["Teachers at hand, smallest first:", *(f"  {one}" for one in at_hand)]))
    chosen = ask("Teacher (or a folder, a Hugging Face id)", at_hand[0], read_teacher)
    return chosen, f"; one of {len(at_hand)} at hand, another: --teacher"


def _layers(given: str, total: int) -> int | None:
    if given == "auto":
        return None
    if not given.isdecimal() or len(given) > 9 or int(given) >= total:
        raise UserError(
            f"--layers {given}: give auto, or a number from 0 to {total - 1}; all {total} are the "
            "teacher itself"
        )
    return int(given)


def _minutes(given: str) -> float:
    try:
        minutes = float(given)
    except ValueError:
        minutes = math.nan
    if not 0 < minutes <= MOST_MINUTES:
        raise UserError(
            f"--minutes {given}: give a number of minutes, such as 30, up to {MOST_MINUTES:,}"
        )
    return minutes


def _one_of(known: Collection[str]) -> Callable[[str], str]:
    def check(answer: str) -> str:
        if answer not in known:
            raise UserError(f"{answer}: there are {', '.join(known)}")
        return answer

    return check


def _as_proposed(question: str, proposed: str, check: Callable[[str], object]) -> str:
    return proposed


def _on_terminal(question: str, proposed: str, check: Callable[[str], object]) -> str:
    """An answer that `check` takes; nothing is what was proposed."""
    for _ in range(MOST_ANSWERS):
        try:
            answer = input(f"{question} [{proposed}]: ").strip() or proposed
        except EOFError:
            raise UserError(f"no answer to '{question}'; use the flags, or --yes") from None
        try:
            check(answer)
        except UserError as error:
            print(error)
        else:
            return answer
    raise UserError(f"no usable answer to '{question}'")


def _check_out(out: Path) -> None:
    """Before anything is measured: that the recipe can be written, and is not there yet."""
    if out.suffix not in (".yaml", ".yml"):
        raise UserError(f"--out {out}: a recipe's name ends in .yaml")
    if out.exists() or out.is_symlink():
        raise UserError(f"{out} is there already and is never overwritten; name another with --out")
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}")
    if not os.access(out.parent, os.W_OK | os.X_OK):
        raise UserError(f"{out}: the folder {out.parent} cannot be written to; choose --out")


def _check_names(out: str, *names: str) -> None:
    """Before anything is measured: that a recipe can hold them; `out` is in its comments alone."""
    for name in (out, *names):
        if name != out and (variable := VARIABLE.search(name)):
            raise UserError(
                f"{name}: in a recipe {variable[0]} is a variable of the environment; give another "
                "name"
            )
        if len(name.splitlines()) > 1:
            raise UserError(f"{name!r} has a line break, which a recipe cannot hold")


def _write(out: Path, content: str) -> None:
    """Writes the recipe whole, once it has been read and planned like any other.

    Raises:
        UserError: it is no recipe that runs, or cannot be written.
    """
    from pipeline.plan.plan import make_plan
    from pipeline.recipe.read import load_recipe
    from pipeline.run.runner import check_nodes

    aside = out.with_name(f".{out.stem}-{os.getpid()}.yaml")
    try:
        aside.write_text(content, encoding="utf-8")
        check_nodes(make_plan(load_recipe(str(aside))).graph.values())
        out.open("x").close()  # fails where it is there meanwhile
        aside.replace(out)
    except UserError as error:
        raise UserError(str(error).replace(str(aside), str(out))) from None
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror})") from None
    finally:
        aside.unlink(missing_ok=True)


def _say(line: str) -> None:
    print(f"... {line}", flush=True)
