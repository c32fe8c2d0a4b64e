"""fsck on Spark: the only module that imports pyspark. Only the fsck command imports it.

1. ``open_spark`` and ``submitted_spark`` start Spark, on this machine or on a standalone cluster;
   ``spark-submit`` brings its own. They open a context only: a run makes no query, and a session
   would take 1.4 s longer.
2. ``launching`` watches the JVM that PySpark starts for a context: PySpark waits for it without
   limit, even if the start script has ended and printed nothing.
3. ``Dispatch`` gives out the tasks of a run, and returns their rows. It submits many small
   concurrent jobs, so that each result arrives at once. One job over all parts would return nothing
   before its last part is done. A job has one task, or a few if there are more slots than
   reasonable threads.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import IO, Any, TypeVar

import pyarrow as pa
import pyspark
from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError
from pyspark import SparkConf, SparkContext, java_gateway
from pyspark.errors import PySparkException

from auditor.fsck.tasks import Work, in_streams, out_of_streams
from ledgers.errors import UnavailableError
from ledgers.plain_files import plain

START_TIMEOUT_S = 300.0
"""From the launch until the context is ready. Takes 4 s on an idle machine, longer on a busy
cluster."""
SIGKILL = 9
"""The number in POSIX. Only the daemon handles signals, so ``signal`` is not imported here."""
LOCAL_ATTEMPTS = 4
"""Number of attempts of a task, as on a cluster. By default Spark tries a local task only once."""
LOOPBACK = "127.0.0.1"
MASTER_TIMEOUT_S = 10.0
"""Deadline for a connection to a standalone master."""

JOBS_AT_ONCE_MAX = 64
TASKS_WAITING = 2
"""Tasks submitted beyond those that run. They keep all slots busy while Spark plans the next task
and the driver writes the last result."""
SLOT_POLL_S = 1.0
"""Time between two reads of the number of executors, which may change during a run."""

_FAILURES = (PySparkException, Py4JError, OSError)
_JAVA_TRACE = (" SQLSTATE", "\tat ", "Driver stacktrace")

T = TypeVar("T")
_DEFAULTS = {"spark.ui.showConsoleProgress": "false", "spark.ui.enabled": "false"}


def open_spark(
    master: str,
    settings: Mapping[str, str] | None = None,
    *,
    python: str = sys.executable,
    log: Path | None = None,
    start_timeout_s: float = START_TIMEOUT_S,
) -> SparkContext:
    """Return a new context, which the caller must stop. ``master``: ``local[*]``, ``local[4]``,
    ``spark://…``, or another form that Spark knows.

    ``settings``: Spark settings, which override ours. ``python``: the interpreter of executors, by
    its path there; this project and its dependencies must be installed for it. ``log``: file for
    Spark's own messages, overwritten; None for standard error. ``start_timeout_s``: from the launch
    of the JVM until the context is ready.

    Raises UnavailableError; at once if no standalone master accepts connections, because Spark
    would try for a minute and give no reason.
    """
    _require_master(master)
    conf = SparkConf().setAppName("bookmender fsck").setMaster(with_attempts(master))
    conf.setAll([*{**_DEFAULTS, **on_this_machine(master), **(settings or {})}.items()])
    with launching(log, timeout_s=start_timeout_s) as launch:
        try:
            context = SparkContext.getOrCreate(conf)
        except _FAILURES as error:
            if launch.is_given_up:
                reason = f"it was not ready after {start_timeout_s:g} s; see also --start-within"
            else:
                java = error.java_exception if isinstance(error, Py4JJavaError) else error
                reason = str(java).strip().partition("\n")[0]
            where = "" if log is None else f". Spark's messages are in {log}"
            raise UnavailableError(
                f"Spark did not start: {reason}; check --master, --spark-conf, and the variables "
                f"of Spark and Java in the environment{where}",
                master=master,
            ) from error
    context.setLogLevel("ERROR")
    # Connections break when Spark or an executor ends. Their errors are hidden: tasks report it.
    vars(context)["_accumulatorServer"].handle_error = lambda request, address: None
    context.pythonExec = python  # by default PYSPARK_PYTHON or any python3
    return context


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
            "no Spark master answers; check that it runs, and check --master: "
            f"{'; '.join(refusals)}",
            master=master,
        )


def stop_spark(context: SparkContext) -> None:
    """Stop the context, or what still exists of it. If Spark or its JVM has ended, no error is
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
                "spark-submit's JVM, which PYSPARK_GATEWAY_PORT names, provides no Spark context. "
                f"Start this command with spark-submit again, or unset that variable ({first_line})"
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
    found = re.fullmatch(r"local(?:\[([^,]*)\])?", master)
    return f"local[{found[1] or 1},{LOCAL_ATTEMPTS}]" if found else master


# --- The start of the JVM -------------------------------------------------------------------------


class Launch:
    """One start of a context. ``is_given_up``: True if it took too long."""

    def __init__(self, output: IO[bytes] | None) -> None:
        self._to_log = {} if output is None else {"stdout": output, "stderr": output}
        self._processes: list[_Jvm] = []
        self.is_given_up = False

    def start(self, *arguments: Any, **options: Any) -> _Jvm:
        """Start the JVM, in PySpark's stead."""
        process = _Jvm(*arguments, **{**options, "process_group": 0, **self._to_log})
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


@contextmanager
def launching(log: Path | None = None, *, timeout_s: float = START_TIMEOUT_S) -> Iterator[Launch]:
    """The start of a context: a JVM that PySpark starts meanwhile writes to ``log``.

    1. Any exception, also Ctrl-C, kills the JVM: until it has reported its port, PySpark has no
       object that would end it. PySpark keeps a JVM that has a gateway for its next context; Ctrl-C
       ends that one too.
    2. Logging is disabled meanwhile, because py4j's errors are also raised. It stays disabled after
       Ctrl-C.
    3. After ``timeout_s`` the JVM is killed, and PySpark's wait for it ends with an error.

    ``log``: overwritten; None for this process's own output. Raises OSError if it cannot be
    written.
    """
    module = vars(java_gateway)
    popen, level = module["Popen"], logging.root.manager.disable
    with nullcontext() if log is None else open(log, "wb", opener=plain) as output:
        launch = Launch(output)
        overdue = threading.Timer(timeout_s, launch.give_up)
        overdue.daemon = True
        module["Popen"] = launch.start
        logging.disable()
        overdue.start()
        is_interrupted = False
        try:
            yield launch
        except BaseException as error:
            is_interrupted = not isinstance(error, Exception)
            if is_interrupted or not SparkContext._gateway:
                launch.kill()
            raise
        finally:
            if not is_interrupted:
                logging.disable(level)
            overdue.cancel()
            module["Popen"] = popen


class _Jvm(subprocess.Popen[bytes]):
    """The JVM's process. PySpark polls it until it has reported its port, and takes exit code 0 for
    "still running"; so ``poll`` returns 1 instead.

    The process leads its own process group. ``bin/spark-submit`` may be a wrapper that starts the
    JVM as its child. Killing only the wrapper would leave the JVM behind, with the log open.
    """

    def kill(self) -> None:
        if self.returncode is None:  # after the wait, another group may have its number
            with suppress(ProcessLookupError):
                os.killpg(self.pid, SIGKILL)

    def poll(self) -> int | None:
        code = super().poll()
        return 1 if code == 0 else code


# --- The tasks of a run ---------------------------------------------------------------------------


@dataclass
class Dispatch:
    """The tasks of one run, in a Spark context that may also do other work. ``name``: of the jobs
    on Spark's pages."""

    context: SparkContext
    name: str

    @property
    def slot_count(self) -> int:
        """The number of tasks that can run at once on the present executors; at least 1."""
        try:
            count: int = self.context.defaultParallelism
        except _FAILURES as error:
            raise _unavailable(error) from error
        return max(1, count)

    @contextmanager
    def warmed_up(self, work: Work) -> Iterator[None]:
        """Start Python in every slot during the block, and import there what ``work`` needs.
        ``work`` is not called.

        Errors are ignored here: the first tasks need the same, and report them.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="fsck-job") as pool:
            pool.submit(self._collect, range(0), self.slot_count, work)
            try:
                yield
            except BaseException:
                self._cancel()
                raise

    def results(
        self, tasks: Iterable[T], work: Callable[[Sequence[T]], Work], schema: pa.Schema
    ) -> Generator[tuple[Sequence[T], pa.Table], None, None]:
        """Yield tasks with their rows, as they complete. A task is taken from ``tasks`` only
        shortly before it runs.

        ``work``: returns for some tasks the function that Spark calls with their positions, and
        that yields rows of the ``schema``. A caller that stops early must close the generator,
        which cancels running tasks. Raises UnavailableError if a task failed as often as Spark
        tries it; all others are then cancelled.
        """
        left = iter(tasks)
        running: dict[Future[pa.Table], Sequence[T]] = {}
        with ThreadPoolExecutor(JOBS_AT_ONCE_MAX, thread_name_prefix="fsck-job") as pool:
            try:
                while True:
                    room = self.slot_count + TASKS_WAITING
                    tasks_per_job = -(-room // JOBS_AT_ONCE_MAX)
                    while len(running) * tasks_per_job < room:
                        some: Sequence[T] = list(islice(left, tasks_per_job))
                        if not some:
                            break
                        job = pool.submit(self._run, len(some), work(some), schema)
                        running[job] = some
                    if not running:
                        return
                    ended = wait(running, SLOT_POLL_S, return_when=FIRST_COMPLETED).done
                    for job in ended:
                        some = running.pop(job)
                        try:
                            rows = job.result()
                        except _FAILURES as error:
                            raise _unavailable(error) from error
                        yield some, rows
            finally:
                if running:
                    self._cancel()

    def _cancel(self) -> None:
        """Cancel what is running. If Spark or its JVM has ended, do nothing: the error that ended
        it must be the one reported."""
        with suppress(Py4JError, OSError):
            self.context.cancelJobGroup(self.name)

    def _run(self, task_count: int, work: Work, schema: pa.Schema) -> pa.Table:
        return out_of_streams(self._collect(range(task_count), task_count, work), schema)

    def _collect(self, positions: range, task_count: int, work: Work) -> list[bytes]:
        context = self.context
        context.setJobGroup(self.name, self.name, interruptOnCancel=True)
        return context.parallelize(positions, task_count).mapPartitions(in_streams(work)).collect()


def _unavailable(error: Exception) -> UnavailableError:
    """Return an error that says why a call to Spark failed."""
    if isinstance(error, Py4JNetworkError | OSError):
        return UnavailableError(
            f"Spark's Java process has ended. Was it killed, or out of memory? {error}"
        )
    lines = takewhile(lambda line: not line.startswith(_JAVA_TRACE), str(error).splitlines())
    reason = next((line for line in reversed(list(lines)) if line.strip()), str(error))
    return UnavailableError(f"a Spark task failed in each attempt: {reason}")
