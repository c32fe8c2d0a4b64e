"""Runs the tasks of a run on Spark: gives them out, and returns their rows.

``Dispatch`` submits many small concurrent jobs, so that each result arrives at once. One job over
all parts would return nothing before its last part is done. A job has one task, or a few if there
are more slots than reasonable threads.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from itertools import islice, takewhile
from typing import TypeVar

import pyarrow as pa
from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark import SparkContext
from pyspark.errors import PySparkException

from auditor.fsck.tasks import Work, in_streams, out_of_streams
from ledgers.errors import UnavailableError

JOBS_AT_ONCE_MAX = 64
TASKS_WAITING = 2
"""Tasks submitted beyond those that run. They keep all slots busy while Spark plans the next task
and the driver writes the last result."""
SLOT_POLL_S = 1.0
"""Time between two reads of the number of executors, which may change during a run."""

_FAILURES = (PySparkException, Py4JError, OSError)
_JAVA_TRACE = (" SQLSTATE", "\tat ", "Driver stacktrace")

T = TypeVar("T")


class Dispatch:
    """The tasks of one run, in a Spark context that may also do other work."""

    def __init__(self, context: SparkContext, name: str) -> None:
        """``name``: the name of the jobs on Spark's pages."""
        self._context = context
        self._name = name

    @property
    def slot_count(self) -> int:
        """The number of tasks that can run at once on the present executors; at least 1."""
        try:
            count: int = self._context.defaultParallelism
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
                        some = list(islice(left, tasks_per_job))
                        if not some:
                            break
                        job = pool.submit(self._run, len(some), work(some), schema)
                        running[job] = some
                    if not running:
                        return
                    ended = wait(running, SLOT_POLL_S, return_when=FIRST_COMPLETED).done
                    for job in ended:
                        yield running.pop(job), _rows(job)
            finally:
                if running:
                    self._cancel()

    def _cancel(self) -> None:
        """Cancel what is running. If Spark or its JVM has ended, do nothing: the error that ended
        it must be the one reported."""
        with suppress(Py4JError, OSError):
            self._context.cancelJobGroup(self._name)

    def _run(self, task_count: int, work: Work, schema: pa.Schema) -> pa.Table:
        return out_of_streams(self._collect(range(task_count), task_count, work), schema)

    def _collect(self, positions: range, task_count: int, work: Work) -> list[bytes]:
        context = self._context
        context.setJobGroup(self._name, self._name, interruptOnCancel=True)
        return context.parallelize(positions, task_count).mapPartitions(in_streams(work)).collect()


def _rows(job: Future[pa.Table]) -> pa.Table:
    try:
        return job.result()
    except _FAILURES as error:
        raise _unavailable(error) from error


def _unavailable(error: Exception) -> UnavailableError:
    """Return an error that says why a call to Spark failed."""
    if isinstance(error, Py4JNetworkError | OSError):
        return UnavailableError(
            f"Spark's Java process has ended. Was it killed, or out of memory? {error}"
        )
    return UnavailableError(f"a Spark task failed in each attempt: {_reason(str(error))}")


def _reason(text: str) -> str:
    """Return the relevant line of a failure: the last one before Java's stack trace."""
    lines = takewhile(lambda line: not line.startswith(_JAVA_TRACE), text.splitlines())
    return next((line for line in reversed(list(lines)) if line.strip()), text)
