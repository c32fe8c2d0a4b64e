"""Distributing tasks with Spark, of which a fake has as much as the tasks need."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import pyarrow as pa
import pytest
from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.errors import PySparkException

from auditor.fsck.spark import JOBS_AT_ONCE_MAX, TASKS_WAITING, Dispatch, with_attempts
from auditor.fsck.tasks import Work
from ledgers.errors import UnavailableError

NUMBERS = pa.schema([("number", pa.int64())])


FAILURE = """Job aborted: Task 0 failed 4 times, most recent failure: Traceback (most recent call \
last):
  File "looks.py", line 70, in run
    raise ValueError("below 0")
ValueError: below 0
 SQLSTATE: 38000
\tat org.apache.spark.api.python.BasePythonRunner.read(PythonRunner.scala:1624)

Driver stacktrace:
\tat java.lang.Thread.run(Thread.java:840)
"""
"""The text of an error by Spark 4.3."""


class FakeSpark:
    """A Spark context. All jobs except the ``free`` first ones wait to be released."""

    def __init__(self, *, slots: int, free: int = 1_000, error: Exception | None = None) -> None:
        """``error``: the outcome of each job. A context that is ``over`` accepts no call."""
        self.defaultParallelism = slots
        self.cancelled: list[str] = []
        self.task_counts: list[int] = []
        self.is_let_go = threading.Event()
        self.is_over = False
        self._free, self._error = free, error
        self._begun = threading.Condition()

    def setJobGroup(  # noqa: N802  # Spark's names
        self,
        name: str,
        text: str,
        *,
        interruptOnCancel: bool,  # noqa: N803
    ) -> None:
        assert interruptOnCancel

    def cancelJobGroup(self, name: str) -> None:  # noqa: N802
        self.cancelled.append(name)
        self.is_let_go.set()
        if self.is_over:
            raise Py4JError("Cannot call methods on a stopped SparkContext.")

    def parallelize(self, positions: range, partitions: int) -> "_FakeRdd":
        assert positions in (range(partitions), range(0))
        return _FakeRdd(self, positions, partitions)

    def run_job(self, task_count: int) -> None:
        with self._begun:
            self.task_counts.append(task_count)
            self._begun.notify_all()
            is_free = len(self.task_counts) <= self._free
        assert is_free or self.is_let_go.wait(30)
        if self._error is not None:
            raise self._error

    def wait_for_jobs(self, count: int) -> None:
        with self._begun:
            assert self._begun.wait_for(lambda: len(self.task_counts) >= count, timeout=30)


class _FakeRdd:
    def __init__(self, spark: FakeSpark, positions: range, partitions: int) -> None:
        self._spark, self._positions, self._partitions = spark, positions, partitions
        self._function: Callable[[Iterable[int]], Iterable[bytes]] | None = None

    def mapPartitions(  # noqa: N802
        self, function: Callable[[Iterable[int]], Iterable[bytes]]
    ) -> "_FakeRdd":
        self._function = function
        return self

    def collect(self) -> list[bytes]:
        assert self._function is not None
        self._spark.run_job(self._partitions)
        return list(self._function(iter(self._positions)))


def numbers_of(tasks: Sequence[int]) -> Work:
    """Return work in which each task gives its own number, and fails below 0."""

    def rows(position: int) -> Iterator[pa.RecordBatch]:
        if tasks[position] < 0:
            raise PySparkException(FAILURE)
        yield pa.RecordBatch.from_pylist([{"number": tasks[position]}], NUMBERS)

    return rows


def dispatch(spark: FakeSpark) -> Dispatch:
    return Dispatch(spark, "a run")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("slots", "tasks_per_job"),
    [
        pytest.param(1, 1, id="one after the other"),
        pytest.param(3, 1, id="some in parallel"),
        pytest.param(JOBS_AT_ONCE_MAX - TASKS_WAITING, 1, id="as many as there are threads"),
        pytest.param(JOBS_AT_ONCE_MAX - TASKS_WAITING + 1, 2, id="more"),
    ],
)
def test_every_task_is_done_once(slots: int, tasks_per_job: int) -> None:
    spark = FakeSpark(slots=slots)

    results = list(dispatch(spark).results(range(200), numbers_of, NUMBERS))

    assert sorted(n for tasks, _ in results for n in tasks) == list(range(200))
    assert all(rows["number"].to_pylist() == list(tasks) for tasks, rows in results)
    assert set(spark.task_counts) == {tasks_per_job}


def test_tasks_are_drawn_only_shortly_before_they_run() -> None:
    spark, taken = FakeSpark(slots=2), []

    def tasks() -> Iterator[int]:
        for number in range(10):
            taken.append(number)
            yield number

    results = dispatch(spark).results(tasks(), numbers_of, NUMBERS)
    next(results)

    assert len(taken) == 2 + TASKS_WAITING
    results.close()


def test_later_executors_get_tasks_too() -> None:
    spark = FakeSpark(slots=1, free=1)
    results = dispatch(spark).results(range(10), numbers_of, NUMBERS)
    next(results)
    reader = threading.Thread(target=lambda: list(results))

    spark.defaultParallelism = 4
    reader.start()

    spark.wait_for_jobs(1 + 4 + TASKS_WAITING)
    spark.is_let_go.set()
    reader.join(30)
    assert len(spark.task_counts) == 10


def test_a_task_that_fails_finally_ends_the_others() -> None:
    spark = FakeSpark(slots=2)

    with pytest.raises(UnavailableError, match=r"in each attempt: ValueError: below 0$"):
        list(dispatch(spark).results([1, -1] * 10, numbers_of, NUMBERS))

    assert len(spark.task_counts) < 20


def test_closing_the_results_cancels_the_jobs() -> None:
    spark = FakeSpark(slots=2, free=1)
    results = dispatch(spark).results(range(10), numbers_of, NUMBERS)
    next(results)

    results.close()

    assert spark.cancelled == ["a run"]
    assert len(spark.task_counts) <= 2 + TASKS_WAITING


GONE = [
    pytest.param(ConnectionRefusedError(111, "Connection refused"), id="no listener"),
    pytest.param(Py4JNetworkError("Answer from Java side is empty"), id="an empty answer"),
]


@pytest.mark.parametrize("error", GONE)
def test_the_end_of_sparks_process_is_an_error(error: Exception) -> None:
    spark = FakeSpark(slots=2, error=error)

    with pytest.raises(UnavailableError, match="Spark's Java process has ended"):
        list(dispatch(spark).results([1], numbers_of, NUMBERS))


def test_the_cause_is_raised_even_if_spark_ended_first() -> None:
    """A signal may go to all processes of a service."""
    spark = FakeSpark(slots=1, free=0)

    def begin() -> None:
        with dispatch(spark).warmed_up(numbers_of([])):
            spark.wait_for_jobs(1)
            spark.is_over = True
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        begin()


def test_a_failed_warm_up_is_reported_by_the_first_task() -> None:
    spark = FakeSpark(slots=1, error=PySparkException("no executors"))

    with dispatch(spark).warmed_up(numbers_of([])):
        spark.wait_for_jobs(1)


def test_the_warm_up_is_cancelled_if_the_run_does_not_begin() -> None:
    spark = FakeSpark(slots=1, free=0)

    def begin() -> None:
        with dispatch(spark).warmed_up(numbers_of([])):
            spark.wait_for_jobs(1)
            raise UnavailableError("nothing can be listed")

    with pytest.raises(UnavailableError):
        begin()

    assert spark.cancelled == ["a run"]


@pytest.mark.parametrize(
    ("master", "expected"),
    [
        ("local", "local[1,4]"),
        ("local[*]", "local[*,4]"),
        ("local[2]", "local[2,4]"),
        ("local[2,1]", "local[2,1]"),
        ("spark://127.0.0.1:7077", "spark://127.0.0.1:7077"),
        ("yarn", "yarn"),
    ],
)
def test_local_masters_retry_tasks_too(master: str, expected: str) -> None:
    assert with_attempts(master) == expected
