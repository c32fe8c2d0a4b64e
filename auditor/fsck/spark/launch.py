"""The JVM that PySpark starts for a context: when it is given up, where it writes, what it said at last.

PySpark waits for it without end, even for a script that ended and said nothing.
"""

import logging
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from pyspark import SparkContext, java_gateway

START_TIMEOUT_S = 300.0
"""From the launch until there is a context; 4 s where nothing else runs, longer where a cluster is busy."""
_TELLING = re.compile(r"Exception|Error|not found|No such file|cannot|could not", re.IGNORECASE)
LOG_READ_MAX = 65_536
"""Bytes, from the beginning: what went wrong first is the reason."""


@contextmanager
def launching(log: Path | None = None, *, timeout_s: float = START_TIMEOUT_S) -> Iterator["Launch"]:
    """The start of a context: a JVM that PySpark starts meanwhile writes to ``log``.

    Whatever ends it, as Ctrl-C, ends the JVM: until that has told of itself PySpark keeps nobody who would. What py4j
    logs of it is no news: it comes as an exception, too. ``log``: written anew; None: to this process's own output.
    Raises OSError where it cannot be written.
    """
    launch = Launch()
    module = vars(java_gateway)
    popen, level = module["Popen"], logging.root.manager.disable
    overdue = threading.Timer(timeout_s, launch.give_up)
    overdue.daemon = True
    output = None if log is None else log.open("wb")

    def start(*arguments: Any, **options: Any) -> "_Jvm":
        if output is not None:
            options |= {"stdout": output, "stderr": output}
        return launch.start(*arguments, **options)

    module["Popen"] = start
    logging.disable()
    overdue.start()
    try:
        yield launch
        logging.disable(level)
    except BaseException as error:
        if isinstance(error, Exception):
            logging.disable(level)
        if not (isinstance(error, Exception) and SparkContext._gateway):  # else PySpark keeps it
            launch.kill()
        raise
    finally:
        overdue.cancel()
        module["Popen"] = popen
        if output is not None:
            output.close()  # the JVM has its own


class Launch:
    """One start of a context. ``is_given_up``: it took too long."""

    def __init__(self) -> None:
        self._processes: list[_Jvm] = []
        self.is_given_up = False

    def start(self, *arguments: Any, **options: Any) -> "_Jvm":
        process = _Jvm(*arguments, **options)
        self._processes.append(process)
        return process

    def give_up(self) -> None:
        """Whoever waits for the JVM has an error then."""
        self.is_given_up = True
        self.kill()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


class _Jvm(subprocess.Popen[bytes]):
    """PySpark takes 0 for "still runs"; yet it asks only as long as the JVM has not told of itself."""

    def poll(self) -> int | None:
        code = super().poll()
        return 1 if code == 0 else code


def first_complaint(log: Path | None) -> str | None:
    """The first line of what a JVM wrote that tells of an error; or else the last that it wrote at all."""
    if log is None:
        return None
    try:
        with log.open("rb") as file:
            lines = _lines(file)
    except OSError:
        return None
    return next(filter(_TELLING.search, lines), lines[-1] if lines else None)


def _lines(file: IO[bytes]) -> list[str]:
    text = file.read(LOG_READ_MAX).decode(errors="replace")
    return [line.strip() for line in text.splitlines() if line.strip()]
