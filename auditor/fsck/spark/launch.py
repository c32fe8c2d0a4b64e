"""The JVM that PySpark starts for a context: its deadline, its output, and its error message.

PySpark waits for the JVM without limit, even if the start script ended and said nothing.
"""

import logging
import os
import re
import subprocess
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from pyspark import SparkContext, java_gateway

START_TIMEOUT_S = 300.0
"""From the launch until the context is ready. Takes 4 s on an idle machine, longer on a busy
cluster."""
_TELLING = re.compile(
    r"Exception|Error|not found|No such file|cannot|could not|Unrecognized|Invalid", re.IGNORECASE
)
SIGKILL = 9
"""The number in POSIX. Only the daemon handles signals, so ``signal`` is not imported here."""
LOG_READ_MAX = 65_536
"""Bytes read from the beginning of the log: the first error is the reason."""


@contextmanager
def launching(log: Path | None = None, *, timeout_s: float = START_TIMEOUT_S) -> Iterator["Launch"]:
    """The start of a context: a JVM that PySpark starts meanwhile writes to ``log``.

    1. Any exception, also Ctrl-C, kills the JVM: until it has reported its port, PySpark has no
       object that would end it.
    2. Logging is disabled meanwhile, because py4j's errors are also raised. It stays disabled after
       Ctrl-C.
    3. After ``timeout_s`` the JVM is killed, and PySpark's wait for it ends with an error.

    ``log``: overwritten; None for this process's own output. Raises OSError if it cannot be
    written.
    """
    launch = Launch(timeout_s)
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
        # PySpark keeps a JVM that has a gateway, for its next context; Ctrl-C ends that one too.
        if not (isinstance(error, Exception) and SparkContext._gateway):
            launch.kill()
        raise
    finally:
        overdue.cancel()
        module["Popen"] = popen
        if output is not None:
            output.close()  # the JVM has its own


class Launch:
    """One start of a context. ``is_given_up``: True if it took longer than ``timeout_s``."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._processes: list[_Jvm] = []
        self.is_given_up = False

    def start(self, *arguments: Any, **options: Any) -> "_Jvm":
        process = _Jvm(*arguments, **options)
        self._processes.append(process)
        if self.is_given_up:  # the deadline passed just before the start
            self.kill()
        return process

    def give_up(self) -> None:
        """Kill the JVM, so that the wait for it ends with an error."""
        self.is_given_up = True
        self.kill()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


class _Jvm(subprocess.Popen[bytes]):
    """The JVM's process. PySpark polls it until it has reported its port, and takes exit code 0 for
    "still running"; so ``poll`` returns 1 instead.

    The process leads its own process group. ``bin/spark-submit`` may be a wrapper that starts the
    JVM as its child. Killing only the wrapper would leave the JVM behind, with the log open.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "process_group": 0})

    def kill(self) -> None:
        if self.returncode is None:  # after the wait, another group may have its number
            with suppress(ProcessLookupError):
                os.killpg(self.pid, SIGKILL)

    def poll(self) -> int | None:
        code = super().poll()
        return 1 if code == 0 else code


def first_complaint(log: Path | None) -> str | None:
    """Return the first line of the log that looks like an error, or else its last line. None
    without log."""
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


# --- The next step --------------------------------------------------------------------------------

_HOST_NAME = re.compile(r"UnknownHostException|UnresolvedAddressException")
_FILE = re.compile(r"FileNotFoundException|NoSuchFileException|does not exist")
_JAVA = re.compile(r"Java Virtual Machine|Unrecognized (VM )?option|heap size|reserve enough space")


def next_step(reason: str, suspects: Collection[str]) -> str:
    """Return what an operator should do about a start that failed for this reason.

    ``suspects``: names of environment variables that influence Spark.
    """
    if _HOST_NAME.search(reason):
        return (
            "a host name does not resolve: add it to DNS or /etc/hosts, or set SPARK_LOCAL_IP to an address of this "
            "host that executors reach"
        )
    if _FILE.search(reason):
        place = " in SPARK_CONF_DIR" if "SPARK_CONF_DIR" in suspects else ""
        return (
            "create that file or folder, or correct the setting that names it, such as spark.eventLog.dir, in "
            f"spark-defaults.conf{place} or with --spark-conf"
        )
    if _JAVA.search(reason):
        variables = [name for name in suspects if "OPT" in name]
        return f"correct spark.driver.memory in --spark-conf{_and(variables)}"
    return f"check --master, whether it runs, and what --spark-conf sets{_and(suspects)}"


def _and(suspects: Collection[str]) -> str:
    return f"; and {', '.join(suspects)} in the environment" if suspects else ""
