"""The work of one task in an executor: checks some ledgers, and returns their verdicts as rows.

A repeated task starts from the beginning. Spark uses the rows of one attempt only, so no row is
doubled.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from auditor.fsck.inspecting import inspect, recheck
from auditor.fsck.ledger_ids import pack, unpack
from auditor.fsck.levels import FsckOptions
from auditor.fsck.pace import BeginPace
from auditor.fsck.results.plan import Part
from auditor.fsck.results.rows import SCHEMA, from_table, to_batch
from auditor.fsck.spark.process import set_up
from auditor.fsck.spark.streams import Work, from_stream, to_stream
from auditor.fsck.unchanged import Written, unchanged
from auditor.fsck.verdicts import LedgerVerdict

ROWS = SCHEMA.append(pa.field("part", pa.int32())).append(pa.field("seems_wrong", pa.bool_()))
"""The rows of a task. A ledger that was skipped as unchanged has a row without a verdict."""
BATCH_ROWS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstLook:
    """The first look at one part, ready to be sent: ``ledger_ids`` are packed."""

    part: int
    ledger_ids: bytes
    known: Mapping[int, Written] = field(default_factory=dict)
    suspects: frozenset[int] = frozenset()

    @classmethod
    def at(cls, part: Part) -> "FirstLook":
        return cls(
            part=part.number,
            ledger_ids=pack(part.ledger_ids),
            known=part.known,
            suspects=part.suspects,
        )

    async def run(self, options: FsckOptions, begin_pace: BeginPace) -> list[pa.RecordBatch]:
        batches = []
        ledger_ids: Sequence[int] = unpack(self.ledger_ids)
        if self.known:
            same = await unchanged(options, self.known)
            batches.append(_left_out(same, self.part))
            ledger_ids = sorted(set(ledger_ids).difference(same))
        for wanted, chosen in _by_share(ledger_ids, self.suspects, options):
            verdicts = inspect(wanted, chosen, begin_pace=begin_pace)
            batches += await _in_batches(verdicts, lambda ledger_id: self.part)
        return batches


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondLook:
    """The second look at what seemed wrong in some parts. ``rows``: by part its doubtful rows, as
    an Arrow stream."""

    rows: Mapping[int, bytes]
    suspects: frozenset[int] = frozenset()

    @classmethod
    def at(
        cls, tables: Mapping[int, pa.Table], suspects: frozenset[int] = frozenset()
    ) -> "SecondLook":
        rows = {part: to_stream(table) for part, table in tables.items()}
        return cls(rows=rows, suspects=suspects)

    async def run(self, options: FsckOptions, begin_pace: BeginPace) -> list[pa.RecordBatch]:
        doubtful = {
            verdict.ledger_id: (part, verdict)
            for part, rows in self.rows.items()
            for verdict in from_table(from_stream(rows))
        }
        batches = []
        for wanted, chosen in _by_share(doubtful, self.suspects, options):
            verdicts = [doubtful[ledger_id][1] for ledger_id in chosen]
            batches += await _in_batches(
                recheck(wanted, verdicts, begin_pace=begin_pace),
                lambda ledger_id: doubtful[ledger_id][0],
            )
        return batches


Look = FirstLook | SecondLook


def looking(looks: Sequence[Look], options: FsckOptions, begin_pace: BeginPace) -> Work:
    """Return the work of a task: it takes the position of a look, and yields its rows
    (``ROWS``)."""

    def run(position: int) -> Iterator[pa.RecordBatch]:
        set_up()
        yield from asyncio.run(looks[position].run(options, begin_pace))

    return run


def _by_share(
    ledger_ids: Collection[int], suspects: frozenset[int], options: FsckOptions
) -> Iterator[tuple[FsckOptions, Sequence[int]]]:
    """Yield the ledgers with the options for them: suspects are read completely. Empty groups are
    left out."""
    if others := [ledger_id for ledger_id in ledger_ids if ledger_id not in suspects]:
        yield options, others
    if whole := [ledger_id for ledger_id in ledger_ids if ledger_id in suspects]:
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
    seems_wrong = pa.array([verdict.seems_wrong for verdict in verdicts], pa.bool_())
    columns = [*to_batch(verdicts).columns, parts, seems_wrong]
    return pa.RecordBatch.from_arrays(columns, schema=ROWS)


def _left_out(ledger_ids: Sequence[int], part: int) -> pa.RecordBatch:
    """Return rows without verdicts, for skipped ledgers."""
    rows = [{"ledger_id": ledger_id, "part": part} for ledger_id in ledger_ids]
    return pa.RecordBatch.from_pylist(rows, schema=ROWS)
