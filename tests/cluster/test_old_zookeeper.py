"""A real ZooKeeper before 3.6, which watches no trees and joins no reads: all works, if with more
requests."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager

import pytest

from auditor.ledger_map_updater import LedgerMapUpdater
from daemon.local import jars
from ledgers.clock import SystemClock
from ledgers.codec.layout import Layout
from ledgers.errors import SessionLostError, UnsupportedError
from ledgers.manager import LedgerManager
from ledgers.model import BookieId
from ledgers.registration import Registration
from ledgers.store import Event, EventKind, MetadataStore
from replication.cluster import ViewSource
from tests.auditor.ledger_map_scenes import closed
from tests.contract.metadata_stores import World, ZooKeeperWorld, on_loop
from tests.prepare import OLD_ZOOKEEPER
from tests.zookeeper_server import ZooKeeperServer, running_zookeeper

pytestmark = pytest.mark.cluster

BOOKIES = (BookieId("a:1"), BookieId("b:1"))


@pytest.fixture(scope="module")
def old_zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeperServer]:
    if not jars.jars_folder(OLD_ZOOKEEPER, module=jars.ZOOKEEPER).exists():
        pytest.skip(f"ZooKeeper {OLD_ZOOKEEPER} was not fetched: make test does that")
    with running_zookeeper(tmp_path_factory.mktemp("zookeeper"), version=OLD_ZOOKEEPER) as server:
        yield server


@pytest.fixture
def world(old_zookeeper: ZooKeeperServer) -> World:
    return ZooKeeperWorld(old_zookeeper)


# --- Watches -------------------------------------------------------------------------------------


@on_loop
async def test_a_watch_of_one_znode_tells_what_happens_to_it_and_to_its_children(
    world: World,
) -> None:
    store, other = await world.open(), await world.open()
    path = f"{world.root}/a"

    async with aclosing(store.watch(path)) as events:
        assert await anext(events) == Event(kind=EventKind.RESET, path=path)
        await other.create(path)
        assert await anext(events) == Event(kind=EventKind.CREATED, path=path)
        await other.set(path, b"data", version=0)
        assert await anext(events) == Event(kind=EventKind.CHANGED, path=path)
        await other.create(f"{path}/child")
        assert await anext(events) == Event(kind=EventKind.CHILDREN, path=path)
        await other.set(f"{path}/child", b"data", version=0)  # not told
        await other.delete(f"{path}/child")
        assert await anext(events) == Event(kind=EventKind.CHILDREN, path=path)
        await other.delete(path)
        assert await anext(events) == Event(kind=EventKind.DELETED, path=path)
        await other.create(path)
        assert await anext(events) == Event(kind=EventKind.CREATED, path=path)


@on_loop
async def test_a_reader_who_reads_after_each_event_misses_nothing(world: World) -> None:
    store, other = await world.open(), await world.open()

    async def write() -> None:
        for number in range(100):
            await other.create(f"{world.root}/{number}")

    async with aclosing(store.watch(world.root)) as events:
        writing = asyncio.create_task(write())
        seen = 0
        while seen < 100:
            await anext(events)
            seen = len(await store.children(world.root))
        await writing


@on_loop
async def test_a_reset_follows_a_reconnection_and_then_events_go_on(world: World) -> None:
    store, other = await world.open(), await world.open()

    async with aclosing(store.watch(world.root)) as events:
        await anext(events)
        await world.suspend(store)
        await other.create(f"{world.root}/missed")
        await world.resume(store)
        assert (await anext(events)).kind is EventKind.RESET
        await other.create(f"{world.root}/seen")
        assert (await anext(events)).kind is EventKind.CHILDREN


@on_loop
async def test_two_watches_of_one_path_end_apart_and_with_the_session(world: World) -> None:
    store, other = await world.open(), await world.open()

    async with aclosing(store.watch(world.root)) as stays:
        async with aclosing(store.watch(world.root)) as goes:
            await anext(goes)
            await anext(stays)
        await other.create(f"{world.root}/a")
        assert (await anext(stays)).kind is EventKind.CHILDREN

        await world.expire(store)
        with pytest.raises(SessionLostError):
            await anext(stays)


@on_loop
async def test_that_no_tree_is_watched_is_said_at_once(world: World) -> None:
    store = await world.open()

    async with aclosing(store.watch(world.root, is_recursive=True)) as events:
        with pytest.raises(UnsupportedError, match=r"before 3\.6"):
            await anext(events)


# --- Who lives with that -------------------------------------------------------------------------


@on_loop
async def test_the_index_is_built_and_read_again_when_asked_and_in_new_directories(
    world: World,
) -> None:
    store, other = await world.open(), await world.open()
    manager = LedgerManager(other, world.root, Layout.HIERARCHICAL)
    for ledger_id in range(150):  # reads are joined, if the server can
        await manager.create(ledger_id, closed(*BOOKIES))

    async with keeping(store, world.root) as updater:
        await wait_complete(updater, 1)
        assert updater.ledger_map.naming(BOOKIES[0]) == list(range(150))

        await manager.delete(7, version=-1)
        updater.rescan()
        await wait_complete(updater, 2)
        assert updater.ledger_map.get(7) is None

        await manager.create(2**40, closed(*BOOKIES))
        await wait_complete(updater, 3)
        assert updater.ledger_map.get(2**40) is not None

        await world.suspend(store)
        await manager.delete(8, version=-1)
        await world.resume(store)
        await wait_complete(updater, 4)
        assert updater.ledger_map.get(8) is None


@asynccontextmanager
async def keeping(store: MetadataStore, root: str) -> AsyncIterator[LedgerMapUpdater]:
    updater = LedgerMapUpdater(
        store=store,
        manager=LedgerManager(store, root, Layout.HIERARCHICAL),
        clock=SystemClock(),
        rescan_interval_s=3600,
    )
    task = asyncio.create_task(updater.run())
    try:
        yield updater
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def wait_complete(updater: LedgerMapUpdater, count: int) -> None:
    while updater.completed_count < count or not updater.is_complete:
        await updater.wait_change(updater.change_count)


@on_loop
async def test_bookies_that_come_and_go_are_seen_at_once(world: World) -> None:
    store, other = await world.open(), await world.open()
    available = f"{world.root}/available"
    await other.create(f"{available}/readonly/b:1", with_parents=True)
    await other.create(f"{available}/a:1")
    views = ViewSource(Registration(store, world.root), SystemClock())
    await views.refresh()
    following = asyncio.create_task(views.run())

    await other.delete(f"{available}/readonly/b:1")
    await wait_available(views, {"a:1"})
    await other.create(f"{available}/c:1")
    await wait_available(views, {"a:1", "c:1"})

    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def wait_available(views: ViewSource, bookies: set[str]) -> None:
    while views.current.available != bookies:
        await views.wait_change(views.change_count)
