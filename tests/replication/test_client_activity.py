"""The leader's records of clients' activity, as workers follow them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from replication.client_activity import STALE_AFTER_S, ActivitySource, ClientActivity, read_activity
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2
from tests.replication.nodes import PATHS

SAID = ClientActivity(active=frozenset({B1}), quiet=frozenset({B2}), copying_node_count=3)
SOON_S = 0.5


async def write_activity(cluster: Cluster, said: ClientActivity = SAID) -> None:
    path = PATHS.activity
    if await cluster.store.exists(path) is None:
        await cluster.store.create(path, said.to_json(), with_parents=True)
    else:
        await cluster.store.set(path, said.to_json(), version=-1)


@asynccontextmanager
async def following(cluster: Cluster) -> AsyncIterator[ActivitySource]:
    source = ActivitySource(cluster.store, PATHS, cluster.clock)
    running = asyncio.create_task(source.run())
    try:
        yield source
    finally:
        running.cancel()


async def test_an_old_record_does_not_count(cluster: Cluster) -> None:
    await write_activity(cluster)
    now_ms = cluster.clock.wall_ms()

    assert await read_activity(cluster.store, PATHS, now_ms=now_ms) == SAID
    late_ms = now_ms + int(STALE_AFTER_S * 1_000) + 1
    assert await read_activity(cluster.store, PATHS, now_ms=late_ms) is None


async def test_a_record_is_known_at_once(cluster: Cluster) -> None:
    async with following(cluster) as source:
        await asyncio.sleep(SOON_S)
        assert source.current is None
        seen = source.change_count

        await write_activity(cluster)
        await source.wait_change(seen, timeout_s=SOON_S)

        assert source.current == SAID


async def test_nothing_is_known_after_the_last_record_is_old(cluster: Cluster) -> None:
    async with following(cluster) as source:
        await write_activity(cluster)
        await asyncio.sleep(STALE_AFTER_S - 1)
        await write_activity(cluster)  # the same, and so no change
        await asyncio.sleep(STALE_AFTER_S - 1)
        assert source.current == SAID
        seen = source.change_count

        await source.wait_change(seen, timeout_s=5)

        assert source.current is None


async def test_an_unreadable_record_counts_as_none(cluster: Cluster) -> None:
    async with following(cluster) as source:
        await write_activity(cluster)
        await asyncio.sleep(SOON_S)

        await cluster.store.set(PATHS.activity, b"?", version=-1)
        await asyncio.sleep(SOON_S)

        assert source.current is None
