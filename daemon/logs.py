"""Logging: one event per line, as text on a terminal and as JSON otherwise.

A permanent failure is logged again and again. So tracebacks are bounded, for any depth of calls and
any number of failed tasks: they must neither fill the disk nor keep the loop busy.
"""

import io
import logging
import os
import sys
import traceback
from contextlib import suppress
from typing import Any, TextIO, cast

import structlog
from prometheus_client import Counter
from structlog.typing import EventDict, ExcInfo, WrappedLogger

from daemon.settings import LogSettings
from daemon.threads import leaves

log = structlog.get_logger()

LOGGED = Counter(
    "bookmender_log_events_total",
    "Log events of level warning and error, by event. docs/log-events.md explains the errors.",
    ["level", "event"],
)

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
                colors=stream.isatty() and not os.environ.get("NO_COLOR"),
                exception_formatter=_write_traceback,
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
            count_event,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(file=stream),
        cache_logger_on_first_use=False,  # a reload may change the level of all loggers
    )
    # kazoo logs each reconnection at length. The session logs the important events itself.
    logging.getLogger("kazoo").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").addHandler(_LOOP_FAILURES)


class _LoopFailures(logging.Handler):
    """Logs errors that asyncio reports, such as a failed callback, as an event. Without it, they
    would be written as text between JSON lines."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        log.error("loop.callback_failed", error=record.getMessage(), exc_info=error)


_LOOP_FAILURES = _LoopFailures(level=logging.ERROR)


def count_event(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Count a warning or an error. A structlog processor. Events are fixed strings, a few dozen."""
    if event["level"] in ("warning", "error", "critical"):
        LOGGED.labels(level=event["level"], event=event["event"]).inc()
    return event


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
