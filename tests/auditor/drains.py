"""Helpers for the tests of drains."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ledgers.model import BookieId
from replication.marks import marked_ledger_ids
from replication.orders import DrainOrder, OrderStore, drain_znode
from tests.auditor.auditing import Leader, draining
from tests.auditor.scenes import SOON_S
from tests.replication.cluster import Cluster
from tests.replication.nodes import PATHS

OWN = PATHS.private


async def order_drain(cluster: Cluster, bookie: BookieId, *, since_ms: int = 1) -> None:
    order = DrainOrder(since_ms=since_ms)
    await OrderStore(cluster.store, PATHS).give(drain_znode(PATHS, bookie), order, over=None)


async def own_marks(cluster: Cluster) -> list[int]:
    return await marked_ledger_ids(cluster.store, OWN)


@asynccontextmanager
async def drained_soon(cluster: Cluster, *bookies: BookieId) -> AsyncIterator[Leader]:
    """Yield after the orders are given and the leader has had time to handle them."""
    for bookie in bookies:
        await order_drain(cluster, bookie)
    async with draining(cluster) as leader:
        await asyncio.sleep(SOON_S)
        yield leader
