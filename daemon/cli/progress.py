"""Output of long commands: the progress line with the time left, and notes."""

import shutil
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TextIO

import click

from daemon.words import counted, duration_text
from ledgers.errors import SessionLostError

REMEMBERED_S = 120.0
"""Time over which the speed is measured. Earlier progress says little about the time left."""
REMEMBERED_COUNT = 20
"""Minimum number of items over which the speed is measured, even if they took longer. With fewer
items the speed would vary too much."""
SEEN_MAX = 10_000
"""Maximum number of samples that are kept."""
LINE_INTERVAL_S = 10.0
"""Time between two progress lines if the output is no terminal."""
SAME_INTERVAL_S = 300.0
"""The same, if the second line says what the first one said."""


class Eta:
    """Estimates the remaining time from how fast the remaining count falls. Times are monotonic."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=SEEN_MAX)

    def remaining_s(self, left: int, *, now_s: float, waiting: int = 0) -> float | None:
        """Record how much is left now, and return the remaining time; None if it is unknown.

        ``waiting``: how many of the remaining items wait for something else than work. If all of
        them do, the remaining time is unknown, and the time until work resumes does not count for
        the speed.
        """
        if left and waiting >= left:
            self._seen.clear()
            return None
        while self._seen and self._seen[0][1] < left:  # more items have come since
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
        """Return True if the samples from this one on suffice to measure the speed."""
        return seen_s <= now_s - REMEMBERED_S and seen_left - left >= REMEMBERED_COUNT


class Line:
    """A progress line: rewritten on a terminal, elsewhere a new line every few seconds.

    A context manager, which moves the cursor to a new line at the end.
    """

    def __init__(self, *, stream: TextIO | None = None, due_s: float = 0.0) -> None:
        """``due_s``: monotonic time before which no line is written unless the output is a
        terminal."""
        self._stream = stream or sys.stderr
        self._is_rewritten = self._stream.isatty()
        self._due_s = due_s
        self._text = ""
        self._is_open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def write(self, text: str, *, now_s: float, is_news: bool = False) -> None:
        """Write the text. ``is_news``: write it even if the last line is recent."""
        due_s = self._due_s
        if text == self._text:
            due_s += SAME_INTERVAL_S - LINE_INTERVAL_S
        if not self._is_rewritten and now_s < due_s and not is_news:
            return
        self._due_s, self._text = now_s + LINE_INTERVAL_S, text
        if self._is_rewritten:
            # Return to the start of the line and clear it. A text that wraps could not be cleared.
            self._stream.write(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}")
            self._is_open = True
        else:
            self._stream.write(f"{text}\n")
        self._stream.flush()

    def erase(self) -> None:
        """Erase the line if the output is a terminal. A file or a pipe keeps all lines."""
        if self._is_open:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._is_open = False

    def close(self) -> None:
        """Move the cursor to a new line. May be called any number of times."""
        if self._is_open:
            self._stream.write("\n")
            self._is_open = False


class ProgressLine(Line):
    """Shows how many ledgers are left, or other units, and the remaining time."""

    def __init__(self, *, unit: str = "ledger", stream: TextIO | None = None) -> None:
        super().__init__(stream=stream)
        self._unit = unit
        self._eta = Eta()
        self._had_beside = False

    def show(self, left: int, *, waiting: int = 0, beside: str = "") -> None:
        if not left and not beside:  # the caller reports the result
            self.erase()
            return
        now_s = time.monotonic()
        remaining_s = self._eta.remaining_s(left, now_s=now_s, waiting=waiting)
        text = f"{counted(left, self._unit)} left"
        if remaining_s is not None:
            text += f", {duration_text(remaining_s)} to go"
        if beside:
            text += f"; {beside}"
        self.write(text, now_s=now_s, is_news=bool(beside) and not self._had_beside)
        self._had_beside = bool(beside)

    def note(self, text: str) -> None:
        """Print a note for the operator on a line of its own."""
        self.close()
        echo_notes([text])


NODES_GO_ON = "nodes continue the work while auto-recovery is enabled"
"""Notice at the interruption of a command: what happens to marked ledgers and given orders."""


@contextmanager
def explain_interrupt(what_stays: str) -> Iterator[None]:
    """Print which changes stay, on Ctrl-C and if ZooKeeper stops answering."""
    try:
        yield
    except KeyboardInterrupt:
        echo_notes([f"Interrupted. {what_stays}"])
        raise
    except SessionLostError:
        echo_notes([f"Check ZooKeeper, and run the command again. {what_stays}"])
        raise


def echo_notes(lines: Iterable[str]) -> None:
    """Print notes for the operator to standard error."""
    for line in lines:
        click.echo(line, err=True)
