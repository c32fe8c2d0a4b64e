"""Which ledgers a run looks at, in which parts: fixed once, and kept, so that a killed run goes on where it was.

Pure, but for ``Plan``, which reads what was fixed. A ledger made after the listing is the next run's.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from auditor.fsck.levels import FsckOptions, Level
from auditor.fsck.results.checked import last_looks, skippable
from auditor.fsck.results.files import replace_table
from auditor.fsck.running import FsckJob

PART_MIN = 25
"""Ledgers: for fewer an executor's session is not worth opening."""
PART_MAX: Mapping[Level, int] = {
    Level.METADATA: 10_000,
    Level.ENDS: 2_000,
    Level.SAMPLE: 500,
    Level.FULL: 500,
}
"""Ledgers: what is lost when a run is killed, and what an executor holds the verdicts of, in memory."""
PARTS_PER_SLOT = 4
"""At least, where there are ledgers enough: so that no slot waits long for the slowest."""
DAY_MS = 86_400_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one task looks at. ``known``: of ledgers that need not be looked at while their metadata is at this
    version, the version; the others, and these, stand in ``ledger_ids``, ascending."""

    number: int
    ledger_ids: "array[int]"
    known: Mapping[int, int] = field(default_factory=dict)


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
        return count if self.ledger_count else 0  # an empty file has an empty row group

    @property
    def ledger_count(self) -> int:
        count: int = self._file.metadata.num_rows
        return count

    def size_of(self, number: int) -> int:
        """How many ledgers the part has."""
        size: int = self._file.metadata.row_group(number).num_rows
        return size

    def part(self, number: int) -> Part:
        rows = self._file.read_row_group(number).sort_by("ledger_id")
        skip = rows.filter(pc.is_valid(rows["known_version"]))
        return Part(
            number=number,
            ledger_ids=array("q", rows["ledger_id"].to_pylist()),
            known=dict(
                zip(skip["ledger_id"].to_pylist(), skip["known_version"].to_pylist(), strict=True)
            ),
        )

    def ledger_ids(self) -> pa.ChunkedArray:
        """All, in no order."""
        return self._file.read(["ledger_id"])["ledger_id"]

    @classmethod
    def write(cls, path: Path, rows: pa.Table, *, part_size: int) -> None:
        replace_table(path, rows, row_group_size=part_size)


def plan_rows(
    listed: "array[int]",
    checked: pa.Table,
    options: FsckOptions,
    job: FsckJob,
    *,
    now_ms: int,
) -> pa.Table:
    """Every ledger that was listed, in the order in which they are looked at, and from which version of its
    metadata on one must be (null: in any case).

    In the order of their ids; where there may be no time for all, first by the day of the last look at
    them that was as close.
    """
    rows = pa.table({"ledger_id": pa.array(listed, pa.int64())})
    rows = rows.join(_known(checked, options, job, now_ms), "ledger_id")
    order = [("ledger_id", "ascending")]
    if job.time_budget_s:
        rows = rows.join(_days(last_looks(checked, options.level)), "ledger_id")
        rows = rows.set_column(
            rows.schema.get_field_index("day"), "day", pc.fill_null(rows["day"], 0)
        )
        order = [("day", "ascending"), *order]
    return rows.sort_by(order).select(["ledger_id", "known_version"])


def part_size(ledger_count: int, level: Level, job: FsckJob, *, slot_count: int) -> int:
    """Ledgers to a part. ``slot_count``: tasks that run at once."""
    if job.partition_count:
        return max(1, _quotient_up(ledger_count, job.partition_count))
    size = _quotient_up(ledger_count, PARTS_PER_SLOT * slot_count)
    return min(max(size, PART_MIN), PART_MAX[level])


def _known(checked: pa.Table, options: FsckOptions, job: FsckJob, now_ms: int) -> pa.Table:
    since_ms = now_ms - round(job.checked_within_s * 1_000) if job.checked_within_s else now_ms + 1
    found = skippable(checked, options, since_ms=since_ms)
    return found.rename_columns(["ledger_id", "known_version"])


def _days(looks: pa.Table) -> pa.Table:
    """Whole days, so that ledgers of neighbouring ids mostly stay together."""
    days = pc.divide(looks["checked_ms"], DAY_MS)
    return pa.table({"ledger_id": looks["ledger_id"], "day": days})


def _quotient_up(number: int, divisor: int) -> int:
    return -(-number // divisor)
