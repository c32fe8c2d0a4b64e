"""Values for tests of a run's plan: the knowledge about ledgers, and the run's options."""

from array import array
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from auditor.fsck.options import FsckJob, FsckOptions, Level
from auditor.fsck.results.checked import CHECKED
from auditor.fsck.results.plan import DAY_MS, plan_rows

NOW_MS = 1_000 * DAY_MS
OUTPUT = Path("unused")


def options(level: Level = Level.ENDS, *, share: float = 0.1) -> FsckOptions:
    return FsckOptions(
        metadata_service_uri="zk://127.0.0.1:2181/ledgers", level=level, sample_share=share
    )


def job(*, days: float = 7, time_budget_s: float = 0, partition_count: int = 0) -> FsckJob:
    return FsckJob(
        run="20261121T193500Z",
        output=OUTPUT,
        checked_within_s=days * 86_400,
        time_budget_s=time_budget_s,
        partition_count=partition_count,
    )


def checked(
    ledger_id: int,
    *,
    days_ago: float = 1,
    level: Level = Level.ENDS,
    share: float = 0.0,
    is_settled: bool = True,
    is_wrong: bool = False,
    is_unknown: bool = False,
    version: int = 3,
    mtime_ms: int | None = 77,
) -> dict[str, object]:
    return {
        "ledger_id": ledger_id,
        "checked_ms": NOW_MS - round(days_ago * DAY_MS),
        "depth": level.depth,
        "sample_share": share,
        "metadata_version": version,
        "mtime_ms": mtime_ms,
        "is_settled": is_settled,
        "is_wrong": is_wrong,
        "is_unknown": is_unknown,
    }


def table(*rows: dict[str, object]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=CHECKED)


def ids(*ledger_ids: int) -> pa.ChunkedArray:
    return pa.chunked_array([ledger_ids], pa.int64())


def planned(listed: Sequence[int], known: pa.Table, *args: object, **kwargs: object) -> pa.Table:
    return plan_rows(array("q", listed), known, *args, now_ms=NOW_MS, **kwargs)  # type: ignore[arg-type]
