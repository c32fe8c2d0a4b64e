"""Tasks given out to Spark one by one, by jobs that run beside each other, so that each result is
had at once.

One job over all parts would tell nothing before its last part is done. A job here has one task, or
a few where there are more slots than threads are good for.
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

from auditor.fsck.spark.streams import Work, in_streams, out_of_streams
from ledgers.errors import UnavailableError

JOBS_AT_ONCE_MAX = 64
WAITING = 2
"""Tasks that Spark has beside those that run, so that none of its slots stands still while it plans
the next one and the driver writes what the last one gave."""
LOOK_S = 1.0
"""Between two looks at how many executors there are: they come, and go, while a run is under
way."""

_FAILURES = (PySparkException, Py4JError, OSError)
_JAVAS_OWN = (" SQLSTATE", "\tat ", "Driver stacktrace")

T = TypeVar("T")


class Dispatch:
    """Of one run, in one Spark context, which may do other things as well."""

    def __init__(self, context: SparkContext, name: str) -> None:
        """``name``: what the jobs are called in Spark's pages."""
        self._context = context
        self._name = name

    @property
    def slot_count(self) -> int:
        """Tasks that may run at once, on the executors that there are now."""
        try:
            count: int = self._context.defaultParallelism
        except _FAILURES as error:
            raise _unavailable(error) from error
        return max(1, count)

    @contextmanager
    def warming_up(self, work: Work) -> Iterator[None]:
        """Meanwhile, in every slot, Python starts and imports what the ``work`` needs, which is not
        called yet.

        What fails of that is told by the first tasks, which need it.
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
        """The rows of each few tasks, as they are done. A task is taken from ``tasks`` when it is
        to run soon.

        To be closed by who does not read it to its end: what is under way ends then. ``work``:
        given tasks, what is to be called with their positions, and gives rows of the ``schema``.
        Raises UnavailableError when a task failed as often as Spark tries one; the others end then,
        too.
        """
        left = iter(tasks)
        running: dict[Future[pa.Table], Sequence[T]] = {}
        with ThreadPoolExecutor(JOBS_AT_ONCE_MAX, thread_name_prefix="fsck-job") as pool:
            try:
                while True:
                    room = self.slot_count + WAITING
                    tasks_per_job = -(-room // JOBS_AT_ONCE_MAX)
                    while len(running) * tasks_per_job < room:
                        some = list(islice(left, tasks_per_job))
                        if not some:
                            break
                        job = pool.submit(self._run, len(some), work(some), schema)
                        running[job] = some
                    if not running:
                        return
                    ended = wait(running, LOOK_S, return_when=FIRST_COMPLETED).done
                    for job in ended:
                        yield running.pop(job), _rows(job)
            finally:
                if running:
                    self._cancel()

    def _cancel(self) -> None:
        """What is under way. Where Spark itself has ended, or its JVM, there is nothing: what ended
        it is to be told."""
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
    """What a call to Spark failed with, for people."""
    if isinstance(error, Py4JNetworkError | OSError):
        return UnavailableError(
            f"Spark's own process, Java's, is gone: was it killed, or out of memory? {error}"
        )
    return UnavailableError(f"a task failed on Spark again and again: {_reason(str(error))}")


def _reason(text: str) -> str:
    """What a person wants to know of a failure: the last line before Java says where it was."""
    lines = takewhile(lambda line: not line.startswith(_JAVAS_OWN), text.splitlines())
    return next((line for line in reversed(list(lines)) if line.strip()), text)
