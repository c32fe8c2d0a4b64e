"""Opens Spark for fsck, on this machine or on a standalone cluster; ``spark-submit`` brings its
own.

Opens a context only. A run makes no query, and a session would take 1.4 s longer.
"""

import re
import socket
import sys
import warnings
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

import pyspark
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException

from auditor.fsck.spark.launch import (
    START_TIMEOUT_S,
    Launch,
    first_complaint,
    launching,
    next_step,
)
from ledgers.errors import UnavailableError

LOCAL_ATTEMPTS = 4
"""Number of attempts of a task, as on a cluster. By default Spark tries a local task only once."""
LOOPBACK = "127.0.0.1"
MASTER_TIMEOUT_S = 10.0
"""Deadline for a connection to a standalone master."""

_DEFAULTS = {
    "spark.ui.showConsoleProgress": "false",
    "spark.ui.enabled": "false",
}


def open_spark(
    master: str,
    settings: Mapping[str, str] | None = None,
    *,
    python: str = sys.executable,
    log: Path | None = None,
    suspects: Collection[str] = (),
    start_timeout_s: float = START_TIMEOUT_S,
) -> SparkContext:
    """Return a new context, which the caller must stop. ``master``: ``local[*]``, ``local[4]``,
    ``spark://…``, or another form that Spark knows.

    ``settings``: Spark settings, which override ours. ``python``: the interpreter of executors, by
    its path there; this project and its dependencies must be installed for it. ``log``: file for
    Spark's own messages, overwritten; None for standard error. ``suspects``: environment variables
    that influence Spark, named in an error. ``start_timeout_s``: from the launch of the JVM until
    the context is ready.

    Raises UnavailableError; at once if no standalone master accepts connections, because Spark
    would try for a minute and give no reason.
    """
    _require_master(master)
    conf = SparkConf().setAppName("bookmender fsck").setMaster(with_attempts(master))
    conf.setAll([*{**_DEFAULTS, **on_this_machine(master), **(settings or {})}.items()])
    with launching(log, timeout_s=start_timeout_s) as launch:
        try:
            context = SparkContext.getOrCreate(conf)
        except (PySparkException, Py4JError, OSError) as error:
            raise UnavailableError(
                _why_not_started(error, launch, log, suspects), master=master
            ) from error
    context.setLogLevel("ERROR")
    # Connections break when Spark or an executor ends. Their errors are hidden: tasks report it.
    vars(context)["_accumulatorServer"].handle_error = lambda request, address: None
    context.pythonExec = python  # by default PYSPARK_PYTHON or any python3
    return context


def _why_not_started(
    error: Exception, launch: Launch, log: Path | None, suspects: Collection[str]
) -> str:
    if launch.is_given_up:
        said = first_complaint(log)
        reason = f"it was not ready after {launch.timeout_s:g} s{f' ({said})' if said else ''}"
        step = f"{next_step(said or '', suspects)}; or allow it more time with --start-within"
    else:
        if isinstance(error, Py4JJavaError):
            reason = str(error.java_exception)
        else:
            reason = first_complaint(log) or str(error)
        reason = reason.strip().partition("\n")[0]
        step = next_step(reason, suspects)
    where = "" if log is None else f". What Spark said is in {log}"
    return f"Spark did not start: {reason}; {step}{where}"


def _require_master(master: str) -> None:
    """Raise UnavailableError if no standalone master accepts a connection. One of several is
    enough: they stand in for each other."""
    found = re.fullmatch(r"spark://([^/]+)", master)
    refusals = []
    for address in found[1].split(",") if found else ():
        host, _, port = address.rpartition(":")
        if not (host and port.isdecimal()):
            return  # Spark reports what is wrong with the address
        try:
            with socket.create_connection((host.strip("[]"), int(port)), MASTER_TIMEOUT_S):
                return
        except (OSError, OverflowError) as error:
            refusals.append(f"{address}: {error}")
    if refusals:
        raise UnavailableError(
            f"no Spark master answers: does it run, and is --master right? {'; '.join(refusals)}",
            master=master,
        )


def stop_spark(context: SparkContext) -> None:
    """Stop the context, whatever still exists of it. If Spark or its JVM has ended, no error is
    raised: the first call that failed has reported it."""
    with suppress(Py4JError, OSError), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # PySpark's, if the JVM has ended
        context.stop()


def submitted_spark() -> SparkContext:
    """Return the context of spark-submit, which the caller must stop.

    Raises UnavailableError if there is none, for example if a shell still has spark-submit's
    variables.
    """
    with launching():  # to silence logs; no JVM is started
        try:
            return SparkContext.getOrCreate()
        except (PySparkException, Py4JError, OSError, KeyError, ValueError) as error:
            first_line = str(error).strip().partition("\n")[0]
            raise UnavailableError(
                "spark-submit's JVM, which PYSPARK_GATEWAY_PORT names, gives no Spark context: start this command "
                f"with spark-submit again, or unset that variable ({first_line})"
            ) from error


def imported_pyspark() -> tuple[Path, str]:
    """Return the folder of the imported PySpark, which contains a Spark, and its version."""
    return Path(pyspark.__file__).parent, pyspark.__version__


def is_here(master: str) -> bool:
    """True if tasks run on this machine, in child processes of the driver."""
    return bool(re.fullmatch(r"local(\[.*\])?", master))


def on_this_machine(master: str) -> Mapping[str, str]:
    """Return settings for executors on this machine; none for another master.

    The driver listens on loopback only, so other machines cannot reach its ports. Python tasks use
    Unix sockets: over TCP each task starts 40 ms later, because small packets wait for each other.
    The JVM only passes bytes on, and shares the cores with the work, so it does not optimise its
    code further.
    """
    if not is_here(master):
        return {}
    return {
        "spark.driver.bindAddress": LOOPBACK,
        "spark.driver.host": LOOPBACK,
        "spark.python.unix.domain.socket.enabled": "true",  # from Spark 4.1 on
        "spark.driver.defaultJavaOptions": "-XX:TieredStopAtLevel=1",
    }


def with_attempts(master: str) -> str:
    """Return ``local[4]`` as ``local[4,4]``, which sets the number of attempts."""
    if master == "local":
        return f"local[1,{LOCAL_ATTEMPTS}]"
    if master.startswith("local[") and "," not in master:
        return f"{master[:-1]},{LOCAL_ATTEMPTS}]"
    return master
