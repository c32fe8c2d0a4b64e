"""fsck on Spark, on real bookies: the sources, and complete and interrupted runs."""

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
from auditor.fsck.results.run_folder import unfinished_runs
from auditor.fsck.results.summary import Summary
from auditor.fsck.run import run_fsck
from auditor.fsck.spark.dispatch import Dispatch
from auditor.fsck.spark.sources import register
from auditor.fsck.tasks import Work
from daemon.local.cluster import LocalCluster
from ledgers.model import BookieId
from replication import znodes
from replication.znodes import ClusterPaths
from tests.cluster.fsck_ledgers import (
    ENTRY_COUNT,
    PAYLOAD_BYTES,
    WHOLE_COUNT,
    Ledgers,
    delete_ledger,
    make_ledgers,
    make_lost_ledger,
    verdicts_of,
    written_parts,
)
from tests.cluster.our_client import our_client
from tests.spark_cluster import spark_session

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

RUN = "20261121T193500Z"


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with spark_session() as session:
        register(session)
        yield session


@pytest.fixture(scope="module")
def ledgers(uri: str) -> Ledgers:
    return asyncio.run(make_ledgers(uri))


# --- Sources --------------------------------------------------------------------------------------


def read(spark: SparkSession, uri: str, source: str, **options: str) -> Any:
    reader = spark.read.format(source).option("metadataServiceUri", uri)
    return reader.options(**options).load()


def test_each_ledger_is_one_row_with_its_metadata(
    spark: SparkSession, uri: str, ledgers: Ledgers
) -> None:
    found = read(spark, uri, "bookkeeper-ledgers", numPartitions="5")

    rows = {row.ledger_id: row for row in found.collect()}
    assert sorted(rows) == ledgers.all
    assert found.count() == len(ledgers.all)
    assert found.rdd.getNumPartitions() == 5
    row = rows[ledgers.whole[0]]
    assert (row.state, row.ensemble_size, row.last_entry_id) == ("closed", 2, ENTRY_COUNT - 1)
    assert row.error is None
    (fragment,) = row.fragments
    assert (fragment.first_entry_id, fragment.last_entry_id) == (0, ENTRY_COUNT - 1)
    assert len(fragment.ensemble) == 2


@pytest.mark.parametrize(
    ("condition", "count"),
    [
        pytest.param("ledger_id = {third}", 1, id="one"),
        pytest.param("ledger_id < {third} AND state = 'closed'", 2, id="a range, and another"),
        pytest.param("ledger_id IN ({third}, 987654321)", 1, id="a list"),
        pytest.param("ledger_id > 987654321", 0, id="none"),
    ],
)
def test_only_ledgers_that_match_the_query_are_planned(
    spark: SparkSession, uri: str, ledgers: Ledgers, condition: str, count: int
) -> None:
    found = read(spark, uri, "bookkeeper-ledgers", numPartitions="20").where(
        condition.format(third=ledgers.all[2])
    )

    assert found.count() == count
    assert found.rdd.getNumPartitions() == max(1, count)


def test_bookies_are_listed(spark: SparkSession, uri: str, module_cluster: LocalCluster) -> None:
    rows = read(spark, uri, "bookkeeper-bookies").collect()

    assert [row.bookie for row in rows] == sorted(module_cluster.bookies)
    assert {(row.state, row.has_cookie, row.host) for row in rows} == {
        ("writable", True, "127.0.0.1")
    }


def test_marks_are_listed(spark: SparkSession, uri: str, ledgers: Ledgers) -> None:
    asyncio.run(_mark(uri, ledgers.lacking, "bookie-9:3181"))

    rows = read(spark, uri, "bookkeeper-underreplicated").collect()

    assert [(row.ledger_id, row.queue, row.bookies) for row in rows] == [
        (ledgers.lacking, "shared", ["bookie-9:3181"])
    ]


def test_every_copy_of_an_entry_is_a_row(spark: SparkSession, uri: str, ledgers: Ledgers) -> None:
    found = read(spark, uri, "bookkeeper-entries").where(
        f"ledger_id IN ({ledgers.whole[0]}, {ledgers.lacking})"
    )

    counts = {
        (row.ledger_id, row.answer): row["count"]
        for row in found.groupBy("ledger_id", "answer").count().collect()
    }
    assert counts == {
        (ledgers.whole[0], "present"): 2 * ENTRY_COUNT,
        (ledgers.lacking, "present"): ENTRY_COUNT,
        (ledgers.lacking, "absent"): ENTRY_COUNT,
    }
    last = found.where(f"answer = 'present' AND entry_id = {ENTRY_COUNT - 1}").first()
    assert (last.payload_bytes, last.length) == (
        PAYLOAD_BYTES,
        PAYLOAD_BYTES * ENTRY_COUNT,
    )


# --- Runs -----------------------------------------------------------------------------------------


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
    job = FsckJob(run=name, output=output, **{"partition_count": 3, **more})
    return run_fsck(Dispatch(spark.sparkContext, f"fsck {job.run}"), options, job, on_progress)


def test_the_next_run_leaves_out_ledgers_that_are_fine(
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

    later = run(spark, tmp_path, options(uri), name="later", checked_within_s=86_400)

    assert later.skipped == WHOLE_COUNT
    assert verdicts_of(tmp_path, "later") == {ledgers.lacking: "at_risk", ledgers.lost: "lost"}


def test_a_run_without_time_leaves_ledgers_for_the_next_run(
    spark: SparkSession, uri: str, ledgers: Ledgers, tmp_path: Path
) -> None:
    first = run(
        spark, tmp_path, options(uri, Level.METADATA), time_budget_s=0.001, partition_count=6
    )
    second = run(
        spark, tmp_path, options(uri, Level.METADATA), name="second", checked_within_s=86_400
    )

    assert not first.is_complete
    assert first.left + first.counts.ledgers == len(ledgers.all)
    assert second.skipped == first.counts.ledgers
    assert second.is_complete


class DriverDied(Exception):
    pass


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


def test_a_retried_task_gives_each_row_once(spark: SparkSession, tmp_path: Path) -> None:
    dispatch = Dispatch(spark.sparkContext, "tried again")

    results = list(dispatch.results([1, 2, 3], failing_once(tmp_path), NUMBERS))

    assert sorted(n for _, rows in results for n in rows["number"].to_pylist()) == [1, 2, 3]
    assert len(list(tmp_path.iterdir())) == 3


# --- Helpers --------------------------------------------------------------------------------------


async def _mark(uri: str, ledger_id: int, bookie: str) -> None:
    async with our_client(uri) as client:
        paths = ClusterPaths.below(client.uri.root)
        data = znodes.mark_to_bytes(znodes.Mark(replicas=(BookieId(bookie),)))
        path = paths.mark(ledger_id)
        await client.store.create(path, data, with_parents=True)
