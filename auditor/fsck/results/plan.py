"""The plan of a run: its ledgers, and the part of each. Fixed once and stored, so that a killed run
can continue.

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

from auditor.fsck.inspecting import Written
from auditor.fsck.ledger_ids import COPY_BYTES, LIGHTEST, is_weighed
from auditor.fsck.levels import FsckJob, FsckOptions, Level
from auditor.fsck.results.checked import last_looks, skippable, suspects
from auditor.fsck.results.files import replace_tables

PART_MIN: Mapping[Level, int] = {Level.METADATA: 3_500, Level.ENDS: 100}
"""Ledgers in a part, if ledgers are not weighed. Fewer are not worth a Spark job and a session.
Parts of the last round may have half as many, so that each slot gets one."""
PART_MAX: Mapping[Level, int] = {
    Level.METADATA: 25_000,
    Level.ENDS: 2_000,
    Level.SAMPLE: 500,
    Level.FULL: 500,
}
"""Ledgers in a part. A killed run loses the verdicts of its running parts, and an executor keeps
them in memory."""
WEIGHT_MIN, WEIGHT_MAX = 20_000, 2_000_000
"""The limits of a part if ledgers are weighed, in copies: from some tenths of a second of reading
to some tens of seconds."""
PART_S = 60
"""Maximum time of a part if the run has rate limits; its weight is at least ``WEIGHT_MIN``."""
ROUND_SHARE, ROUND_SHARE_WEIGHED = 2 / 3, 1 / 2
"""Share of the remaining work in one round of parts, one part for each slot. So the last parts are
small, and no slot waits long. With a half, a slot may be half as fast as the others without
delaying them; but the same progress takes one more round."""
DAY_MS = 86_400_000
PLANNED = pa.schema(
    [
        ("ledger_id", pa.int64()),
        ("known_version", pa.int32()),
        ("known_mtime_ms", pa.int64()),
        ("weight", pa.int64()),
        ("is_suspect", pa.bool_()),
    ]
)
KNOWN = ["known_version", "known_mtime_ms"]
"""Both or neither are set: the write to the metadata (``Written``) since which the ledger needs no
check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The ledgers of one task. ``ledger_ids``: all of them, ascending. ``known``: the ledgers that
    may be skipped, with the write to the metadata that must still be the last. ``suspects``: the
    ledgers to read completely."""

    number: int
    ledger_ids: "array[int]"
    known: Mapping[int, Written] = field(default_factory=dict)
    suspects: frozenset[int] = frozenset()


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
    def weight(self) -> int:
        return sum(self._weights)

    def weight_of(self, number: int) -> int:
        """Return how much must be read in the part: see ``weighing``, or else its ledgers."""
        return self._weights[number]

    @cached_property
    def _weights(self) -> list[int]:
        groups = (self._file.read_row_group(n, ["weight"]) for n in range(self.part_count))
        return [pc.sum(group["weight"]).as_py() for group in groups]

    def part(self, number: int) -> Part:
        rows = self._file.read_row_group(number).sort_by("ledger_id")
        ledger_ids = array("q", rows["ledger_id"].to_pylist())
        if "known_mtime_ms" not in rows.column_names:  # a plan of an earlier release
            return Part(number=number, ledger_ids=ledger_ids)
        skip = rows.filter(pc.is_valid(rows["known_version"]))
        written = zip(*(skip[name].to_pylist() for name in KNOWN), strict=True)
        known = dict(zip(skip["ledger_id"].to_pylist(), written, strict=True))
        suspect: frozenset[int] = frozenset()
        if "is_suspect" in rows.column_names:  # missing in plans of earlier releases
            suspect = frozenset(rows.filter(rows["is_suspect"])["ledger_id"].to_pylist())
        return Part(number=number, ledger_ids=ledger_ids, known=known, suspects=suspect)

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
    weight. ``KNOWN`` says which metadata lets a ledger be skipped; null: it is always checked.

    The order is that of the ids. With a time budget, it is first the day of the last look that was
    as close.
    """
    rows = pa.table({"ledger_id": pa.array(listed, pa.int64())})
    known = _known(checked, options, job, now_ms)
    columns = {name: _looked_up(rows["ledger_id"], known, name) for name in KNOWN}
    columns["weight"] = pa.repeat(LIGHTEST, rows.num_rows)
    columns["is_suspect"] = pc.is_in(rows["ledger_id"], suspects(checked, options))
    for name, column in columns.items():
        rows = rows.append_column(name, column)
    if job.time_budget_s:
        days = _looked_up(rows["ledger_id"], _days(last_looks(checked, options.level)), "day")
        rows = rows.append_column("day", pc.fill_null(days, 0))
        rows = rows.sort_by([("day", "ascending"), ("ledger_id", "ascending")])
    return rows.select(PLANNED.names).cast(PLANNED)


def to_be_weighed(rows: pa.Table) -> "array[int]":
    """Return the ledgers that are always checked. The others may need no reads at all."""
    return array("q", rows.filter(pc.is_null(rows["known_version"]))["ledger_id"].to_pylist())


def with_weights(rows: pa.Table, weights: "array[int]") -> pa.Table:
    """Return the rows with ``weights``, which are those of ``to_be_weighed`` in that order."""
    column = pc.replace_with_mask(
        rows["weight"].combine_chunks(),
        pc.is_null(rows["known_version"]).combine_chunks(),
        pa.array(weights, pa.int64()),
    )
    return rows.set_column(rows.schema.get_field_index("weight"), PLANNED.field("weight"), column)


def cut_by_weight(
    rows: pa.Table, options: FsckOptions, job: FsckJob, *, slot_count: int
) -> list[pa.Table]:
    """Return the parts: first large, then ever smaller ones. No ledger is cut. If the number of
    parts is set, they are about equal.

    ``slot_count``: number of tasks that run at once. Parts come in rounds of that many with equal
    weight, so that all slots end together (factoring, by Hummel, Schonberg and Flynn, 1992).

    The heaviest parts come first, so that none is left at the end. With a time budget, the order is
    that of ``rows``.
    """
    ends = [0, *pc.cumulative_sum(rows["weight"]).to_pylist()]
    if job.partition_count:
        bounds = _bounds_as_told(ends, job.partition_count)
    else:
        least, most = _weight_range(options, slot_count)
        share = ROUND_SHARE_WEIGHED if is_weighed(options.level) else ROUND_SHARE

        def weight_max(left: int) -> int:
            weight = math.ceil(left * share / slot_count)
            if weight >= least:
                return min(most, weight)
            rounds_left = max(1, left // (least * slot_count))
            return max(_quotient_up(least, 2), _quotient_up(left, rounds_left * slot_count))

        bounds = _bounds(ends, weight_max, slot_count, PART_MAX[options.level])
    if not job.time_budget_s:
        bounds.sort(key=lambda bound: ends[bound[0]] - ends[bound[1]])
    return [rows.slice(start, stop - start) for start, stop in bounds]


def _weight_range(options: FsckOptions, slot_count: int) -> tuple[int, int]:
    """Return the minimum and the maximum weight of a part."""
    if not is_weighed(options.level):
        return PART_MIN[options.level], PART_MAX[options.level]
    limits = (options.reads_per_s, options.bytes_per_s // COPY_BYTES)
    limited = (limit * PART_S // slot_count for limit in limits if limit)
    return WEIGHT_MIN, min([WEIGHT_MAX, *limited])


def _bounds(
    ends: Sequence[int], weight_max: Callable[[int], int], slot_count: int, count_max: int
) -> list[tuple[int, int]]:
    """Return the begin and the end (exclusive) of each part. A ledger heavier than the limit is a
    part of its own.

    ``ends``: the cumulative weights. ``weight_max``: returns the limit of each part of the next
    round, by the remaining weight.
    """
    bounds: list[tuple[int, int]] = []
    start, count, limit = 0, len(ends) - 1, 0
    while start < count:
        if len(bounds) % slot_count == 0:
            limit = weight_max(ends[-1] - ends[start])
        stop = bisect_right(ends, ends[start] + limit, start + 2, count + 1) - 1
        stop = min(stop, start + count_max)
        bounds.append((start, stop))
        start = stop
    return bounds


def _bounds_as_told(ends: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Return the bounds of ``count`` parts, whatever they weigh; of fewer if there are fewer
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
    if not job.checked_within_s:  # else looks by hosts with a clock ahead would count
        checked = checked.slice(0, 0)
    since_ms = now_ms - round(job.checked_within_s * 1_000)
    found = skippable(checked, options, since_ms=since_ms)
    return found.rename_columns(["ledger_id", *KNOWN])


def _looked_up(ledger_ids: pa.ChunkedArray, among: pa.Table, column: str) -> pa.ChunkedArray:
    """Return for each id the value in that column of a table with one row per ledger; null if it
    has none."""
    return among[column].take(pc.index_in(ledger_ids, among["ledger_id"]))


def _days(looks: pa.Table) -> pa.Table:
    """Return whole days, so that ledgers with neighbouring ids mostly stay together."""
    days = pc.divide(looks["checked_ms"], DAY_MS)
    return pa.table({"ledger_id": looks["ledger_id"], "day": days})


def _quotient_up(number: int, divisor: int) -> int:
    return -(-number // divisor)
