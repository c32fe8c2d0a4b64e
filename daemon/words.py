"""Parts of sentences: counts, durations, lists of names, and foreign text made printable."""

import re
from collections.abc import Sequence

SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
DURATION_PATTERN = "(?:[0-9]+[smhd])+"
DURATION_MAX_S = 30 * 86_400
"""Longest maintenance window. The bookie's ledgers lack a copy for all that time."""
REASON_LENGTH_MAX = 200
DIGITS_MAX = 9
"""Numbers with more digits are too long in any unit."""
SHOWN_MAX = 40
"""Characters shown of a wrong duration."""


def printable(text: str) -> str:
    """Return foreign text without characters that a terminal obeys or cannot show."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def counted(count: int, unit: str) -> str:
    """Return a count with its unit: ``1 ledger``, ``1,200 ledgers``, ``2 entries``."""
    if count == 1:
        return f"1 {unit}"
    many = f"{unit[:-1]}ies" if unit.endswith("y") else f"{unit}s"
    return f"{count:,} {many}"


def shortened(names: Sequence[object], *, at_most: int) -> str:
    """Return the first names, separated by commas, and an ellipsis if there are more."""
    more = ", …" if len(names) > at_most else ""
    return ", ".join(map(str, names[:at_most])) + more


def duration_text(duration_s: float) -> str:
    """Return a duration in its two largest units."""
    seconds = max(0, round(duration_s))
    for unit, below, unit_s, below_s in (
        ("d", "h", 86_400, 3_600),
        ("h", "min", 3_600, 60),
        ("min", "s", 60, 1),
    ):
        if seconds >= unit_s:
            rest = seconds % unit_s // below_s
            return f"{seconds // unit_s} {unit}" + (f" {rest} {below}" if rest else "")
    return f"{seconds} s"


def parse_duration_s(text: str, *, least_s: int = 1) -> int:
    """Return the seconds of a duration such as ``1h30m``. Raises ValueError with a sentence."""
    shown = text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"
    if not re.fullmatch(DURATION_PATTERN, text):
        raise ValueError(f"{shown!r} is not a duration. Examples: 90s, 30m, 2h, 1h30m, 1d.")
    parts = re.findall("0*([0-9]+)([smhd])", text)
    duration_s = sum(int(number[:DIGITS_MAX]) * SECONDS[unit] for number, unit in parts)
    if any(len(number) > DIGITS_MAX for number, _ in parts) or duration_s > DURATION_MAX_S:
        raise ValueError(f"{shown!r} is too long. The longest duration is 30d.")
    if duration_s < least_s:
        raise ValueError(f"{shown!r} is too short. The shortest duration is {least_s}s.")
    return duration_s


def loss_due_text(due_ms: int, *, now_ms: int) -> str:
    """Return when an absent bookie becomes lost."""
    left_s = (due_ms - now_ms) / 1000
    return "lost now" if left_s <= 0 else f"lost in {duration_text(left_s)}"
