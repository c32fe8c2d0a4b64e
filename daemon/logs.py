"""Logging: one event per line, as text on a terminal and as JSON otherwise.

A permanent failure is logged again and again. So tracebacks are bounded, for any depth of calls and
any number of failed tasks: they must neither fill the disk nor keep the loop busy.
"""

import io
import logging
import sys
import traceback
from contextlib import suppress
from typing import Any, TextIO, cast

import structlog
from structlog.typing import ExcInfo

from daemon.settings import LogSettings
from daemon.threads import leaves

FRAMES_MAX = 12
"""Innermost frames kept of each traceback."""
ERRORS_MAX = 3
"""Errors kept of an exception group."""
LINES_MAX = 100


def bounded_traceback(error: BaseException) -> str:
    """Return the traceback of the error and its causes. A group is flattened into its errors."""
    single = leaves(error)
    parts = [_one(each) for each in single[:ERRORS_MAX]]
    if len(single) > ERRORS_MAX:
        parts.append(f"and {len(single) - ERRORS_MAX} more errors")
    lines = "\n".join(parts).split("\n")
    if len(lines) > LINES_MAX:  # the end of a traceback is the most useful part
        half = LINES_MAX // 2
        lines = [*lines[:half], f"... {len(lines) - 2 * half} lines ...", *lines[-half:]]
    return "\n".join(lines)


def _one(error: BaseException) -> str:
    told = traceback.TracebackException.from_exception(
        error, limit=-FRAMES_MAX, compact=True, max_group_width=1, max_group_depth=1
    )
    return "".join(told.format()).rstrip("\n")


def set_up_logs(settings: LogSettings, *, stream: TextIO | None = None) -> None:
    """Configure logging for the process. ``stream``: standard error by default."""
    stream = stream or cast("TextIO", _StandardError())
    is_text = settings.format == "text" or (settings.format == "auto" and stream.isatty())
    level = getattr(logging, settings.level.upper())
    renderers: list[Any] = (
        [
            structlog.dev.ConsoleRenderer(
                colors=stream.isatty(), exception_formatter=_write_traceback
            )
        ]
        if is_text
        else [
            structlog.processors.ExceptionRenderer(_traceback_of),
            structlog.processors.JSONRenderer(),
        ]
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(file=stream),
        cache_logger_on_first_use=True,
    )
    # kazoo logs each reconnection at length. The session logs the important events itself.
    logging.getLogger("kazoo").setLevel(logging.CRITICAL)


def _write_traceback(stream: TextIO, exc_info: ExcInfo) -> None:
    stream.write("\n" + _traceback_of(exc_info))


def _traceback_of(exc_info: ExcInfo) -> str:
    return bounded_traceback(exc_info[1])


class _StandardError(io.TextIOBase):
    """Writes to the current ``sys.stderr``, because loggers outlive a replacement of it.

    Errors are ignored: a log that cannot be written, for example on a full disk, must not stop the
    caller.
    """

    def write(self, text: str) -> int:
        with suppress(OSError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            sys.stderr.flush()

    def isatty(self) -> bool:
        return sys.stderr.isatty()
