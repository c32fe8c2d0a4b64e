"""The sources and the publisher on a real ZooKeeper, whose counters and zxids they rely on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import pytest

import notifications.objects
from ledgers.clock import SystemClock
from ledgers.store import ANY_VERSION
from notifications.bookies import BookieSource
from notifications.objects import ObjectPublisher, ObjectSource
from notifications.protocol import Change, bookie, published
from notifications.sources import Source
from notifications.versions import VersionTable
from replication.znodes import ClusterPaths, ensure_znode
from tests.zookeeper_server import ZooKeeperServer, opened, running_zookeeper

pytestmark = pytest.mark.cluster

ROOT = "/ledgers"
PATHS = ClusterPaths.below(ROOT)
TIMEOUT_S = 60


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeperServer]:
    with running_zookeeper(Path(tmp_path_factory.mktemp("zookeeper"))) as server:
        yield server


async def follow(source: Source, table: VersionTable) -> None:
    async with aclosing(source.changes()) as batches:
        async for batch in batches:
            table.apply(batch.changes, position=batch.position, horizon=batch.horizon)


async def until_told(table: VersionTable, expected: Change) -> None:
    """Return when the table has the change, which no earlier change may replace."""
    assert expected.version is not None
    async with asyncio.timeout(TIMEOUT_S):
        while table.answer(expected.key, expected.version - 1) != expected:  # noqa: ASYNC110  # no event
            await asyncio.sleep(0.02)


def test_publications_are_told_beyond_deleted_and_renumbered_batches(
    server: ZooKeeperServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications.objects, "BATCHES_KEPT", 5)
    monkeypatch.setattr(notifications.objects, "BATCHES_OVER", 2)
    monkeypatch.setattr(notifications.objects, "NUMBERS_MAX", 30)

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            stores = [await stack.enter_async_context(opened(server)) for _ in range(3)]
            source = ObjectSource(stores[0], PATHS, SystemClock())
            first, second = (ObjectPublisher(each, PATHS, SystemClock()) for each in stores[1:])
            tasks = [asyncio.ensure_future(each.run()) for each in (first, second)]
            await first.publish("a")
            table = await source.load()
            tasks.append(asyncio.ensure_future(follow(source, table)))

            for number in range(50):
                name = f"b{number % 7}"
                versions = await asyncio.gather(first.publish(name), second.publish(name))
            await until_told(table, Change(published(name), max(versions)))
            deleted = await second.delete("a")
            await until_told(table, Change(published("a"), deleted, True))
            nothing = await first.delete("a")
            await until_told(table, Change(published("a"), nothing, True))

            again = await ObjectSource(stores[0], PATHS, SystemClock()).load()
            assert again.answer(published(name), 0) == Change(published(name), max(versions))
            assert len(again) == 7
            names = await stores[0].children(PATHS.object_batches)
            assert max(names) < "b-0000000060"
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(scenario())


def test_bookies_are_told_with_their_zxids(server: ZooKeeperServer) -> None:
    async def scenario() -> None:
        async with opened(server) as store, opened(server) as of_source:
            available = f"{ROOT}/available"
            await ensure_znode(store, f"{available}/readonly")
            await ensure_znode(store, f"{ROOT}/cookies")
            await ensure_znode(store, f"{ROOT}/clock")

            async def now() -> int:
                """Return the zxid of a write that changes no bookie."""
                return (await store.set(f"{ROOT}/clock", b"", version=ANY_VERSION)).mzxid

            source = BookieSource(of_source, ROOT, SystemClock())
            table = await source.load()
            following = asyncio.ensure_future(follow(source, table))

            async with opened(server) as of_bookie:
                await of_bookie.create(f"{available}/b1:3181", is_ephemeral=True)
                registered = await store.exists(f"{available}/b1:3181")
                assert registered is not None
                await until_told(table, Change(bookie("b1:3181"), registered.czxid))
                await of_bookie.create(f"{available}/readonly/b1:3181", is_ephemeral=True)
                zxid = await now()
                await of_bookie.delete(f"{available}/b1:3181")
                await until_told(table, Change(bookie("b1:3181"), zxid + 1))
                zxid = await now()
            await until_told(table, Change(bookie("b1:3181"), zxid + 1, True))
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    asyncio.run(scenario())
