"""``bookmender status --watch``: shows the state again and again, or why there is no new one.

On a terminal each state replaces the one before; elsewhere each is a block of lines.
"""

import asyncio
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import click

from daemon.admin_session import admin_session
from daemon.cli.session import log_errors_only
from daemon.operations.history import time_text
from daemon.settings import Settings
from daemon.status.gathering import gather_status
from daemon.status.report import to_text
from daemon.status.state import Status
from daemon.words import duration_text, printable
from ledgers.errors import BookmenderError, SessionLostError

ANSWER_S = 4.0
"""A reading that takes longer, and three times as long as the one before, has failed."""


def watch(settings: Settings, *, interval_s: int, paint: Callable[[str], str]) -> NoReturn:
    """Show the state until Ctrl-C. ``paint``: adds colours."""
    log_errors_only(settings)
    with _screen(paint) as show:
        asyncio.run(watch_each(settings, interval_s, show))
    raise AssertionError  # it ends by Ctrl-C only


async def watch_each(settings: Settings, interval_s: int, show: Callable[[str], None]) -> NoReturn:
    """Show each state, and why there is no new one."""
    last: Status | None = None
    while True:
        try:
            async with admin_session(settings) as cluster:
                took_s = ANSWER_S
                while True:
                    began_s = time.monotonic()
                    try:
                        async with asyncio.timeout(max(ANSWER_S, 3 * took_s)):
                            last = await gather_status(cluster)
                    except TimeoutError:
                        show(_stale_text(last, "ZooKeeper does not answer"))
                    else:
                        took_s = time.monotonic() - began_s
                        show(f"{to_text(last)}\n\nstate of {time_text(last.taken_ms)}")
                    await asyncio.sleep(interval_s)
        except (BookmenderError, SessionLostError) as error:
            show(_stale_text(last, str(error)))
            await asyncio.sleep(interval_s)


def _stale_text(last: Status | None, problem: str) -> str:
    """Return why there is no new state, and how old the last one is."""
    lines = [f"UNKNOWN  The state cannot be read: {printable(problem)}."]
    if last is not None:
        age = duration_text(time.time() - last.taken_ms / 1000)
        lines += [f"The last state is {age} old ({time_text(last.taken_ms)}):", ""]
        lines += [f"    {line}".rstrip() for line in to_text(last).splitlines()]
    return "\n".join(lines)


@contextmanager
def _screen(paint: Callable[[str], str]) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a text: in place of the last one, if the output is a terminal."""

    def replace(text: str) -> None:
        columns, rows = shutil.get_terminal_size()
        lines = [
            wrapped
            for line in text.splitlines()
            for wrapped in textwrap.wrap(line, columns, subsequent_indent=" " * 10) or [""]
        ]
        if len(lines) > rows:
            lines = [*lines[: rows - 1], f"… {len(lines) - rows + 1} more lines: bookmender status"]
        shown = paint("\n".join(lines)).replace("\n", "\x1b[K\n")
        click.echo(f"\x1b[H{shown}\x1b[K\x1b[J", nl=False)

    if not sys.stdout.isatty():
        yield lambda text: click.echo(f"{text}\n")
        return
    try:
        click.echo("\x1b[?1049h\x1b[?25l", nl=False)  # another screen, without a cursor
        yield replace
    finally:
        click.echo("\x1b[?25h\x1b[?1049l", nl=False)
