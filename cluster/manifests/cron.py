"""Schedules: the five fields of cron, as KubeRay reads them."""

import re

MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
DAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
# Name, least and largest number, names for its numbers.
FIELDS: tuple[tuple[str, int, int, tuple[str, ...]], ...] = (
    ("minute", 0, 59, ()),
    ("hour", 0, 23, ()),
    ("day of the month", 1, 31, ()),
    ("month", 1, 12, MONTHS),
    ("day of the week", 0, 6, DAYS),  # 7 for Sunday is not known there
)
PART = re.compile(r"(?P<first>\*|\w+)(?:-(?P<last>\w+))?(?:/(?P<step>\d+))?", re.ASCII)


def checked_schedule(schedule: str) -> str:
    """A schedule, as it was given.

    Raises:
        ValueError: not five fields, or one that names no time.
    """
    fields = schedule.split()
    if len(fields) != len(FIELDS):
        raise ValueError(
            f"'{schedule}' has {len(fields)} fields, and a schedule has five: minute, hour, day of "
            "the month, month, day of the week; '0 3 * * 1' is Monday at 3:00"
        )
    for text, (name, least, largest, names) in zip(fields, FIELDS, strict=True):
        if not all(_is_part(part, least, largest, names) for part in text.split(",")):
            more = f", or {names[0]} to {names[-1]}" if names else ""
            raise ValueError(
                f"'{schedule}': '{text}' is no {name}; write *, or numbers from {least} to "
                f"{largest}{more}, as in 1, 1,4 or 1-5, each with /STEP where you want"
            )
    return " ".join(fields)


def _is_part(part: str, least: int, largest: int, names: tuple[str, ...]) -> bool:
    found = PART.fullmatch(part)
    if found is None or (found["step"] is not None and int(found["step"]) == 0):
        return False
    if found["first"] == "*":
        return found["last"] is None
    numbers = []
    for text in (found["first"], found["last"] or found["first"]):
        if text.upper() in names:
            numbers.append(names.index(text.upper()) + least)
        elif text.isdecimal():
            numbers.append(int(text))
        else:
            return False
    return least <= numbers[0] <= numbers[1] <= largest
