"""Logging: one event per line, as text on a terminal and as JSON otherwise. Tracebacks are
bounded."""

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
    # kazoo logs each reconnection at length. We log what matters of it.
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
