"""Which ledgers a run looks at, in which parts: fixed once, and kept, so that a killed run goes on
where it was.

Pure, but for ``Plan``, which reads what was fixed. A ledger made after the listing is the next
run's.
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

from auditor.fsck.levels import FsckOptions, Level
from auditor.fsck.results.checked import last_looks, skippable, suspects
from auditor.fsck.results.files import replace_tables
from auditor.fsck.running import FsckJob
from auditor.fsck.unchanged import Written
from auditor.fsck.weighing import COPY_BYTES, LIGHTEST, is_weighed

PART_MIN: Mapping[Level, int] = {Level.METADATA: 3_500, Level.ENDS: 100}
"""Ledgers, where they are not weighed: for fewer a job of Spark's and a session are not worth
opening; but for half as many in the last round, so that there is one for each slot."""
PART_MAX: Mapping[Level, int] = {
    Level.METADATA: 25_000,
    Level.ENDS: 2_000,
    Level.SAMPLE: 500,
    Level.FULL: 500,
}
"""Ledgers: what is lost when a run is killed, and what an executor holds the verdicts of, in
memory."""
WEIGHT_MIN, WEIGHT_MAX = 20_000, 2_000_000
"""The same where ledgers are weighed, in copies: some tenths of a second of reading, and some ten
seconds."""
PART_S = 60
"""What a part may take where the run's reads are limited, above that least weight."""
ROUND_SHARE, ROUND_SHARE_WEIGHED = 2 / 3, 1 / 2
"""Of what is left, what a round of parts takes, one for each slot: the last ones are small, and no
slot waits long. By half a slot may be half as fast as the others and hold up none; but it takes a
round more to come as far."""
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
"""Both, or neither: of metadata that need not be looked at unless it was written since
(``Written``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one task looks at. ``known``: of ledgers that need not be looked at while their metadata
    is as it was, which writing that was; the others, and these, stand in ``ledger_ids``, ascending.
    ``suspects``: of them those that are looked at whole."""

    number: int
    ledger_ids: "array[int]"
    known: Mapping[int, Written] = field(default_factory=dict)
    suspects: frozenset[int] = frozenset()


class Plan:
    """A plan that stands in a file: each part is a row group there."""

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
        """How many ledgers the part has."""
        size: int = self._file.metadata.row_group(number).num_rows
        return size

    @property
    def weight(self) -> int:
        return sum(self._weights)

    def weight_of(self, number: int) -> int:
        """How much there is to be read in the part: as ``weighing`` tells, or its ledgers."""
        return self._weights[number]

    @cached_property
    def _weights(self) -> list[int]:
        groups = (self._file.read_row_group(n, ["weight"]) for n in range(self.part_count))
        return [pc.sum(group["weight"]).as_py() for group in groups]

    def part(self, number: int) -> Part:
        rows = self._file.read_row_group(number).sort_by("ledger_id")
        ledger_ids = array("q", rows["ledger_id"].to_pylist())
        if "known_mtime_ms" not in rows.column_names:  # added later: of an earlier release
            return Part(number=number, ledger_ids=ledger_ids)
        skip = rows.filter(pc.is_valid(rows["known_version"]))
        written = zip(*(skip[name].to_pylist() for name in KNOWN), strict=True)
        known = dict(zip(skip["ledger_id"].to_pylist(), written, strict=True))
        suspect: frozenset[int] = frozenset()
        if "is_suspect" in rows.column_names:  # likewise
            suspect = frozenset(rows.filter(rows["is_suspect"])["ledger_id"].to_pylist())
        return Part(number=number, ledger_ids=ledger_ids, known=known, suspects=suspect)

    def ledger_ids(self, parts: Iterable[int]) -> pa.ChunkedArray:
        """Of these parts, in no order."""
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
    """Every ledger that was ``listed``, ascending, in the order in which they are looked at, and
    since which writing of its metadata one must be (null: in any case). Each weighs as much.

    In the order of their ids; where there may be no time for all, first by the day of the last look
    at them that was as close.
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
    """Those that are looked at in any case: of the others nothing may have to be read."""
    return array("q", rows.filter(pc.is_null(rows["known_version"]))["ledger_id"].to_pylist())


def with_weights(rows: pa.Table, weights: "array[int]") -> pa.Table:
    """``weights``: of ``to_be_weighed``, in that order."""
    column = pc.replace_with_mask(
        rows["weight"].combine_chunks(),
        pc.is_null(rows["known_version"]).combine_chunks(),
        pa.array(weights, pa.int64()),
    )
    return rows.set_column(rows.schema.get_field_index("weight"), PLANNED.field("weight"), column)


def cut_by_weight(
    rows: pa.Table, options: FsckOptions, job: FsckJob, *, slot_count: int
) -> list[pa.Table]:
    """The parts: large ones first, then ever smaller ones, but that no ledger is cut; or as many as
    told, much alike. ``slot_count``: tasks that run at once: they come in rounds of as many that
    weigh alike, so that all slots end together (factoring, by Hummel, Schonberg and Flynn, 1992).

    The heaviest come first, so that at the end none waits for one of them; but in the order of
    ``rows`` where there may be no time for all.
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
    """What a part weighs, at least and at most."""
    if not is_weighed(options.level):
        return PART_MIN[options.level], PART_MAX[options.level]
    limits = (options.reads_per_s, options.bytes_per_s // COPY_BYTES)
    limited = (limit * PART_S // slot_count for limit in limits if limit)
    return WEIGHT_MIN, min([WEIGHT_MAX, *limited])


def _bounds(
    ends: Sequence[int], weight_max: Callable[[int], int], slot_count: int, count_max: int
) -> list[tuple[int, int]]:
    """Where parts begin and end, which is behind their last ledger. One that weighs more is a part
    of its own.

    ``ends``: what the first so many ledgers weigh together. ``weight_max``: of each part of the
    next round, by what is left.
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
    """Likewise, of so many parts, however much there is in each; of fewer only where there are
    fewer ledgers."""
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
    if not job.checked_within_s:  # whatever the clocks of those that looked said
        checked = checked.slice(0, 0)
    since_ms = now_ms - round(job.checked_within_s * 1_000)
    found = skippable(checked, options, since_ms=since_ms)
    return found.rename_columns(["ledger_id", *KNOWN])


def _looked_up(ledger_ids: pa.ChunkedArray, among: pa.Table, column: str) -> pa.ChunkedArray:
    """What a table, with a row a ledger, tells of these in that column; null of those that it has
    not."""
    return among[column].take(pc.index_in(ledger_ids, among["ledger_id"]))


def _days(looks: pa.Table) -> pa.Table:
    """Whole days, so that ledgers of neighbouring ids mostly stay together."""
    days = pc.divide(looks["checked_ms"], DAY_MS)
    return pa.table({"ledger_id": looks["ledger_id"], "day": days})


def _quotient_up(number: int, divisor: int) -> int:
    return -(-number // divisor)
