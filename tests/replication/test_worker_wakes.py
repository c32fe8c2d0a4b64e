"""The worker polls the queue soon after an event, and seldom without events."""

import asyncio

import pytest

from ledgers.store import MetadataStore
from replication.settings import ReplicationSettings
from tests.replication.cluster import Cluster, until
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import PATHS, working

FOREIGN = 1
"""A ledger leased by another node. Its mark keeps the directories, so no event reports others."""
LOST = 2
SELDOM = ReplicationSettings(idle_wait_s=600)


async def idle_cluster() -> Cluster:
    cluster = await Cluster.start(B1, B2, B3, B4)
    for ledger_id in (FOREIGN, LOST):
        await cluster.write_ledger((B1, B2, B3), ledger_id=ledger_id)
    await cluster.mark(B2, ledger_id=FOREIGN)
    await cluster.store.create(PATHS.lock(FOREIGN))
    return cluster


async def is_marked(store: MetadataStore) -> bool:
    return await store.exists(PATHS.mark(LOST)) is not None


@pytest.mark.parametrize("marked_after_s", [0.01, 0.3, 3.0])
async def test_marks_soon_after_a_loss_are_found_soon(
    marked_after_s: float,
) -> None:
    """The wait is no longer than the marks took to come."""
    cluster = await idle_cluster()

    async with cluster.node(settings=SELDOM) as node, working(node):
        await asyncio.sleep(3_000)
        await cluster.kill(B2)
        await asyncio.sleep(marked_after_s)
        await cluster.mark(B2, ledger_id=LOST)

        async def is_done() -> bool:
            return not await is_marked(cluster.store)

        assert await until(cluster, is_done) <= marked_after_s + 0.2

    await cluster.assert_whole(LOST)


async def test_a_worker_without_events_looks_as_seldom_as_configured() -> None:
    cluster = await idle_cluster()

    async with cluster.node(settings=SELDOM) as node, working(node):
        await asyncio.sleep(3_000)
        before = node.store.request_count
        await asyncio.sleep(10 * 600)

        assert node.store.request_count - before < 10 * 20
