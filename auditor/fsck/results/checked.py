"""Stores when each ledger was last checked, and at which level: ``state/checked.parquet``.

A run uses it to skip ledgers, and to order them if it has a time budget.
"""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from auditor.fsck.options import FsckOptions, Level
from auditor.fsck.results.tables import replace_table
from auditor.fsck.verdicts import Grade

CHECKED_FILE = "checked.parquet"
CHECKED = pa.schema(
    [
        ("ledger_id", pa.int64()),
        ("checked_ms", pa.int64()),
        ("depth", pa.int8()),
        ("sample_share", pa.float64()),
        ("metadata_version", pa.int32()),
        ("mtime_ms", pa.int64()),
        ("is_settled", pa.bool_()),
        ("is_wrong", pa.bool_()),
        ("is_unknown", pa.bool_()),
    ]
)
"""One row for each ledger and level, unless a later check was as close.

``depth``: of the level. ``sample_share``: 0 except at level ``sample``. ``mtime_ms``: of the
metadata's znode. ``is_settled``: the ledger was closed and had
no finding, neither then nor since, so that it need not be checked again soon. ``is_wrong``: as in
the run's rows. ``is_unknown``: the grade was ``unknown``.
"""

VERDICT_COLUMNS = [
    *("ledger_id", "verdict", "is_wrong", "reasons", "state", "metadata_version", "mtime_ms"),
    "checked_ms",
]
"""The columns of a run's rows that ``after_run`` needs."""


def read_checked(folder: Path) -> pa.Table:
    """Return the rows from the ``state`` folder. Empty before the first run."""
    path = folder / CHECKED_FILE
    if not path.exists():
        return CHECKED.empty_table()
    return pq.read_table(path, schema=CHECKED)


def write_checked(folder: Path, checked: pa.Table) -> None:
    replace_table(folder / CHECKED_FILE, checked)


def skippable(checked: pa.Table, options: FsckOptions, *, since_ms: int) -> pa.Table:
    """Return ``ledger_id``, ``metadata_version`` and ``mtime_ms`` of ledgers that need no check if
    their metadata still has both values. The version alone does not suffice: a ledger that was
    deleted and created again may have the same one."""
    is_close = pc.greater_equal(checked["depth"], options.level.depth)
    if options.level is Level.SAMPLE:
        is_deeper = pc.greater(checked["depth"], options.level.depth)
        is_close = pc.or_(
            is_deeper,
            pc.and_(is_close, pc.greater_equal(checked["sample_share"], options.sample_share)),
        )
    is_late = pc.greater_equal(checked["checked_ms"], since_ms)
    chosen = checked.filter(pc.and_(pc.and_(is_close, is_late), checked["is_settled"]))
    written = chosen.filter(pc.is_valid(chosen["mtime_ms"])).sort_by([("mtime_ms", "descending")])
    columns = ["metadata_version", "mtime_ms"]
    last = written.group_by("ledger_id", use_threads=False)  # threads keep no order
    last = last.aggregate([(column, "first") for column in columns])
    last = last.select(["ledger_id", *(f"{column}_first" for column in columns)])
    return last.rename_columns(["ledger_id", *columns])


def full_scan_ledgers(checked: pa.Table, options: FsckOptions) -> pa.ChunkedArray:
    """Return the ledgers to read completely: a sample found them wrong, and another sample may miss
    the bad entries."""
    if options.level is not Level.SAMPLE:
        return checked.slice(0, 0)["ledger_id"]
    is_of_sample = pc.equal(checked["depth"], options.level.depth)
    return checked.filter(pc.and_(is_of_sample, checked["is_wrong"]))["ledger_id"]


def doubtful_ledgers(checked: pa.Table, level: Level) -> pa.ChunkedArray:
    """Return the ledgers that the last check at this level or closer found wrong or unknown.

    A repair in place does not change their metadata, nor does a bookie that answers again. So a
    run that follows the change feed checks them, too.
    """
    is_doubtful = pc.or_(checked["is_wrong"], pc.fill_null(checked["is_unknown"], False))
    is_close = pc.greater_equal(checked["depth"], level.depth)
    return pc.unique(checked.filter(pc.and_(is_doubtful, is_close))["ledger_id"])


def last_checks(checked: pa.Table, level: Level) -> pa.Table:
    """Return ``ledger_id`` and ``checked_ms``: the time of the last check at this level or
    closer."""
    return _greatest(checked.filter(pc.greater_equal(checked["depth"], level.depth)), "checked_ms")


def _greatest(checked: pa.Table, column: str) -> pa.Table:
    """Return the greatest value in that column for each ledger."""
    found = checked.group_by("ledger_id").aggregate([(column, "max")])
    return found.select(["ledger_id", f"{column}_max"]).rename_columns(["ledger_id", column])


def after_run(
    before: pa.Table, verdicts: pa.Table, options: FsckOptions, *, listed: pa.ChunkedArray | None
) -> pa.Table:
    """Return the rows after a run, whose ``verdicts`` have ``VERDICT_COLUMNS``.

    A ledger without a verdict keeps its rows from ``before``, if it is still listed. ``listed``:
    None if the run did not list the ledgers: then all keep them. Other ledgers
    keep the rows of levels that read more; these rows remain settled unless this run found
    something.
    """
    is_sample = options.level is Level.SAMPLE
    count = verdicts.num_rows
    is_settled = pc.and_(
        pc.and_(
            pc.equal(verdicts["verdict"], Grade.WHOLE.value), pc.equal(verdicts["state"], "closed")
        ),
        pc.equal(pc.list_value_length(verdicts["reasons"]), 0),
    )
    now = pa.table(
        {
            "ledger_id": verdicts["ledger_id"],
            "checked_ms": verdicts["checked_ms"],
            "depth": pa.repeat(pa.scalar(options.level.depth, pa.int8()), count),
            "sample_share": pa.repeat(options.sample_share if is_sample else 0.0, count),
            "metadata_version": verdicts["metadata_version"],
            "mtime_ms": verdicts["mtime_ms"],
            "is_settled": is_settled,
            "is_wrong": verdicts["is_wrong"],
            "is_unknown": pc.equal(verdicts["verdict"], Grade.UNKNOWN.value),
        },
        schema=CHECKED,
    )
    if not before.num_rows:
        return now
    unsettled = verdicts["ledger_id"].filter(pc.invert(is_settled))
    is_upheld = pc.and_(before["is_settled"], pc.invert(pc.is_in(before["ledger_id"], unsettled)))
    is_kept = pc.or_(
        pc.greater(before["depth"], options.level.depth),
        pc.invert(pc.is_in(before["ledger_id"], verdicts["ledger_id"])),
    )
    if listed is not None:
        is_kept = pc.and_(is_kept, pc.is_in(before["ledger_id"], listed))
    column = CHECKED.get_field_index("is_settled")
    kept = before.set_column(column, CHECKED.field(column), is_upheld).filter(is_kept)
    return pa.concat_tables([kept, now])


def without(checked: pa.Table, deleted: Sequence[int]) -> pa.Table:
    """Return the rows without those of deleted ledgers."""
    if not deleted:
        return checked
    return checked.filter(pc.invert(pc.is_in(checked["ledger_id"], pa.array(deleted, pa.int64()))))


def wrong_among(checked: pa.Table, ledger_ids: pa.ChunkedArray) -> int:
    """Return how many of these ledgers were found wrong.

    The last check of a ledger counts, and an earlier one at a level that reads more.
    """
    chosen = pc.and_(checked["is_wrong"], pc.is_in(checked["ledger_id"], ledger_ids))
    return len(pc.unique(checked.filter(chosen)["ledger_id"]))
