"""Tasks given out to Spark one by one, by jobs that run beside each other, so that each result is had at once.

One job over all parts would tell nothing before its last part is done. A job here has one task, or a few where
there are more slots than threads are good for.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import TypeVar

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from auditor.fsck.spark.looks import MapInArrow
from ledgers.errors import UnavailableError

JOBS_AT_ONCE_MAX = 64
LOOK_S = 1.0
"""Between two looks at how many executors there are: they come, and go, while a run is under way."""

T = TypeVar("T")


class Dispatch:
    """Of one run, in one Spark session, which may do other things as well."""

    def __init__(self, spark: SparkSession, name: str) -> None:
        """``name``: what the jobs are called in Spark's pages."""
        self._spark = spark
        self._name = name

    @property
    def slot_count(self) -> int:
        """Tasks that may run at once, on the executors that there are now."""
        count: int = self._spark.sparkContext.defaultParallelism
        return max(1, count)

    def results(
        self, tasks: Iterable[T], work: Callable[[Sequence[T]], MapInArrow], schema: pa.Schema
    ) -> Generator[tuple[Sequence[T], pa.Table], None, None]:
        """The rows of each few tasks, as they are done. A task is taken from ``tasks`` when there is room.

        To be closed by who does not read it to its end: what is under way ends then. ``work``: given tasks, what
        ``mapInArrow`` is to call with their positions. Raises UnavailableError when a task failed as often as
        Spark tries one; the others end then, too.
        """
        left = iter(tasks)
        running: dict[Future[pa.Table], Sequence[T]] = {}
        with ThreadPoolExecutor(JOBS_AT_ONCE_MAX, thread_name_prefix="fsck-job") as pool:
            try:
                while True:
                    slot_count = self.slot_count
                    tasks_per_job = -(-slot_count // JOBS_AT_ONCE_MAX)
                    while len(running) * tasks_per_job < slot_count:
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
                    self._spark.sparkContext.cancelJobGroup(self._name)

    def _run(self, task_count: int, function: MapInArrow, schema: pa.Schema) -> pa.Table:
        self._spark.sparkContext.setJobGroup(self._name, self._name, interruptOnCancel=True)
        positions = self._spark.range(0, task_count, 1, task_count)
        found = positions.mapInArrow(function, from_arrow_schema(schema)).toArrow()
        return found.cast(schema)


def _rows(job: Future[pa.Table]) -> pa.Table:
    try:
        return job.result()
    except (PySparkException, Py4JError) as error:
        last_line = str(error).strip().splitlines()[-1]
        raise UnavailableError(f"a task failed on Spark again and again: {last_line}") from error
