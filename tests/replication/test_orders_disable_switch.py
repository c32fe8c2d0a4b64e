"""A session reads the disable switch, and is careful while the switch is unknown."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from ledgers.errors import SessionLostError, UnavailableError
from replication.orders import DisableSwitch
from replication.settings import ReplicationSettings
from tests.memory.store import MemoryStore
from tests.replication.cluster import Cluster, queue_empty, until, with_lost_b2
from tests.replication.nodes import PATHS, working
from tests.replication.overload import overload

DISABLE = PATHS.disable
SOON_S = 0.5


class Watched:
    """A watched switch. ``told_count``: how often it reported a change."""

    def __init__(self, cluster: Cluster) -> None:
        self.store = MemoryStore(cluster.tree)
        self.switch = DisableSwitch(self.store, PATHS, cluster.clock)
        self.told_count = 0

    async def watch(self) -> None:
        async with aclosing(self.switch.watch()) as readings:
            async for _ in readings:
                self.told_count += 1


@asynccontextmanager
async def watching(cluster: Cluster) -> AsyncIterator[Watched]:
    watched = Watched(cluster)
    task = asyncio.create_task(watched.watch())
    await asyncio.sleep(SOON_S)
    try:
        yield watched
        assert not task.done(), "nothing ends it but the session"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await watched.store.close()


async def reconnect(cluster: Cluster, store: MemoryStore) -> None:
    cluster.tree.suspend(store)
    await asyncio.sleep(SOON_S)
    cluster.tree.resume(store)
    await asyncio.sleep(SOON_S)


async def test_a_watched_switch_is_known_without_a_request(cluster: Cluster) -> None:
    async with watching(cluster) as watched:
        before = watched.store.request_count
        assert not await watched.switch.is_on()
        assert watched.store.request_count == before

        await cluster.store.create(DISABLE)
        await asyncio.sleep(SOON_S)
        assert await watched.switch.is_on()

        await cluster.store.delete(DISABLE)
        await asyncio.sleep(SOON_S)
        assert not await watched.switch.is_on()


@pytest.mark.parametrize("is_on", [False, True], ids=["off", "on"])
async def test_rule_s8_an_unreadable_switch_stops_new_work(
    cluster: Cluster,
    is_on: bool,
) -> None:
    """It is read again."""
    async with watching(cluster) as watched:
        throttled = overload(watched.store, DISABLE)
        await reconnect(cluster, watched.store)
        if is_on:
            await cluster.store.create(DISABLE)
        await asyncio.sleep(60)
        assert not watched.switch.may_lease
        with pytest.raises(UnavailableError):
            await watched.switch.is_on()

        throttled.clear()
        told_count = watched.told_count
        await asyncio.sleep(60)
        assert watched.switch.may_lease is not is_on
        assert await watched.switch.is_on() is is_on
        assert watched.told_count > told_count, "waiting callers are woken"


async def test_rule_s8_the_switch_stays_on_until_its_removal_is_read(cluster: Cluster) -> None:
    await cluster.store.create(DISABLE)
    async with watching(cluster) as watched:
        throttled = overload(watched.store, DISABLE)
        await cluster.store.delete(DISABLE)
        await asyncio.sleep(60)
        assert not watched.switch.may_lease

        throttled.clear()
        await asyncio.sleep(60)
        assert watched.switch.may_lease


async def test_the_end_of_the_session_ends_the_watch(cluster: Cluster) -> None:
    """Also while the switch is read again."""
    watched = Watched(cluster)
    throttled = overload(watched.store, DISABLE)
    task = asyncio.create_task(watched.watch())
    await asyncio.sleep(60)

    throttled.clear()
    cluster.tree.expire(watched.store)

    with pytest.raises(SessionLostError):
        await task


async def test_a_worker_survives_an_unreadable_switch() -> None:
    cluster = await with_lost_b2(3)
    settings = ReplicationSettings(idle_wait_s=1000)
    async with cluster.node(settings=settings) as node:
        throttled = overload(node.store, DISABLE)
        async with working(node):
            await asyncio.sleep(60)
            assert len(await cluster.marked()) == 3
            assert await cluster.locked() == []

            throttled.clear()
            took_s = await until(cluster, lambda: queue_empty(cluster))

    assert took_s < 15, "it is not left to the next look"
