"""What a chat model is asked, and how its answers are read.

An answer should be a JSON object with two text fields. Models deviate in a few ways that lose
nothing, and these are mended: code fences and prose around the object, trailing commas, curly
quotes as delimiters, Python's single quotes, other case or spaces in a field's name, a list
around the object, an object that is cut off after the rewrite. Nothing is ever evaluated.
"""

import ast
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from stages.endpoint.http import Reply, bytes_as_tokens, counted, parsed
from stages.rewrite.rewrites import Outcome
from stages.rewrite.rewriting import Rewriting, plain_field


@dataclass(frozen=True)
class Answer:
    """One answered request. Tokens as the endpoint counts them."""

    requests: ClassVar[int] = 1
    text: str
    finish_reason: str
    prompt_tokens: int
    answer_tokens: int


DECODER = json.JSONDecoder(strict=False)
REMINDERS = {
    "empty_answer": "You answered nothing.",
    "truncated": "Your answer was cut off.",
    "not_json": "Your answer was not a JSON object.",
    "missing_field": "Your answer lacked a field, or it was not text.",
}

# What a reasoning model says before its answer, if its server leaves it there: drafts, which are
# objects like the answer. Some chat templates begin it in the prompt; then an answer must follow,
# or nothing, as an answer may speak of the tag.
BEGUN = r"<think(?:ing)?>"
ENDED = r".*?</think(?:ing)?>"
THOUGHTS = re.compile(rf"^{BEGUN}{ENDED}|^(?!{BEGUN}){ENDED}(?=[^}}]*\{{|$)", re.DOTALL)


def payload(settings: Rewriting, sentence: str, bad: list[tuple[str, str]]) -> dict[str, Any]:
    """The request about a sentence.

    Args:
        bad: earlier answers that could not be used, each with its reason. They are part of the
            request, so that it is another one: the same would get the same answer again.
    """
    messages = [{"role": "user", "content": settings.prompt.format(sentence=sentence)}]
    fields = ", ".join(f'"{name}"' for name in _fields(settings))
    for answer, reason in bad:
        if answer:
            messages.append({"role": "assistant", "content": answer})
        ask = f"{REMINDERS[reason]} Answer with nothing but a JSON object with the fields {fields}."
        messages.append({"role": "user", "content": ask})
    return {
        "model": settings.model,
        "messages": messages,
        "temperature": settings.temperature,
        settings.answer_limit: settings.max_answer_tokens,
    } | settings.extra


def read_answer(settings: Rewriting, answer: Answer) -> Outcome:
    """The rewrite in an answer, or why it cannot be used (a key of `REMINDERS`)."""
    cut, ended = (answer.finish_reason == one for one in ("length", "stop"))
    said = answer.text.strip()
    text = THOUGHTS.sub("", said).strip()
    if not text:
        return Outcome(said, reason="truncated" if cut else "empty_answer")
    if not ended and re.match(BEGUN, text):  # vLLM's engine does not say why it ended
        return Outcome(said, reason="truncated")
    some = False
    for found in _objects(text):
        some = True
        fields = {plain_field(str(name)): value for name, value in found.items()}
        values = (fields.get(plain_field(name)) for name in _fields(settings))
        rewrite, *negative = (one.strip() if isinstance(one, str) else "" for one in values)
        if rewrite:
            return Outcome(rewrite, "".join(negative) or None)
    if cut_off := _cut_off(settings, text):
        return Outcome(cut_off)
    reason = "truncated" if cut else "missing_field" if some else "not_json"
    return Outcome(answer.text, reason=reason)


def _fields(settings: Rewriting) -> list[str]:
    names = [settings.rewrite_field, settings.negative_field]
    return [name for name in names if name is not None]


def _objects(text: str) -> Iterator[dict[Any, Any]]:
    """Every JSON object at the top of the text or in a list there, strict or mended."""
    start = text.find("{")
    while start >= 0:
        found, end = _object_at(text, start)
        if found is not None:
            yield found
        start = text.find("{", end)


def _object_at(text: str, start: int) -> tuple[dict[Any, Any] | None, int]:
    """The object that begins at `start`, and where to look on."""
    # a ValueError also for integers of thousands of digits
    with suppress(ValueError, RecursionError):
        return DECODER.raw_decode(text, start)
    # a closing brace inside a text is rare: try the nearest ones, not all (that would be quadratic)
    for end in [start + match.end() for match in re.finditer(r"\}", text[start:])][:4]:
        for candidate in _mended(text[start:end]):
            for parse in (DECODER.decode, ast.literal_eval):
                # a TypeError: doubled braces are a set of a dict
                with suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                    found = parse(candidate)
                    if isinstance(found, dict):
                        return found, end
    return None, start + 1


def _mended(text: str) -> Iterator[str]:
    without_comma = re.sub(r",(\s*\})", r"\1", text)
    yield without_comma
    yield re.sub(r"[“”„]", '"', without_comma)


def _cut_off(settings: Rewriting, text: str) -> str | None:
    """The rewrite of an object that ends somewhere behind it."""
    name = re.escape(settings.rewrite_field)
    match = re.search(rf'"{name}"\s*:\s*("(?:[^"\\]|\\.)*")\s*[,}}]', text, re.IGNORECASE)
    if match is None:
        return None
    with suppress(ValueError):
        return str(DECODER.decode(match.group(1))).strip() or None
    return None


def estimated_tokens(body: dict[str, Any]) -> int:
    """Prompt tokens, rather too many: see `bytes_as_tokens`, and some around every message."""
    return sum(bytes_as_tokens(message["content"]) + 8 for message in body["messages"]) + 8


def read_completion(reply: Reply, body: dict[str, Any]) -> Answer | None:
    """The answer in a chat completion to the request `body`; None where it is none.

    Tokens that it does not count are estimated: a budget must hold.
    """
    if reply.status != 200:
        return None
    whole = parsed(reply.text)
    try:
        choice = whole["choices"][0]
        content = str(choice["message"].get("content") or "")
        return Answer(
            content,
            str(choice.get("finish_reason") or ""),
            counted(whole, "prompt_tokens", estimated_tokens(body)),
            counted(whole, "completion_tokens", bytes_as_tokens(content) + 1),
        )
    except (KeyError, IndexError, TypeError, AttributeError):
        return None
