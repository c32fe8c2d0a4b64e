"""The plan of a run: its ledgers, cut into parts. It is stored, so that a killed run can go on.

``state/checked.parquet`` says when each ledger was last checked, and at which level. With a time
budget, the ledgers whose last check is the oldest come first. Ledgers created after the listing are
left to the next run.
"""

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from auditor.fsck.ledger_list import COPY_BYTES, LEDGER_WORK_MIN, is_estimated
from auditor.fsck.options import FsckOptions, Level
from auditor.fsck.verdicts import Grade
from ledgers.plain_files import in_place

PART_MIN: Mapping[Level, int] = {Level.METADATA: 3_500, Level.ENDS: 100}
"""Ledgers in a part, if their work is not estimated. Fewer are not worth a Spark job and a session.
Parts of the last round may have half as many, so that each slot gets one."""
PART_MAX = {Level.METADATA: 25_000, Level.ENDS: 2_000, Level.SAMPLE: 500, Level.FULL: 500}
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
        ("known_version", pa.int32()),  # null: an earlier release reads both columns
        ("known_mtime_ms", pa.int64()),
        ("work", pa.int64()),
        ("is_full_scan", pa.bool_()),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The ledgers of one task, ascending. ``full_scan``: those to read completely at any level."""

    number: int
    ledger_ids: "array[int]"
    full_scan: frozenset[int] = frozenset()

    @property
    def parts(self) -> tuple[int, ...]:
        return (self.number,)


@dataclass
class Plan:
    """A stored plan. Each part is a row group of the file."""

    path: Path

    @cached_property
    def _file(self) -> pq.ParquetFile:
        return pq.ParquetFile(self.path)

    @cached_property
    def sizes(self) -> Sequence[int]:
        """The number of ledgers of each part."""
        metadata = self._file.metadata
        return [metadata.row_group(n).num_rows for n in range(self._file.num_row_groups)]

    @cached_property
    def work(self) -> Sequence[int]:
        """How much must be read in each part: see ``estimate_work``, or else its ledgers."""
        groups = (self._file.read_row_group(n, ["work"]) for n in range(len(self.sizes)))
        return [pc.sum(group["work"]).as_py() for group in groups]

    def part(self, number: int) -> Part:
        rows = self._file.read_row_group(number, ["ledger_id", "is_full_scan"]).sort_by("ledger_id")
        return Part(
            number=number,
            ledger_ids=array("q", rows["ledger_id"].to_pylist()),
            full_scan=frozenset(rows.filter(rows["is_full_scan"])["ledger_id"].to_pylist()),
        )

    def ledger_ids(self, parts: Iterable[int]) -> pa.ChunkedArray:
        """Return the ledger ids of these parts, in no order."""
        return self._file.read_row_groups(list(parts), ["ledger_id"])["ledger_id"]

    @classmethod
    def write(cls, path: Path, parts: Iterable[pa.Table]) -> None:
        """Write the parts, none of which is empty."""
        with (
            in_place(path) as beside,
            pq.ParquetWriter(beside, PLANNED, compression="zstd") as file,
        ):
            for part in parts:
                file.write_table(part, row_group_size=part.num_rows)


def plan_rows(
    ledger_ids: "array[int]",
    checked: pa.Table,
    level: Level,
    *,
    work: "array[int] | None" = None,
    oldest_first: bool,
) -> pa.Table:
    """Return the ledgers (ascending) in the order of the checks: by id, or first by the day of the
    last check at this level or closer. ``work``: of each; None: equal.

    A ledger that a sample found wrong is read completely, because another sample may miss the bad
    entries.
    """
    count = len(ledger_ids)
    found_wrong = checked.filter(
        pc.and_(pc.equal(checked["depth"], Level.SAMPLE.depth), checked["is_wrong"])
    )
    full_scan = found_wrong["ledger_id"] if level is Level.SAMPLE else pa.array([], pa.int64())
    ids = pa.array(ledger_ids, pa.int64())
    rows = pa.table(
        {
            "ledger_id": ids,
            "known_version": pa.nulls(count, pa.int32()),
            "known_mtime_ms": pa.nulls(count, pa.int64()),
            "work": pa.repeat(LEDGER_WORK_MIN, count)
            if work is None
            else pa.array(work, pa.int64()),
            "is_full_scan": pc.is_in(ids, full_scan),
        },
        schema=PLANNED,
    )
    if not oldest_first:
        return rows
    close = checked.filter(pc.greater_equal(checked["depth"], level.depth))
    last = close.group_by("ledger_id").aggregate([("checked_ms", "max")])
    checked_ms = last["checked_ms_max"].take(pc.index_in(ids, last["ledger_id"]))
    # Whole days, so that ledgers with neighbouring ids mostly stay together.
    days = pc.fill_null(pc.divide(checked_ms, DAY_MS), 0)
    by_day = rows.append_column("day", days)
    return by_day.sort_by([("day", "ascending"), ("ledger_id", "ascending")]).select(PLANNED.names)


def cut_by_work(
    rows: pa.Table, options: FsckOptions, *, slot_count: int, keeps_order: bool
) -> list[pa.Table]:
    """Return the parts: first large, then ever smaller ones. No ledger is cut.

    ``slot_count``: number of tasks that run at once; 0: all is one part. Parts come in rounds of
    that many with equal work, so that all slots end together (factoring, by Hummel, Schonberg and
    Flynn, 1992). The largest parts come first, so that none is left at the end, unless the order of
    the rows is kept.
    """
    if not slot_count:
        return [rows] if rows.num_rows else []
    least, most = PART_MIN.get(options.level, 0), PART_MAX[options.level]
    share = ROUND_SHARE
    if is_estimated(options.level):
        limits = (options.reads_per_s, options.bytes_per_s // COPY_BYTES)
        limited = (limit * PART_S // slot_count for limit in limits if limit)
        least, most = PART_WORK_MIN, min([PART_WORK_MAX, *limited])
        share = ROUND_SHARE_ESTIMATED

    def work_max(left: int) -> int:
        """Return the maximum work of each part of the next round, by the remaining work."""
        work = math.ceil(left * share / slot_count)
        if work >= least:
            return min(most, work)
        rounds_left = max(1, left // (least * slot_count))
        return max(-(-least // 2), -(-left // (rounds_left * slot_count)))

    ends = [0, *pc.cumulative_sum(rows["work"]).to_pylist()]
    bounds: list[tuple[int, int]] = []
    start = limit = 0
    while start < rows.num_rows:
        if len(bounds) % slot_count == 0:
            limit = work_max(ends[-1] - ends[start])
        # A ledger with more work than the limit is a part of its own.
        stop = bisect_right(ends, ends[start] + limit, start + 2, len(ends)) - 1
        stop = min(stop, start + PART_MAX[options.level])
        bounds.append((start, stop))
        start = stop
    if not keeps_order:
        bounds.sort(key=lambda bound: ends[bound[0]] - ends[bound[1]])
    return [rows.slice(start, stop - start) for start, stop in bounds]


# --- When each ledger was last checked ------------------------------------------------------------

CHECKED_FILE = "checked.parquet"
CHECKED = pa.schema(
    [
        ("ledger_id", pa.int64()),
        ("checked_ms", pa.int64()),
        ("depth", pa.int8()),
        ("is_wrong", pa.bool_()),
        ("is_unknown", pa.bool_()),
    ]
)
"""One row for each ledger and level, unless a later check was as close. ``depth``: of the level.
``is_wrong``: as in the run's rows. ``is_unknown``: the grade was ``unknown``; null in rows of an
early release. Files of earlier releases have more columns."""
VERDICT_COLUMNS = ["ledger_id", "verdict", "is_wrong", "checked_ms"]
"""The columns of a run's rows that ``after_run`` needs."""


def read_checked(state: Path) -> pa.Table:
    """Return the rows from the ``state`` folder. Empty before the first run."""
    path = state / CHECKED_FILE
    return pq.read_table(path, schema=CHECKED) if path.exists() else CHECKED.empty_table()


def doubtful_ledgers(checked: pa.Table, level: Level) -> pa.ChunkedArray:
    """Return the ledgers that the last check at this level or closer found wrong or unknown.

    A repair in place does not change their metadata, nor does a bookie that answers again. So a
    run that follows the change feed checks them, too.
    """
    is_doubtful = pc.or_(checked["is_wrong"], pc.fill_null(checked["is_unknown"], False))
    is_close = pc.greater_equal(checked["depth"], level.depth)
    return pc.unique(checked.filter(pc.and_(is_doubtful, is_close))["ledger_id"])


def after_run(
    before: pa.Table,
    verdicts: pa.Table,
    level: Level,
    *,
    listed: pa.ChunkedArray | None,
    deleted: Sequence[int] = (),
) -> pa.Table:
    """Return the rows after a run, whose ``verdicts`` have ``VERDICT_COLUMNS``.

    A ledger without a verdict keeps its rows from ``before``, if it is still listed and not
    ``deleted``. ``listed``: None if the run did not list the ledgers. Other ledgers keep the rows
    of levels that read more.
    """
    now = pa.table(
        {
            "ledger_id": verdicts["ledger_id"],
            "checked_ms": verdicts["checked_ms"],
            "depth": pa.repeat(pa.scalar(level.depth, pa.int8()), verdicts.num_rows),
            "is_wrong": verdicts["is_wrong"],
            "is_unknown": pc.equal(verdicts["verdict"], Grade.UNKNOWN.value),
        },
        schema=CHECKED,
    )
    is_gone = pc.is_in(before["ledger_id"], pa.array(deleted, pa.int64()))
    if listed is not None:
        is_gone = pc.or_(is_gone, pc.invert(pc.is_in(before["ledger_id"], listed)))
    is_closer = pc.greater(before["depth"], level.depth)
    is_replaced = pc.and_not(pc.is_in(before["ledger_id"], verdicts["ledger_id"]), is_closer)
    kept = before.filter(pc.invert(pc.or_(is_gone, is_replaced)))
    return pa.concat_tables([kept, now])


def wrong_among(checked: pa.Table, ledger_ids: pa.ChunkedArray) -> int:
    """Return how many of these ledgers were found wrong.

    The last check of a ledger counts, and an earlier one at a level that reads more.
    """
    chosen = pc.and_(checked["is_wrong"], pc.is_in(checked["ledger_id"], ledger_ids))
    return len(pc.unique(checked.filter(chosen)["ledger_id"]))
