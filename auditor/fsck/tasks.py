"""The tasks of a run: each checks some ledgers, and returns its verdicts as rows.

A repeated task starts from the beginning. The rows of one attempt only are used, so no row is
doubled. Rows travel as Arrow streams, which are plain bytes to Spark. Given columns, Spark would
convert each row twice, and plan a query for each task.
"""

import asyncio
import functools
import gc
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.abc import MetaPathFinder

import pyarrow as pa
import structlog

from auditor.fsck.budget import Pace
from auditor.fsck.executor import inspect, recheck
from auditor.fsck.options import FsckOptions
from auditor.fsck.results.plan import Part
from auditor.fsck.results.rows import SCHEMA, from_table, to_batch
from auditor.fsck.verdicts import LedgerVerdict

_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4")

Work = Callable[[int], Iterable[pa.RecordBatch]]
"""The work of one task. The argument is its position among the tasks given out together."""

_PART = pa.field("part", pa.int32())
ROWS = SCHEMA.append(_PART).append(pa.field("needs_recheck", pa.bool_()))
"""The rows of a task."""
BATCH_ROWS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Recheck:
    """The recheck of what seemed wrong in some parts. ``rows``: the rows to recheck, with their
    parts, as an Arrow stream."""

    parts: tuple[int, ...]
    rows: bytes
    full_scan: frozenset[int]

    @classmethod
    def at(cls, tables: Mapping[int, pa.Table], full_scan: frozenset[int]) -> "Recheck":
        """Return the task for the rows of these parts."""
        rows = [
            table.append_column(_PART, pa.repeat(pa.scalar(part, pa.int32()), table.num_rows))
            for part, table in tables.items()
        ]
        stream = to_stream(pa.concat_tables(rows))
        return cls(parts=tuple(tables), rows=stream, full_scan=full_scan)


Check = Part | Recheck


def check_work(checks: Sequence[Check], options: FsckOptions, pace: Pace) -> Work:
    """Return the work of a task: it takes the position of a check, and returns its rows
    (``ROWS``)."""
    return lambda position: asyncio.run(run_check(checks[position], options, pace))


async def run_check(check: Check, options: FsckOptions, pace: Pace) -> list[pa.RecordBatch]:
    """Return the rows of a check."""
    options = replace(options, full_scan=check.full_scan)
    batches: list[pa.RecordBatch] = []
    waiting: list[LedgerVerdict] = []

    async def emit(verdict: LedgerVerdict) -> None:
        waiting.append(verdict)
        if len(waiting) == BATCH_ROWS:  # rows take less memory than verdicts
            convert()

    def convert() -> None:
        parts = pa.array([part_of[each.ledger_id] for each in waiting], pa.int32())
        needs_recheck = pa.array([each.needs_recheck for each in waiting], pa.bool_())
        columns = [*to_batch(waiting).columns, parts, needs_recheck]
        batches.append(pa.RecordBatch.from_arrays(columns, schema=ROWS))
        waiting.clear()

    if isinstance(check, Part):
        part_of = dict.fromkeys(check.ledger_ids, check.number)
        await inspect(options, check.ledger_ids, emit, pace=pace)
    else:
        rows = from_stream(check.rows)
        part_of = dict(zip(rows["ledger_id"].to_pylist(), rows["part"].to_pylist(), strict=True))
        await recheck(options, from_table(rows), emit, pace=pace)
    if waiting:
        convert()
    return batches


# --- The Python process of an executor ------------------------------------------------------------


GC_THRESHOLD = 10_000


@functools.cache
def set_up() -> None:
    """Turn off what only costs time in an executor. Call before the work of each task: one process
    runs many tasks, and the first call does all.

    1. Errors only are logged, to standard error. Handled errors of bookies are in the results
       already; the executor's output is for unexpected ones.
    2. pandas is not imported.
    3. The garbage collector runs less often, as in a node. A checked ledger's objects form no
       cycles, so reference counting frees them first. At level ``metadata`` the collector took a
       twentieth of the CPU. Imported objects are frozen: PySpark scans all other objects after each
       task, which took 40 ms.
    """
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    hide_pandas()
    gc.set_threshold(GC_THRESHOLD)
    gc.freeze()


def hide_pandas() -> None:
    """Prevent pyarrow from importing pandas with its first array. The import takes 0.25 s and 40 MB
    in each process. Pandas is installed because Spark needs it, but we pass none of its objects."""
    hidden = _HiddenPandas()
    sys.meta_path.insert(0, hidden)
    try:
        pa.array([])
    finally:
        sys.meta_path.remove(hidden)


class _HiddenPandas(MetaPathFinder):
    def find_spec(self, fullname: str, *others: object) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("hidden from pyarrow", name=fullname)


# --- Rows as bytes --------------------------------------------------------------------------------


def in_streams(work: Work) -> Callable[[Iterable[int]], Iterator[bytes]]:
    """Return a function for ``mapPartitions``, which runs in an executor: it takes positions, and
    yields streams of their rows."""

    def run(positions: Iterable[int]) -> Iterator[bytes]:
        for position in positions:
            set_up()
            for batch in work(position):
                yield to_stream(pa.Table.from_batches([batch]))

    return run


def out_of_streams(streams: Iterable[bytes], schema: pa.Schema) -> pa.Table:
    """Return all rows of the streams, which have this schema."""
    return pa.concat_tables([schema.empty_table(), *map(from_stream, streams)])


def to_stream(rows: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema, options=_OPTIONS) as writer:
        writer.write_table(rows)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def from_stream(data: bytes) -> pa.Table:
    return pa.ipc.open_stream(data).read_all()
