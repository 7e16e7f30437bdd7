"""The recipe of `sentray new` as text, the reason beside each number, and what is said of it."""

import re
import shlex
import textwrap
from collections.abc import Mapping
from typing import Any

from pipeline.new.fit import Proposal, students_name
from pipeline.new.text import LONG_CHARS, Text
from stages.evaluate.settings import EvaluateSettings
from stages.plain import yaml_line
from stages.sentences.settings import SentencesSettings
from stages.text import clock

WIDTH = 100


def recipe_text(name: str, out: str, command: str, found: Proposal) -> str:
    """The recipe's file.

    Args:
        out: its path. command: what wrote it.
    """
    title = "\n".join(
        [
            f"#   sentray run {shlex.quote(out)}",
            *_comment(
                f"Written by `{command}`: about {found.all_seconds / 60:.1f} minutes "
                f"({_times(found)}), by what was timed for seconds on a machine with "
                f"{found.machine}."
            ),
            *_comment(
                "For figures of quality"
                + ", beside the retrieval test," * bool(found.text.num_held_out)
                + " test it on pairs of your own under `evaluate`: "
                "sts: [{name: mine, path: pairs.tsv}], columns sentence1, sentence2, score."
            ),
        ]
    )
    notes = _notes(found)
    sections = [
        f"{title}\nname: {yaml_line(name)}\n",
        _section("sentences", _sentences(found), notes["sentences"]),
        _section("teachers", found.sections.teacher, notes["teacher"], "  - "),
        _section("student", found.sections.student, notes["student"]),
        _section("train", found.sections.train, notes["train"]),
        _section("evaluate", _evaluate(found), notes["evaluate"]),
    ]
    return "\n".join(sections)


def screen(out: str, found: Proposal, others: str) -> str:
    """What was chosen and why, and the next command.

    Args:
        others: what is said of other teachers.
    """
    text, plan, speed = found.text, found.schedule, found.speed
    low, high = text.middle_chars
    all_used = text.complete and plan.num_sentences >= text.num_sentences
    used = "all" if all_used else f"{plan.num_sentences:,}"
    records = f" of {text.num_records:,} records" * (text.num_records != text.num_sentences)
    records += ", cut into sentences" * text.split
    names = " and ".join(text.source.chosen.values())
    where = f" in column{'s' * text.source.has_pairs} {names}" if names else ""
    lines = {
        "text": f"{amount(text)} sentences{records}{where}, half of them of {low} to {high} "
        f"characters; {used} of them used",
        "machine": str(found.machine),
        "teacher": f"{found.teacher.model}, {found.teacher.layers} layers, "
        f"{1 / speed.seconds:,.0f} sentences/s in {speed.precision}{others}",
        "student": students_name(found.layers, found.teacher)
        + f", reads {found.lengths.student} tokens in training; another: --layers",
        "training": f"{plan.num_steps:,} steps of {found.sections.train['batch_size']}, "
        f"{found.passes:.1f} passes over the sentences",
        **(
            {"test": f"each of {text.num_held_out} held-out queries looks for its document"}
            if text.num_held_out else {}
        ),
        "time": f"about {found.all_seconds / 60:.1f} of {found.minutes:g} minutes: {_times(found)}",
    }  # fmt: skip
    shown = shlex.quote(out)
    return "\n".join(
        [
            f"{out}: a recipe for {text.source.path}",
            "",
            *(f"  {key:<9}{value}" for key, value in lines.items()),
            *(f"  warning: {line}" for line in _warnings(found)),
            "",
            f"Look at it, change what you like, then:  sentray run {shown}",
        ]
    )


def amount(text: Text) -> str:
    """How many sentences the text has, in words."""
    if not text.complete:
        return f"more than {text.num_sentences:,}"
    estimated = text.split or text.num_held_out or text.num_records > text.num_sentences
    return f"{'about ' if estimated else ''}{text.num_sentences:,}"


def slug(text: str, otherwise: str) -> str:
    """A name as recipes allow them, of 100 characters at most."""
    return re.sub(r"[^a-z0-9._-]+", "-", text.lower())[:100].strip("-._") or otherwise


def _sentences(found: Proposal) -> dict[str, Any]:
    text, source = found.text, found.text.source
    sentences: dict[str, Any] = {"path": source.path}
    if not source.told:
        sentences["source"] = source.kind
    if source.has_pairs:
        names = {flag.removeprefix("--"): column for flag, column in source.chosen.items()}
        sentences["columns"] = names
        sentences["min_chars"], sentences["max_chars"] = source.char_limits
    elif source.chosen:
        sentences["column"] = source.chosen["--column"]
    if text.num_held_out:
        sentences["holdout_pairs"] = text.num_held_out
    if text.split:
        sentences |= {"split_sentences": True, "language": "en"}
    if text.num_invalid:
        sentences["invalid_utf8"] = "reject"
    if found.schedule.num_sentences < text.num_sentences or not text.complete:
        sentences["limit"] = found.schedule.num_sentences
    if found.rows_per_shard < SentencesSettings.model_fields["rows_per_shard"].default:
        sentences["rows_per_shard"] = found.rows_per_shard
    return sentences


def _evaluate(found: Proposal) -> dict[str, Any]:
    evaluate: dict[str, Any] = {} if found.compares_speed else {"speed": False}
    longest = max(EvaluateSettings().max_length, found.lengths.teacher)
    if found.teacher.positions:
        longest = min(longest, found.teacher.positions)
    if found.text.num_held_out:
        evaluate["retrieval"] = {"kind": "columns", "num_pairs": found.text.num_held_out}
    if longest != EvaluateSettings().max_length:
        evaluate["max_length"] = longest
    return evaluate


def _notes(found: Proposal) -> dict[str, dict[str, str]]:
    """Reasons, by section and key."""
    text, teacher = found.text, found.teacher
    static, pooling = not found.layers, {"pooling": "its files name none; the mean is usual"}
    return {
        "sentences": {
            "split_sentences": f"half of the texts are over {LONG_CHARS} characters; false: whole",
            "max_chars": "documents are long",
            "min_chars": "queries are short",
            "holdout_pairs": "kept out of training, for the retrieval test",
            "language": "for the cutting into sentences; a guess",
            "invalid_utf8": f"{text.num_invalid:,} lines are not UTF-8",
            "rows_per_shard": "so that all cores have some to embed",
            "limit": f"a random sample of {amount(text)}: what fits the time",
        },
        "teacher": pooling | {
            "max_length": "99% of the sentences are no longer" if found.lengths.teacher < 256
            else "most that is taken",
            "precision": f"bfloat16 is {found.speed.gain:.1f} times as fast as float32 here, "
            f"similarities differ by {found.speed.error:.4f}",
        },
        "student": pooling | {
            "layers": "a static table of token vectors" if static else f"of {teacher.layers}",
            "head": "the vectors themselves are trained",
            "freeze_embeddings": "they are the teacher's own",
            "freeze_layers": "the first, as it is the teacher's own",
            "max_length": "in training; 95% of the sentences are no longer"
            if found.lengths.student < 128 else "in training",
        },
        "train": {
            "objectives": "each vector approaches its teacher's; no labels",
            "max_steps": f"{found.passes:.1f} passes over the sentences",
        },
        "evaluate": {
            "speed": "side by side with this teacher it would take too long",
            "max_length": "the model has no more positions"
            if _evaluate(found).get("max_length") == found.teacher.positions
            else "in tests and when exported: as much of a text as the teacher reads",
        },
    }  # fmt: skip


def _warnings(found: Proposal) -> list[str]:
    lines = []
    if found.lengths.unknown > 0.05:
        lines.append(
            f"{found.lengths.unknown:.0%} of the text's tokens are unknown to this teacher: it may "
            "not be made for this language; give another with --teacher"
        )
    if not found.teacher.names_pooling:
        lines.append("the teacher's files do not say how to pool; the mean over tokens is taken")
    if found.text.num_invalid:
        lines.append(f"{found.text.num_invalid:,} lines are not UTF-8 and will be left out")
    if found.text.num_over:
        lines.append(
            f"{found.text.num_over:,} lines are over 1 MiB and will be left out: break them into "
            "lines"
        )
    if not found.text.complete:
        lines.append(
            f"only the first {found.text.num_records:,} records were counted, and a run reads all: "
            "it takes longer than this the more there are"
        )
    longest = found.text.source.char_limits[1]
    for name, share in found.text.too_long.items():
        if share > 0.1:
            where = f" in {name}" if found.text.source.chosen else ""
            lines.append(
                f"{share:.0%} of the texts{where} are over {longest:,} characters and will be left "
                "out"
            )
    if found.all_seconds < 30 * found.minutes:
        lines.append(
            f"the text is small for {found.minutes:g} minutes: after {found.passes:.0f} passes "
            "over it more text would help more than more time"
        )
    return lines


def _times(found: Proposal) -> str:
    return ", ".join(f"{name} {clock(seconds)}" for name, seconds in found.seconds.items())


def _section(
    name: str, values: Mapping[str, Any], notes: Mapping[str, str], first: str = "  "
) -> str:
    if not values:
        return f"{name}: {{}}\n"
    lines, lead = [f"{name}:"], first
    for key, value in values.items():
        note = f"  # {notes[key]}" if key in notes else ""
        lines.append(f"{lead}{key}: {yaml_line(value)}{note}")
        lead = " " * len(first)
    return "\n".join([*lines, ""])


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent="# ", subsequent_indent="# ",
        break_on_hyphens=False, break_long_words=False,
    )  # fmt: skip
