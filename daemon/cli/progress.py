"""Output of long commands: the progress line with the time left, notes, and text helpers."""

import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

import click

REMEMBERED_S = 120.0
"""The speed is that of the last two minutes: what went before says little of what comes."""
REMEMBERED_COUNT = 20
"""And of so many at least: where a few are done in two minutes, each would make it another."""
SEEN_MAX = 10_000
"""Looks that are remembered, however few were done in that time."""
LINE_INTERVAL_S = 10.0
"""Between two lines where no terminal shows one in place of the other."""


class Eta:
    """When nothing will be left, by how it became less. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=SEEN_MAX)

    def remaining_s(self, left: int, *, now_s: float, waiting: int = 0) -> float | None:
        """Take note of what is left now; None while nobody can tell. ``waiting``: what of it waits.

        While all of it does, no speed says when that is over; and that time says nothing of the
        speed afterwards.
        """
        if left and waiting >= left:
            self._seen.clear()
            return None
        while self._seen and self._seen[0][1] < left:  # more has come since
            self._seen.popleft()
        self._seen.append((now_s, left))
        while len(self._seen) > 2 and self._is_long(*self._seen[1], now_s=now_s, left=left):
            self._seen.popleft()
        first_s, first_left = self._seen[0]
        done, elapsed_s = first_left - left, now_s - first_s
        if done <= 0 or elapsed_s <= 0:
            return None
        return left * elapsed_s / done

    @staticmethod
    def _is_long(seen_s: float, seen_left: int, *, now_s: float, left: int) -> bool:
        """Whether what was seen then is enough to tell the speed by, without what was before."""
        return seen_s <= now_s - REMEMBERED_S and seen_left - left >= REMEMBERED_COUNT


class Show(Protocol):
    """Told how much is left, now and then. ``waiting``: what of it waits for something. ``beside``:
    what else a reader should know, if anything."""

    def __call__(self, left: int, *, waiting: int = 0, beside: str = "") -> None: ...


class _Line:
    """Rewritten on a terminal; anywhere else a new one now and then."""

    def __init__(self, *, stream: TextIO | None, due_s: float) -> None:
        """``due_s``: monotonic; the first one comes no sooner where it is not rewritten."""
        self._stream = stream or sys.stderr
        self._is_rewritten = self._stream.isatty()
        self._due_s = due_s
        self._is_open = False

    def write(self, text: str, *, now_s: float, is_news: bool = False) -> None:
        """``is_news``: it waits for no other line."""
        if not self._is_rewritten and now_s < self._due_s and not is_news:
            return
        self._due_s = now_s + LINE_INTERVAL_S
        if self._is_rewritten:
            self._stream.write(f"\r\x1b[K{text}")  # to the line's beginning, and clear it
            self._is_open = True
        else:
            self._stream.write(f"{text}\n")
        self._stream.flush()

    def erase(self) -> None:
        """Where it is rewritten; what was written elsewhere stands."""
        if self._is_open:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._is_open = False

    def close(self) -> None:
        """Leave the cursor on a line of its own. Any number of times."""
        if self._is_open:
            self._stream.write("\n")
            self._is_open = False


class ProgressLine:
    """How much is left, and for how long."""

    def __init__(self, unit: str, *, stream: TextIO | None = None) -> None:
        """``unit``: what is counted, as in ``ledger``."""
        self._unit = unit
        self._eta = Eta()
        self._line = _Line(stream=stream, due_s=0.0)
        self._had_beside = False

    def show(self, left: int, *, waiting: int = 0, beside: str = "") -> None:
        if not left and not beside:  # what came of it is told by others
            self._line.erase()
            return
        now_s = time.monotonic()
        remaining_s = self._eta.remaining_s(left, now_s=now_s, waiting=waiting)
        text = f"{counted(left, self._unit)} left"
        if remaining_s is not None:
            text += f", {duration_text(remaining_s)} to go"
        if beside:
            text += f"; {beside}"
        self._line.write(text, now_s=now_s, is_news=bool(beside) and not self._had_beside)
        self._had_beside = bool(beside)

    def close(self) -> None:
        """Leave the cursor on a line of its own. Any number of times."""
        self._line.close()


class CountLine:
    """How much was done, where nobody knows of how much. Not worth a line of its own at first."""

    def __init__(self, unit: str, *, stream: TextIO | None = None) -> None:
        """``unit``: as in ``ledgers read``."""
        self._unit = unit
        self._line = _Line(stream=stream, due_s=time.monotonic() + LINE_INTERVAL_S)

    def show(self, count: int) -> None:
        self._line.write(f"{count:,} {self._unit}", now_s=time.monotonic())

    def close(self) -> None:
        """Likewise."""
        self._line.close()


NODES_GO_ON = "the nodes go on with it, as soon as any run and auto-recovery is enabled"
"""Of what is marked, or ordered."""


@contextmanager
def explain_interrupt(what_stays: str) -> Iterator[None]:
    """After Ctrl-C print what stays as it is."""
    try:
        yield
    except KeyboardInterrupt:
        echo_notes([f"interrupted; {what_stays}"])
        raise


def echo_notes(lines: Iterable[str]) -> None:
    """Print notes for the operator to standard error."""
    for line in lines:
        click.echo(line, err=True)


def printable(text: str) -> str:
    """Return foreign text without characters that a terminal obeys or cannot show."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def counted(count: int, unit: str) -> str:
    """Return a count with its unit: ``1 ledger``, ``1,200 ledgers``, ``2 entries``."""
    if count == 1:
        return f"1 {unit}"
    many = f"{unit[:-1]}ies" if unit.endswith("y") else f"{unit}s"
    return f"{count:,} {many}"


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
