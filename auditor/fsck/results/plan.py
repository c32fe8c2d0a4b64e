"""The plan of a run: its ledgers, the part of each, and the work for it. Fixed once and stored, so
that a killed run can continue.

Pure, except ``Plan``, which reads the stored plan. Ledgers created after the listing are left to
the next run.
"""

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from auditor.fsck.ledger_list import (
    COPY_BYTES,
    LEDGER_WORK_MIN,
    MetadataStamp,
    is_estimated,
)
from auditor.fsck.options import FsckJob, FsckOptions, Level
from auditor.fsck.results.checked import full_scan_ledgers, last_checks, skippable
from auditor.fsck.results.tables import replace_tables

PART_MIN: Mapping[Level, int] = {Level.METADATA: 3_500, Level.ENDS: 100}
"""Ledgers in a part, if their work is not estimated. Fewer are not worth a Spark job and a session.
Parts of the last round may have half as many, so that each slot gets one."""
PART_MAX: Mapping[Level, int] = {
    Level.METADATA: 25_000,
    Level.ENDS: 2_000,
    Level.SAMPLE: 500,
    Level.FULL: 500,
}
"""Ledgers in a part. A killed run loses the verdicts of its running parts, and an executor keeps
them in memory."""
PART_WORK_MIN, PART_WORK_MAX = 20_000, 2_000_000
"""The limits of a part if the work is estimated, in copies: from some tenths of a second of reading
to some tens of seconds."""
PART_S = 60
"""Maximum time of a part if the run has rate limits; its work is at least ``PART_WORK_MIN``."""
ROUND_SHARE, ROUND_SHARE_ESTIMATED = 2 / 3, 1 / 2
"""Share of the remaining work in one round of parts, one part for each slot. So the last parts are
small, and no slot waits long. With a half, a slot may be half as fast as the others without
delaying them; but the same progress takes one more round."""
DAY_MS = 86_400_000
PLANNED = pa.schema(
    [
        ("ledger_id", pa.int64()),
        ("known_version", pa.int32()),
        ("known_mtime_ms", pa.int64()),
        ("work", pa.int64()),
        ("is_full_scan", pa.bool_()),
    ]
)
KNOWN = ["known_version", "known_mtime_ms"]
"""Both or neither are set: the write to the metadata (``MetadataStamp``) since which the ledger
needs no check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The ledgers of one task. ``ledger_ids``: all of them, ascending. ``known``: the ledgers that
    may be skipped, with the write to the metadata that must still be the last. ``full_scan``:
    the ledgers to read completely."""

    number: int
    ledger_ids: "array[int]"
    known: Mapping[int, MetadataStamp] = field(default_factory=dict)
    full_scan: frozenset[int] = frozenset()


class Plan:
    """A stored plan. Each part is a row group of the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def _file(self) -> pq.ParquetFile:
        return pq.ParquetFile(self._path)

    @property
    def part_count(self) -> int:
        count: int = self._file.num_row_groups
        return count

    @property
    def ledger_count(self) -> int:
        count: int = self._file.metadata.num_rows
        return count

    def size_of(self, number: int) -> int:
        """Return the number of ledgers of the part."""
        size: int = self._file.metadata.row_group(number).num_rows
        return size

    @property
    def work(self) -> int:
        return sum(self._work)

    def work_of(self, number: int) -> int:
        """Return how much must be read in the part: see ``estimate_work``, or else its ledgers."""
        return self._work[number]

    @cached_property
    def _work(self) -> list[int]:
        groups = (self._file.read_row_group(n, ["work"]) for n in range(self.part_count))
        return [pc.sum(group["work"]).as_py() for group in groups]

    def part(self, number: int) -> Part:
        rows = self._file.read_row_group(number).sort_by("ledger_id")
        ledger_ids = array("q", rows["ledger_id"].to_pylist())
        skip = rows.filter(pc.is_valid(rows["known_version"]))
        written = zip(*(skip[name].to_pylist() for name in KNOWN), strict=True)
        known = dict(zip(skip["ledger_id"].to_pylist(), written, strict=True))
        full_scan = frozenset(rows.filter(rows["is_full_scan"])["ledger_id"].to_pylist())
        return Part(number=number, ledger_ids=ledger_ids, known=known, full_scan=full_scan)

    def ledger_ids(self, parts: Iterable[int]) -> pa.ChunkedArray:
        """Return the ledger ids of these parts, in no order."""
        return self._file.read_row_groups(list(parts), ["ledger_id"])["ledger_id"]

    @classmethod
    def write(cls, path: Path, parts: Sequence[pa.Table]) -> None:
        replace_tables(path, parts, PLANNED)


def plan_rows(
    listed: "array[int]",
    checked: pa.Table,
    options: FsckOptions,
    job: FsckJob,
    *,
    now_ms: int,
) -> pa.Table:
    """Return the ``listed`` ledgers (ascending) in the order of the checks, all with the least
    work. ``KNOWN`` says which metadata lets a ledger be skipped; null: it is always checked.

    The order is that of the ids. With a time budget, it is first the day of the last check that was
    as close.
    """
    rows = pa.table({"ledger_id": pa.array(listed, pa.int64())})
    known = _known(checked, options, job, now_ms)
    columns = {name: _lookup(rows["ledger_id"], known, name) for name in KNOWN}
    columns["work"] = pa.repeat(LEDGER_WORK_MIN, rows.num_rows)
    columns["is_full_scan"] = pc.is_in(rows["ledger_id"], full_scan_ledgers(checked, options))
    for name, column in columns.items():
        rows = rows.append_column(name, column)
    if job.time_budget_s:
        days = _lookup(rows["ledger_id"], _days(last_checks(checked, options.level)), "day")
        rows = rows.append_column("day", pc.fill_null(days, 0))
        rows = rows.sort_by([("day", "ascending"), ("ledger_id", "ascending")])
    return rows.select(PLANNED.names).cast(PLANNED)


def ledgers_to_estimate(rows: pa.Table) -> "array[int]":
    """Return the ledgers that are always checked. The others may need no reads at all."""
    return array("q", rows.filter(pc.is_null(rows["known_version"]))["ledger_id"].to_pylist())


def with_work(rows: pa.Table, work: "array[int]") -> pa.Table:
    """Return the rows with ``work``, which is that of ``ledgers_to_estimate`` in that order."""
    column = pc.replace_with_mask(
        rows["work"].combine_chunks(),
        pc.is_null(rows["known_version"]).combine_chunks(),
        pa.array(work, pa.int64()),
    )
    return rows.set_column(rows.schema.get_field_index("work"), PLANNED.field("work"), column)


def cut_by_work(
    rows: pa.Table, options: FsckOptions, job: FsckJob, *, slot_count: int
) -> list[pa.Table]:
    """Return the parts: first large, then ever smaller ones. No ledger is cut. If the number of
    parts is set, they are about equal.

    ``slot_count``: number of tasks that run at once. Parts come in rounds of that many with equal
    work, so that all slots end together (factoring, by Hummel, Schonberg and Flynn, 1992).

    The largest parts come first, so that none is left at the end. With a time budget, the order is
    that of ``rows``.
    """
    ends = [0, *pc.cumulative_sum(rows["work"]).to_pylist()]
    if job.partition_count:
        bounds = _even_bounds(ends, job.partition_count)
    else:
        least, most = _work_range(options, slot_count)
        share = ROUND_SHARE_ESTIMATED if is_estimated(options.level) else ROUND_SHARE

        def work_max(left: int) -> int:
            work = math.ceil(left * share / slot_count)
            if work >= least:
                return min(most, work)
            rounds_left = max(1, left // (least * slot_count))
            return max(_quotient_up(least, 2), _quotient_up(left, rounds_left * slot_count))

        bounds = _bounds(ends, work_max, slot_count, PART_MAX[options.level])
    if not job.time_budget_s:
        bounds.sort(key=lambda bound: ends[bound[0]] - ends[bound[1]])
    return [rows.slice(start, stop - start) for start, stop in bounds]


def _work_range(options: FsckOptions, slot_count: int) -> tuple[int, int]:
    """Return the minimum and the maximum work of a part."""
    if not is_estimated(options.level):
        return PART_MIN[options.level], PART_MAX[options.level]
    limits = (options.reads_per_s, options.bytes_per_s // COPY_BYTES)
    limited = (limit * PART_S // slot_count for limit in limits if limit)
    return PART_WORK_MIN, min([PART_WORK_MAX, *limited])


def _bounds(
    ends: Sequence[int], work_max: Callable[[int], int], slot_count: int, count_max: int
) -> list[tuple[int, int]]:
    """Return the begin and the end (exclusive) of each part. A ledger with more work than the limit
    is a part of its own.

    ``ends``: the cumulative work. ``work_max``: returns the limit of each part of the next round,
    by the remaining work.
    """
    bounds: list[tuple[int, int]] = []
    start, count, limit = 0, len(ends) - 1, 0
    while start < count:
        if len(bounds) % slot_count == 0:
            limit = work_max(ends[-1] - ends[start])
        stop = bisect_right(ends, ends[start] + limit, start + 2, count + 1) - 1
        stop = min(stop, start + count_max)
        bounds.append((start, stop))
        start = stop
    return bounds


def _even_bounds(ends: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Return the bounds of ``count`` parts, regardless of their work; of fewer if there are fewer
    ledgers."""
    bounds: list[tuple[int, int]] = []
    start, size = 0, len(ends) - 1
    for parts_left in range(min(count, size), 0, -1):
        even = _quotient_up(ends[-1] - ends[start], parts_left)
        last_stop = size - parts_left + 1
        stop = bisect_right(ends, ends[start] + even, start + 2, last_stop + 1) - 1
        bounds.append((start, stop))
        start = stop
    return bounds


def _known(checked: pa.Table, options: FsckOptions, job: FsckJob, now_ms: int) -> pa.Table:
    if not job.checked_within_s:  # else checks by hosts with a clock ahead would count
        checked = checked.slice(0, 0)
    since_ms = now_ms - round(job.checked_within_s * 1_000)
    found = skippable(checked, options, since_ms=since_ms)
    return found.rename_columns(["ledger_id", *KNOWN])


def _lookup(ledger_ids: pa.ChunkedArray, among: pa.Table, column: str) -> pa.ChunkedArray:
    """Return for each id the value in that column of a table with one row per ledger; null if it
    has none."""
    return among[column].take(pc.index_in(ledger_ids, among["ledger_id"]))


def _days(checks: pa.Table) -> pa.Table:
    """Return whole days, so that ledgers with neighbouring ids mostly stay together."""
    days = pc.divide(checks["checked_ms"], DAY_MS)
    return pa.table({"ledger_id": checks["ledger_id"], "day": days})


def _quotient_up(number: int, divisor: int) -> int:
    return -(-number // divisor)
