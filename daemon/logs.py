"""Logs: one event a line, readable on a terminal, JSON otherwise."""

import io
import logging
import sys
from typing import Any, TextIO, cast

import structlog

from daemon.settings import LogSettings


def set_up_logs(settings: LogSettings, *, stream: TextIO | None = None) -> None:
    """For the whole process; once, at its start. ``stream``: standard error where none is given."""
    stream = stream or cast("TextIO", _StandardError())
    is_text = settings.format == "text" or (settings.format == "auto" and stream.isatty())
    level = getattr(logging, settings.level.upper())
    renderers: list[Any] = (
        [structlog.dev.ConsoleRenderer(colors=stream.isatty())]
        if is_text
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
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


class _StandardError(io.TextIOBase):
    """What standard error is when something is written: loggers outlive one that was put in its place."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()

    def isatty(self) -> bool:
        return sys.stderr.isatty()
