"""The change feed as a stream of Spark, on real bookies: no gap, whatever ends the query."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession

from checkpoints import spark as feed_stream
from checkpoints.chain import RETENTION_DEFAULT_S
from checkpoints.client import open_client_table
from daemon.local.cluster import LocalCluster
from daemon.local.processes import Child, wait_until
from daemon.operations.feed import connection_of, disable_feed, enable_feed
from ledgers.clock import SystemClock
from ledgers.errors import UnavailableError
from tests.checkpoints.feed_cluster import Follower
from tests.cluster.steps import AUDITOR_ONLY, WAIT_S, Bench, bench, nodes, shape, wait_for
from tests.cluster.test_feed import following
from tests.spark_cluster import spark_session
from tests.workload import Ending

pytestmark = [pytest.mark.cluster, pytest.mark.long(group="feed"), pytest.mark.timeout(1200)]

CLIENT = "stream"
TRIES = 3
TOO_BUSY = "connect back"
"""Spark gives its Python processes ten seconds to start, which no setting changes."""
DRIVER_TIMEOUT_S = 180.0
"""Deadline for the start of another Spark on a busy machine, and its first batch."""
CLOCK = SystemClock()


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with spark_session() as session:
        feed_stream.register(session)
        yield session


class Stream:
    """A query that begins and ends, always with the same checkpoint location."""

    def __init__(self, spark: SparkSession, uri: str, location: Path) -> None:
        self.spark, self.uri, self.location = spark, uri, location
        self.batches: list[tuple[int, dict[int, Row]]] = []

    def take(self, **options: str) -> dict[int, Row]:
        """Run the query over everything that there is now, and return the rows by ledger."""
        taken: dict[int, Row] = {}

        def note(batch: DataFrame, number: int) -> None:
            rows = batch.collect()
            found = {row.ledger_id: row for row in rows}
            assert len(found) == len(rows)  # each ledger once
            self.batches.append((number, found))
            taken.update(found)

        query = (
            self.spark.readStream.format("bookkeeper-changes")
            .options(metadataServiceUri=self.uri, client=CLIENT, **options)
            .load()
            .writeStream.foreachBatch(note)
            .option("checkpointLocation", str(self.location))
            .trigger(availableNow=True)
            .start()
        )
        try:
            query.awaitTermination()
        except StreamingQueryException as error:
            if TOO_BUSY not in str(error):
                raise
            return taken | self.take(**options)
        finally:
            query.stop()
        return taken


def killed_driver(uri: str, location: Path) -> tuple[int, dict[int, int]]:
    """Kill a driver between a batch and its commit. Return the number of the batch, and the version
    of each ledger in it."""
    for _ in range(TRIES):
        with suppress(UnavailableError):  # it ended because this machine is too busy
            return _killed_driver(uri, location)
    raise UnavailableError("no driver took a batch")


def _killed_driver(uri: str, location: Path) -> tuple[int, dict[int, int]]:
    out = location.parent / "batch.json"
    command = [sys.executable, "-m", "tests.feed_stream_driver", uri, CLIENT]
    driver = Child(
        "driver", [*command, str(location), str(out)], log=location.parent / "driver.log"
    )
    try:
        wait_until(out.exists, [driver], timeout_s=DRIVER_TIMEOUT_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)  # Python and the JVM
        driver.wait(timeout_s=WAIT_S)
    found = json.loads(out.read_text())
    return found["batch"], {row["ledger_id"]: row["version"] for row in found["rows"]}


@asynccontextmanager
async def feed(cluster: LocalCluster, folder: Path) -> AsyncIterator[Bench]:
    uri = cluster.metadata_service_uri
    async with bench(uri) as on, nodes(uri, folder) as start:
        start("node", settings=AUDITOR_ONLY)
        await enable_feed(on.seen, retention_s=RETENTION_DEFAULT_S, clock=CLOCK)
        yield on
        await disable_feed(on.seen, clock=CLOCK)


async def told(follower: Follower, *ledger_ids: int, deleted: Collection[int] = ()) -> None:
    """Wait until the feed has told that these ledgers exist, or are deleted."""
    await wait_for(
        lambda: (
            follower.catalogue.keys() >= {*ledger_ids}
            and follower.catalogue.keys().isdisjoint(deleted)
        ),
        "told changes",
    )


async def test_a_query_goes_on_where_it_was(
    spark: SparkSession, module_cluster: LocalCluster, tmp_path: Path
) -> None:
    uri = module_cluster.metadata_service_uri
    stream = Stream(spark, uri, tmp_path / "location")

    async def watermark(on: Bench) -> int | None:
        table = await open_client_table("zookeeper:", connection_of(on.seen))
        found = await table.find(CLIENT)
        return None if found is None else found.low_watermark

    async with feed(module_cluster, tmp_path) as on, following(on) as follower:
        first, second, third = [
            each.ledger_id
            for each in await on.write(*(shape(i, ending=Ending.CLOSED) for i in range(3)))
        ]
        await told(follower, first, second, third)
        taken = await asyncio.to_thread(stream.take, fromStart="true")
        assert taken.keys() >= {first, second, third}
        assert await asyncio.to_thread(stream.take) == {}

        await on.seen.manager.delete(first, version=-1)
        (fourth,) = [each.ledger_id for each in await on.write(shape(4, ending=Ending.CLOSED))]
        await told(follower, fourth, deleted=[first])
        count, before = len(stream.batches), await watermark(on)
        (number, killed) = await asyncio.to_thread(killed_driver, uri, stream.location)
        await asyncio.to_thread(stream.take)
        (again, failed), *_ = stream.batches[count:]
        assert again == number  # the batch of the killed driver, with the same rows
        assert {i: row.version for i, row in failed.items()} == killed
        assert failed.keys() >= {first, fourth}
        assert not failed.keys() & {second, third}
        assert (failed[first].is_deleted, failed[fourth].is_deleted) == (True, False)
        assert failed[first].fingerprint is None
        stat = (await on.seen.manager.read(fourth)).stat
        assert failed[fourth].version == stat.mzxid
        assert failed[fourth].time_ms > 0

        (fifth,) = [each.ledger_id for each in await on.write(shape(5, ending=Ending.CLOSED))]
        await told(follower, fifth)
        assert fifth in await asyncio.to_thread(stream.take)
        after = await watermark(on)
        assert before is not None
        assert after is not None
        assert after > before
        assert after >= failed[fourth].version  # Spark's commit is the receipt

        # Without its checkpoint location, a query begins where the client is.
        stream.location = tmp_path / "another location"
        taken = await asyncio.to_thread(stream.take)
        assert fifth in taken  # its batch has no receipt yet
        assert not taken.keys() & {first, second, third, fourth}

    with pytest.raises(Exception, match="the change feed is not enabled"):
        await asyncio.to_thread(stream.take)
