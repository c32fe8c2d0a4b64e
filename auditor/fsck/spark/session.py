"""Spark for fsck, on this machine or on a standalone cluster; ``spark-submit`` brings its own.

Its context alone: a run asks no query, and a session would be there 1.4 s later.
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
"""Of a task, as on a cluster: left to itself, Spark tries a task only once where it runs
locally."""
LOOPBACK = "127.0.0.1"
MASTER_TIMEOUT_S = 10.0
"""How long a standalone master may take to accept a connection."""

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
    """``master``: ``local[*]``, ``local[4]``, ``spark://…``, or whatever Spark knows. To be
    stopped.

    ``settings``: Spark's own, over ours. ``python``: what executors run, by its path there; it
    needs this project and what it needs. ``log``: the file that Spark's own messages go to, written
    anew; None: to standard error. ``suspects``: environment variables that have a part in what
    Spark does; an error names them. ``start_timeout_s``: from the launch of the JVM until there is
    a context. Raises UnavailableError, at once where no standalone master takes connections: Spark
    would try for a minute, and not say why.
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
    # What its end, or an executor's, makes of a connection: tasks tell what becomes of them.
    vars(context)["_accumulatorServer"].handle_error = lambda request, address: None
    context.pythonExec = python  # else PYSPARK_PYTHON says it, or it is any python3
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
    """Of several, which stand in for each other, one is enough."""
    found = re.fullmatch(r"spark://([^/]+)", master)
    refusals = []
    for address in found[1].split(",") if found else ():
        host, _, port = address.rpartition(":")
        if not (host and port.isdecimal()):
            return  # Spark says what is wrong with it
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
    """However much of it there still is: what ended it, or its JVM, is told by who met it first."""
    with suppress(Py4JError, OSError), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # PySpark's, of a JVM that is gone
        context.stop()


def submitted_spark() -> SparkContext:
    """Return the context that spark-submit has set up. To be stopped.

    Raises UnavailableError where there is none, as where a shell still has spark-submit's
    variables.
    """
    with launching():  # for its silence: no JVM is started
        try:
            return SparkContext.getOrCreate()
        except (PySparkException, Py4JError, OSError, KeyError, ValueError) as error:
            first_line = str(error).strip().partition("\n")[0]
            raise UnavailableError(
                "spark-submit's JVM, which PYSPARK_GATEWAY_PORT names, gives no Spark context: start this command "
                f"with spark-submit again, or unset that variable ({first_line})"
            ) from error


def imported_pyspark() -> tuple[Path, str]:
    """Return the folder of the PySpark that this process imports, which holds a Spark, and its
    version."""
    return Path(pyspark.__file__).parent, pyspark.__version__


def is_here(master: str) -> bool:
    """Whether tasks run on this machine, in processes of the driver's own."""
    return bool(re.fullmatch(r"local(\[.*\])?", master))


def on_this_machine(master: str) -> Mapping[str, str]:
    """Where all executors are here, nobody else's machine is to reach the driver's ports, and
    Python's tasks need none: over TCP each begins 40 ms later, as small packets wait for each
    other. A JVM that shares the cores with the work, and passes bytes on, has nothing that is worth
    being optimised at their cost. And executors run the driver's own Python, which has all that
    they are to import."""
    if not is_here(master):
        return {}
    return {
        "spark.driver.bindAddress": LOOPBACK,
        "spark.driver.host": LOOPBACK,
        "spark.python.unix.domain.socket.enabled": "true",  # from Spark 4.1 on
        "spark.driver.defaultJavaOptions": "-XX:TieredStopAtLevel=1",
    }


def with_attempts(master: str) -> str:
    """``local[4]`` as ``local[4,4]``, which says how often a task is tried."""
    if master == "local":
        return f"local[1,{LOCAL_ATTEMPTS}]"
    if master.startswith("local[") and "," not in master:
        return f"{master[:-1]},{LOCAL_ATTEMPTS}]"
    return master
