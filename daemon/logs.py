"""Logging: one event per line, as text on a terminal and as JSON otherwise.

A permanent failure is logged again and again. So tracebacks are bounded, for any depth of calls and
any number of failed tasks: they must neither fill the disk nor keep the loop busy.

A node writes to standard error on a thread of its own (``LogThread``): a collector that does not
read its pipe, or a disk that hangs, must stop neither an event loop nor the end of the node.
"""

import io
import logging
import os
import queue
import select
import signal
import sys
import threading
import traceback
from contextlib import suppress
from typing import Any, Self, TextIO, cast

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
DROPPED = Counter(
    "bookmender_log_writes_dropped_total",
    "Log events that were lost, because standard error did not take them: a collector does not "
    "read its pipe, or a disk is full or hangs.",
)

WAITING_MAX = 4_096
"""Writes that wait for standard error: some MB. Further ones are dropped."""
GOODBYE_S = 1.0
"""How long the end of the node waits for them."""
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
        logger_factory=structlog.WriteLoggerFactory(file=stream),
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


class LogThread(io.TextIOBase):
    """Stands in for ``sys.stderr`` within a ``with`` block, and writes on a thread.

    So everything that writes to standard error returns at once: our logs, warnings, and what other
    libraries report.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stderr = cast("TextIO | None", sys.stderr)  # None: it was closed before the start
        # Reentrant, because the garbage collector may report something in the middle of a write.
        self._waiting: queue.SimpleQueue[str | threading.Event] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        thread = threading.Thread(target=self._run, name="log", daemon=True)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            thread.start()  # a signal must wake the main thread, not this one
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        sys.stderr = self  # not before: without a thread nothing would be written
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the last lines, ``GOODBYE_S`` at most."""
        written = threading.Event()
        self._waiting.put(written)
        written.wait(GOODBYE_S)
        sys.stderr = cast("TextIO", self._stderr)

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError("text, not bytes")  # as click expects of a stream of text
        if self._waiting.qsize() < WAITING_MAX:
            self._waiting.put(text)
        else:
            DROPPED.inc()
        return len(text)

    def isatty(self) -> bool:
        return self._stderr is not None and self._stderr.isatty()

    def _run(self) -> None:
        while True:
            match self._waiting.get():
                case str(text):
                    try:
                        self._write_all(text.encode(errors="backslashreplace"))
                    except OSError:
                        DROPPED.inc()
                case written:
                    written.set()

    def _write_all(self, data: bytes) -> None:
        if self._stderr is None:
            return
        # Not ``sys.stderr``: the interpreter could not end while this thread held its lock.
        file = self._stderr.fileno()
        while data:
            try:
                data = data[os.write(file, data) :]
            except BlockingIOError:  # another program made the pipe non-blocking
                poll = select.poll()
                poll.register(file, select.POLLOUT)
                poll.poll()
