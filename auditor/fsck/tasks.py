"""The tasks of a run: each checks some ledgers, and returns its verdicts as rows.

- ``FirstCheck`` and ``Recheck`` are the tasks. A repeated task starts from the beginning. The rows
  of one attempt only are used, so no row is doubled.
- Rows travel as Arrow streams, which are plain bytes to Spark. Given columns, Spark would convert
  each row twice, and plan a query for each task.
"""

import asyncio
import functools
import gc
import logging
import sys
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field, replace
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import pyarrow as pa
import structlog

from auditor.fsck.budget import BeginPace
from auditor.fsck.executor import inspect, recheck
from auditor.fsck.ledger_list import MetadataStamp, pack, unchanged_ledgers, unpack
from auditor.fsck.options import FsckOptions
from auditor.fsck.results.plan import Part
from auditor.fsck.results.rows import SCHEMA, from_table, to_batch
from auditor.fsck.verdicts import LedgerVerdict

_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4")

Work = Callable[[int], Iterator[pa.RecordBatch]]
"""The work of one task. The argument is its position among the tasks given out together."""

ROWS = SCHEMA.append(pa.field("part", pa.int32())).append(pa.field("needs_recheck", pa.bool_()))
"""The rows of a task. A ledger that was skipped as unchanged has a row without a verdict."""
BATCH_ROWS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstCheck:
    """The first check of one part. ``ledger_ids`` are packed."""

    part: int
    ledger_ids: bytes
    known: Mapping[int, MetadataStamp] = field(default_factory=dict)
    full_scan: frozenset[int] = frozenset()

    @classmethod
    def at(cls, part: Part) -> "FirstCheck":
        return cls(
            part=part.number,
            ledger_ids=pack(part.ledger_ids),
            known=part.known,
            full_scan=part.full_scan,
        )

    async def run(self, options: FsckOptions, begin_pace: BeginPace) -> list[pa.RecordBatch]:
        batches = []
        ledger_ids: Sequence[int] = unpack(self.ledger_ids)
        if self.known:
            same = await unchanged_ledgers(options, self.known)
            batches.append(_skipped_rows(same, self.part))
            ledger_ids = sorted(set(ledger_ids).difference(same))
        for wanted, chosen in _by_options(ledger_ids, self.full_scan, options):
            verdicts = inspect(wanted, chosen, begin_pace=begin_pace)
            batches += await _in_batches(verdicts, lambda ledger_id: self.part)
        return batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Recheck:
    """The recheck of what seemed wrong in some parts. ``rows``: by part the rows to recheck, as an
    Arrow stream."""

    rows: Mapping[int, bytes]
    full_scan: frozenset[int] = frozenset()

    @classmethod
    def at(
        cls, tables: Mapping[int, pa.Table], full_scan: frozenset[int] = frozenset()
    ) -> "Recheck":
        rows = {part: to_stream(table) for part, table in tables.items()}
        return cls(rows=rows, full_scan=full_scan)

    async def run(self, options: FsckOptions, begin_pace: BeginPace) -> list[pa.RecordBatch]:
        pending = {
            verdict.ledger_id: (part, verdict)
            for part, rows in self.rows.items()
            for verdict in from_table(from_stream(rows))
        }
        batches = []
        for wanted, chosen in _by_options(pending, self.full_scan, options):
            verdicts = [pending[ledger_id][1] for ledger_id in chosen]
            batches += await _in_batches(
                recheck(wanted, verdicts, begin_pace=begin_pace),
                lambda ledger_id: pending[ledger_id][0],
            )
        return batches


Check = FirstCheck | Recheck


def check_work(checks: Sequence[Check], options: FsckOptions, begin_pace: BeginPace) -> Work:
    """Return the work of a task: it takes the position of a check, and yields its rows
    (``ROWS``)."""

    def run(position: int) -> Iterator[pa.RecordBatch]:
        yield from asyncio.run(checks[position].run(options, begin_pace))

    return run


def _by_options(
    ledger_ids: Collection[int], full_scan: frozenset[int], options: FsckOptions
) -> Iterator[tuple[FsckOptions, Sequence[int]]]:
    """Yield ledgers with the options for them: those of ``full_scan`` are read completely. Empty
    groups are left out."""
    if others := [ledger_id for ledger_id in ledger_ids if ledger_id not in full_scan]:
        yield options, others
    if whole := [ledger_id for ledger_id in ledger_ids if ledger_id in full_scan]:
        yield replace(options, sample_share=1.0), whole


async def _in_batches(
    verdicts: AsyncIterator[LedgerVerdict], part_of: Callable[[int], int]
) -> list[pa.RecordBatch]:
    """Convert verdicts to batches as they come, because rows take less memory."""
    batches, waiting = [], []
    async for verdict in verdicts:
        waiting.append(verdict)
        if len(waiting) == BATCH_ROWS:
            batches.append(_batch(waiting, part_of))
            waiting.clear()
    if waiting:
        batches.append(_batch(waiting, part_of))
    return batches


def _batch(verdicts: Sequence[LedgerVerdict], part_of: Callable[[int], int]) -> pa.RecordBatch:
    parts = pa.array([part_of(verdict.ledger_id) for verdict in verdicts], pa.int32())
    needs_recheck = pa.array([verdict.needs_recheck for verdict in verdicts], pa.bool_())
    columns = [*to_batch(verdicts).columns, parts, needs_recheck]
    return pa.RecordBatch.from_arrays(columns, schema=ROWS)


def _skipped_rows(ledger_ids: Sequence[int], part: int) -> pa.RecordBatch:
    """Return rows without verdicts, for skipped ledgers."""
    rows = [{"ledger_id": ledger_id, "part": part} for ledger_id in ledger_ids]
    return pa.RecordBatch.from_pylist(rows, schema=ROWS)


# --- The Python process of an executor ------------------------------------------------------------


GC_THRESHOLD = 10_000


@functools.cache
def set_up() -> None:
    """Turn off what only costs time in an executor. Call before the work of each task: one process
    runs many tasks, and the first call does all."""
    _quiet_logs()
    hide_pandas()
    _collect_garbage_less()


def _quiet_logs() -> None:
    """Log errors only, to standard error. Handled errors of bookies are in the results already; the
    executor's output is for unexpected ones."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def _collect_garbage_less() -> None:
    """Make the garbage collector run less often, as in a node. A checked ledger's objects form no
    cycles, so reference counting frees them first. At level ``metadata`` the collector took a
    twentieth of the CPU.

    Imported objects are frozen: PySpark scans all other objects after each task, which took 40 ms.
    """
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
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "pandas":
            raise ModuleNotFoundError("hidden from pyarrow", name=fullname)
        return None


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
