"""fsck on Spark, on real bookies: complete and interrupted runs."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from auditor.fsck.options import FsckJob, FsckOptions, FsckProgress, Level
from auditor.fsck.results.plan import PART_MAX
from auditor.fsck.results.run_folder import unfinished_runs
from auditor.fsck.results.summary import Summary
from auditor.fsck.run import run_fsck
from auditor.fsck.spark import Dispatch
from auditor.fsck.tasks import Work
from tests.cluster.fsck_ledgers import (
    ENTRY_COUNT,
    WHOLE_COUNT,
    Ledgers,
    delete_ledger,
    make_ledgers,
    make_lost_ledger,
    verdicts_of,
    written_parts,
)
from tests.spark_cluster import spark_session

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

RUN = "20261121T193500Z"


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with spark_session() as session:
        yield session


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for level in (Level.METADATA, Level.FULL):
        monkeypatch.setitem(PART_MAX, level, 14)


@pytest.fixture(scope="module")
def ledgers(uri: str) -> Ledgers:
    return asyncio.run(make_ledgers(uri))


def options(uri: str, level: Level = Level.FULL) -> FsckOptions:
    return FsckOptions(metadata_service_uri=uri, level=level)


def run(
    spark: SparkSession,
    output: Path,
    options: FsckOptions,
    *,
    name: str = RUN,
    on_progress: Callable[[FsckProgress], None] = lambda progress: None,
    **more: Any,
) -> Summary:
    job = FsckJob(run=name, output=output, **more)
    return run_fsck(Dispatch(spark.sparkContext, f"fsck {job.run}"), options, job, on_progress)


def test_a_run_finds_what_is_wrong(
    spark: SparkSession, uri: str, ledgers: Ledgers, tmp_path: Path
) -> None:
    seen: list[FsckProgress] = []
    summary = run(spark, tmp_path, options(uri), on_progress=seen.append)

    assert verdicts_of(tmp_path, RUN) == ledgers.verdicts
    assert {grade: n for grade, n in summary.counts.verdicts.items() if n} == {
        "whole": WHOLE_COUNT,
        "at_risk": 1,
        "lost": 1,
    }
    assert summary.exit_code == 1
    assert summary.counts.entries_read >= 2 * ENTRY_COUNT * WHOLE_COUNT
    assert list(dict.fromkeys(each.phase for each in seen)) == [
        "listing",
        "estimating",
        "checking",
        "rechecking",
        "writing",
    ]
    rows = spark.read.parquet(str(tmp_path / "ledgers")).where(f"ledger_id = {ledgers.lost}")
    (row,) = rows.collect()
    assert (row.run, row.verdict, row.reasons) == (RUN, "lost", ["missing"])
    assert {each.first_entry_id for each in row.evidence} == {ENTRY_COUNT}


@pytest.mark.long(group="fsck")
def test_a_run_without_time_leaves_ledgers_for_the_next_run(
    spark: SparkSession, uri: str, ledgers: Ledgers, tmp_path: Path
) -> None:
    first = run(spark, tmp_path, options(uri, Level.METADATA), time_budget_s=0.001)
    second = run(spark, tmp_path, options(uri, Level.METADATA), name="second")

    assert not first.is_complete
    assert first.left + first.counts.ledgers == len(ledgers.all)
    assert second.is_complete


class DriverDied(Exception):
    pass


@pytest.mark.long(group="fsck")
def test_a_continued_run_repeats_no_finished_part(
    spark: SparkSession, uri: str, ledgers: Ledgers, tmp_path: Path
) -> None:
    def die(progress: FsckProgress) -> None:
        if progress.phase == "checking" and progress.ledgers_done:
            raise DriverDied

    with pytest.raises(DriverDied):
        run(spark, tmp_path, options(uri), on_progress=die)
    assert list(unfinished_runs(tmp_path)) == [RUN]
    parts = written_parts(tmp_path)
    assert not (tmp_path / "ledgers").exists(), "readers see no incomplete run"

    summary = run(spark, tmp_path, options(uri))

    assert parts
    assert parts.items() <= written_parts(tmp_path / "ledgers").items()
    assert verdicts_of(tmp_path, RUN) == ledgers.verdicts
    assert summary.counts.ledgers == len(ledgers.all)
    assert list(unfinished_runs(tmp_path)) == []


@pytest.mark.long(group="fsck")
def test_ledgers_deleted_during_a_run_are_not_in_its_results(
    spark: SparkSession, uri: str, ledgers: Ledgers, tmp_path: Path
) -> None:
    doomed = asyncio.run(make_lost_ledger(uri))

    def delete(progress: FsckProgress) -> None:
        if progress.phase == "rechecking" and not progress.ledgers_done:
            asyncio.run(delete_ledger(uri, doomed))

    summary = run(spark, tmp_path, options(uri), on_progress=delete)

    assert verdicts_of(tmp_path, RUN) == ledgers.verdicts
    assert summary.gone == 1


# --- Tasks ----------------------------------------------------------------------------------------

NUMBERS = pa.schema([("number", pa.int64())])


def failing_once(folder: Path) -> Callable[[Sequence[int]], Work]:
    """Return work whose tasks give some rows and fail at their first attempt."""

    def work(numbers: Sequence[int]) -> Work:
        def rows(position: int) -> Iterator[pa.RecordBatch]:
            marker = folder / str(numbers[position])
            yield pa.RecordBatch.from_pylist([{"number": numbers[position]}], NUMBERS)
            if not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)

        return rows

    return work


@pytest.mark.long(group="fsck")
def test_a_retried_task_gives_each_row_once(spark: SparkSession, tmp_path: Path) -> None:
    dispatch = Dispatch(spark.sparkContext, "tried again")

    results = list(dispatch.results([1, 2, 3], failing_once(tmp_path), NUMBERS))

    assert sorted(n for _, rows in results for n in rows["number"].to_pylist()) == [1, 2, 3]
    assert len(list(tmp_path.iterdir())) == 3
