"""Parts of sentences: counts, durations, lists of names, and foreign text made printable."""

from collections.abc import Sequence


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
