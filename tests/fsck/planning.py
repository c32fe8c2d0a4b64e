"""Values for tests of a run's plan: the knowledge about ledgers, and the run's options."""

from array import array
from collections.abc import Sequence

import pyarrow as pa

from auditor.fsck.options import FsckOptions, Level
from auditor.fsck.results.plan import CHECKED, DAY_MS, plan_rows

NOW_MS = 1_000 * DAY_MS


def options(level: Level = Level.ENDS, *, share: float = 0.1) -> FsckOptions:
    return FsckOptions(
        metadata_service_uri="zk://127.0.0.1:2181/ledgers", level=level, sample_share=share
    )


def checked(
    ledger_id: int,
    *,
    days_ago: float = 1,
    level: Level = Level.ENDS,
    is_wrong: bool = False,
    is_unknown: bool = False,
) -> dict[str, object]:
    return {
        "ledger_id": ledger_id,
        "checked_ms": NOW_MS - round(days_ago * DAY_MS),
        "depth": level.depth,
        "is_wrong": is_wrong,
        "is_unknown": is_unknown,
    }


def table(*rows: dict[str, object]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=CHECKED)


def ids(*ledger_ids: int) -> pa.ChunkedArray:
    return pa.chunked_array([ledger_ids], pa.int64())


def planned(
    listed: Sequence[int],
    known: pa.Table,
    level: Level = Level.ENDS,
    *,
    work: Sequence[int] | None = None,
    oldest_first: bool = False,
) -> pa.Table:
    weights = None if work is None else array("q", work)
    return plan_rows(array("q", listed), known, level, work=weights, oldest_first=oldest_first)
