"""Logs: one event a line, readable on a terminal, JSON otherwise. Tracebacks are bounded in both."""

import io
import logging
import sys
from contextlib import suppress
from typing import Any, TextIO, cast

import structlog
from structlog.typing import ExcInfo

from daemon.settings import LogSettings
from daemon.tracebacks import bounded_traceback


def set_up_logs(settings: LogSettings, *, stream: TextIO | None = None) -> None:
    """For the whole process; once, at its start. ``stream``: standard error where none is given."""
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
    # kazoo logs each reconnection at length; what matters of that we log ourselves.
    logging.getLogger("kazoo").setLevel(logging.CRITICAL)


def _write_traceback(stream: TextIO, exc_info: ExcInfo) -> None:
    stream.write("\n" + _traceback_of(exc_info))


def _traceback_of(exc_info: ExcInfo) -> str:
    return bounded_traceback(exc_info[1])


class _StandardError(io.TextIOBase):
    """What standard error is when something is written: loggers outlive one that was put in its place.

    A log that cannot be written, on a full disk say, is no reason to end what was logged.
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
