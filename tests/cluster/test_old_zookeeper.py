"""A real ZooKeeper before 3.6, without recursive watches and joined reads."""

import asyncio
from collections.abc import Iterator
from contextlib import aclosing

import pytest

from daemon.local import jars
from ledgers.clock import SystemClock
from ledgers.codec.layout import Layout
from ledgers.errors import SessionLostError, UnsupportedError
from ledgers.manager import LedgerManager
from ledgers.model import BookieId
from ledgers.registration import Registration
from ledgers.store import Event, EventKind
from replication.cluster import ViewSource
from tests.auditor.ledger_map_scenes import closed
from tests.cluster.ledger_maps import running_updater, wait_complete, wait_until
from tests.contract.metadata_stores import Backend, ZooKeeperBackend, on_loop
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
def backend(old_zookeeper: ZooKeeperServer) -> Backend:
    return ZooKeeperBackend(old_zookeeper)


# --- Watches -------------------------------------------------------------------------------------


@on_loop
async def test_a_watch_reports_changes_of_a_znode_and_its_children(
    backend: Backend,
) -> None:
    store, other = await backend.open(), await backend.open()
    path = f"{backend.root}/a"

    async with aclosing(store.watch(path)) as events:
        assert await anext(events) == Event(kind=EventKind.RESET, path=path)
        await other.create(path)
        assert await anext(events) == Event(kind=EventKind.CREATED, path=path)
        await other.set(path, b"data", version=0)
        assert await anext(events) == Event(kind=EventKind.CHANGED, path=path)
        await other.create(f"{path}/child")
        assert await anext(events) == Event(kind=EventKind.CHILDREN, path=path)
        await other.set(f"{path}/child", b"data", version=0)  # causes no event
        await other.delete(f"{path}/child")
        assert await anext(events) == Event(kind=EventKind.CHILDREN, path=path)
        await other.delete(path)
        assert await anext(events) == Event(kind=EventKind.DELETED, path=path)
        await other.create(path)
        assert await anext(events) == Event(kind=EventKind.CREATED, path=path)


@on_loop
async def test_reading_after_each_event_misses_nothing(backend: Backend) -> None:
    store, other = await backend.open(), await backend.open()

    async def write() -> None:
        for number in range(100):
            await other.create(f"{backend.root}/{number}")

    async with aclosing(store.watch(backend.root)) as events:
        writing = asyncio.create_task(write())
        seen = 0
        while seen < 100:
            await anext(events)
            seen = len(await store.children(backend.root))
        await writing


@on_loop
async def test_a_reconnection_causes_a_reset_and_events_continue(backend: Backend) -> None:
    store, other = await backend.open(), await backend.open()

    async with aclosing(store.watch(backend.root)) as events:
        await anext(events)
        await backend.suspend(store)
        await other.create(f"{backend.root}/missed")
        await backend.resume(store)
        assert (await anext(events)).kind is EventKind.RESET
        await other.create(f"{backend.root}/seen")
        assert (await anext(events)).kind is EventKind.CHILDREN


@on_loop
async def test_two_watches_of_one_path_are_independent(backend: Backend) -> None:
    store, other = await backend.open(), await backend.open()

    async with aclosing(store.watch(backend.root)) as stays:
        async with aclosing(store.watch(backend.root)) as goes:
            await anext(goes)
            await anext(stays)
        await other.create(f"{backend.root}/a")
        assert (await anext(stays)).kind is EventKind.CHILDREN

        await backend.expire(store)
        with pytest.raises(SessionLostError):
            await anext(stays)


@on_loop
async def test_watching_a_tree_is_refused_at_once(backend: Backend) -> None:
    store = await backend.open()

    async with aclosing(store.watch(backend.root, is_recursive=True)) as events:
        with pytest.raises(UnsupportedError, match=r"before 3\.6"):
            await anext(events)


# --- Users of watches -----------------------------------------------------------------------------


@on_loop
async def test_the_ledger_map_is_built_and_read_again(
    backend: Backend,
) -> None:
    """On request, after a reconnection, and when a new directory appears."""
    store, other = await backend.open(), await backend.open()
    manager = LedgerManager(other, backend.root, Layout.HIERARCHICAL)
    for ledger_id in range(150):  # reads are joined, if the server supports it
        await manager.create(ledger_id, closed(*BOOKIES))

    async with running_updater(store, backend.root) as updater:
        await wait_complete(updater, 1)
        assert updater.ledger_map.naming(BOOKIES[0]) == list(range(150))

        await manager.delete(7, version=-1)
        updater.rescan()
        await wait_complete(updater, 2)
        assert updater.ledger_map.get(7) is None

        await manager.create(2**40, closed(*BOOKIES))
        # Each new directory causes a scan of its own, so the ledger may come with a later one.
        await wait_until(updater, lambda ledgers: ledgers.get(2**40) is not None)

        await backend.suspend(store)
        await manager.delete(8, version=-1)
        await backend.resume(store)
        await wait_until(updater, lambda ledgers: ledgers.get(8) is None)


@on_loop
async def test_registrations_and_losses_are_seen_at_once(backend: Backend) -> None:
    store, other = await backend.open(), await backend.open()
    available = f"{backend.root}/available"
    await other.create(f"{available}/readonly/b:1", with_parents=True)
    await other.create(f"{available}/a:1")
    views = ViewSource(Registration(store, backend.root), SystemClock())
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
