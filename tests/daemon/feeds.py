"""Change feeds on a cluster in memory, for the tests of their commands."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from checkpoints.model import ledger_key
from checkpoints.receipts import Failure
from checkpoints.stores.zookeeper import ZooKeeperReceiptStore
from tests.checkpoints.feed_cluster import FeedCluster
from tests.replication.cluster import Cluster
from tests.replication.nodes import LEDGER, PATHS

CLIENT = "catalogue"


async def pass_time(seconds: float = 2.0) -> None:
    await asyncio.sleep(seconds)


@asynccontextmanager
async def feed(ledger_count: int = 0) -> AsyncIterator[tuple[FeedCluster, list[int]]]:
    """Yield a cluster whose feed is enabled, and the ids of ledgers that were created before."""
    cluster = await FeedCluster.start()
    ids = [await cluster.create() for _ in range(ledger_count)]
    async with cluster.leader():
        await cluster.enable()
        await pass_time()
        yield cluster, ids


async def client_with_failure(cluster: Cluster) -> None:
    receipts = await ZooKeeperReceiptStore.open(
        cluster.store, folder=PATHS.feed_clients, client=CLIENT
    )
    await receipts.store_low_watermark(1)
    await receipts.store_failure(
        Failure(key=ledger_key(LEDGER), version=2, because="disk full", time_ms=0)
    )
