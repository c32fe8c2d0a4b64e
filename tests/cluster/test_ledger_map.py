"""The ledger map on a real ZooKeeper is right in the end, despite changes meanwhile."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from kazoo.client import KazooClient
from kazoo.security import ACL, ANYONE_ID_UNSAFE, Permissions

from auditor.ledger_map import MappedLedger
from auditor.ledger_map_updater import LedgerMapUpdater
from ledgers.clock import SystemClock
from ledgers.codec.layout import Layout
from ledgers.errors import NoSuchLedgerError
from ledgers.manager import LedgerManager
from ledgers.model import BookieId, LedgerMetadata
from ledgers.zookeeper.store import ZooKeeperStore
from tests.auditor.ledger_map_scenes import closed, contents, read_all, rescan
from tests.tcp_proxy import TcpProxy
from tests.zookeeper_server import PATIENT_SESSION_S, ZooKeeperServer

pytestmark = pytest.mark.cluster

ROOT = "/ledgers"
LEDGERS = 3_000
BOOKIES = [BookieId(f"bookie-{number}:3181") for number in range(20)]
WRITES_AT_ONCE = 100


class Writers:
    """Creates, changes and deletes ledgers with short and long ids, as a seed draws them."""

    def __init__(self, store: ZooKeeperStore, *, seed: int) -> None:
        print(f"seed: {seed}")
        self.manager = LedgerManager(store, ROOT, Layout.HIERARCHICAL)
        self._rng = random.Random(seed)

    async def create(self, ledger_ids: Sequence[int]) -> None:
        for start in range(0, len(ledger_ids), WRITES_AT_ONCE):
            part = ledger_ids[start : start + WRITES_AT_ONCE]
            await asyncio.gather(*(self.manager.create(i, self._metadata()) for i in part))

    async def change(self, ledger_ids: Sequence[int]) -> None:
        for start in range(0, len(ledger_ids), WRITES_AT_ONCE):
            part = ledger_ids[start : start + WRITES_AT_ONCE]
            await asyncio.gather(*map(self._change_one, part))

    def some(self, count: int) -> list[int]:
        """Return ids that may or may not exist."""
        numbers = self._rng.sample(range(2 * LEDGERS), count)
        return [number if number < LEDGERS else 2**40 + number for number in numbers]

    async def _change_one(self, ledger_id: int) -> None:
        """Delete or move the ledger if it exists; create it if not."""
        try:
            found = await self.manager.read(ledger_id)
        except NoSuchLedgerError:
            await self.manager.create(ledger_id, self._metadata())
            return
        if self._rng.random() < 0.5:
            await self.manager.delete(ledger_id, version=found.version)
        else:
            await self.manager.write(ledger_id, self._metadata(), read_as=found)

    def _metadata(self) -> LedgerMetadata:
        return closed(*self._rng.sample(BOOKIES, 3))


@asynccontextmanager
async def keeping_map(address: str) -> AsyncIterator[LedgerMapUpdater]:
    """Run an updater with a session of its own. It does not rescan by itself during a test."""
    store = await ZooKeeperStore.open(address, session_timeout_s=PATIENT_SESSION_S)
    updater = LedgerMapUpdater(
        store=store,
        manager=LedgerManager(store, ROOT, Layout.HIERARCHICAL),
        clock=SystemClock(),
    )
    task = asyncio.create_task(updater.run())
    try:
        yield updater
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await store.close()


async def wait_complete(updater: LedgerMapUpdater, count: int) -> None:
    """Wait until the map is complete and was completed this often."""
    while updater.completed_count < count or not updater.is_complete:
        await updater.wait_change(updater.change_count)


async def assert_comes_to_be(updater: LedgerMapUpdater, expected: dict[int, MappedLedger]) -> None:
    """Assert that the map becomes as expected.

    Events of the last writes may still be on their way.
    """
    try:
        async with asyncio.timeout(20):
            while not updater.is_complete or contents(updater) != expected:
                await updater.wait_change(updater.change_count)
    except TimeoutError:
        assert contents(updater) == expected


async def test_the_ledger_map_follows_every_change(
    server: ZooKeeperServer,
) -> None:
    """Ledgers change while the map is built, and while its session is cut off."""
    ours = await ZooKeeperStore.open(server.address, session_timeout_s=PATIENT_SESSION_S)
    writers = Writers(ours, seed=random.randrange(2**32))
    await writers.create(range(LEDGERS))
    proxy = TcpProxy(server.port)
    async with keeping_map(await proxy.start()) as updater:
        while len(updater.ledger_map) < LEDGERS / 4:
            await updater.wait_change(updater.change_count)
        assert not updater.is_complete
        await writers.change(writers.some(500))
        proxy.cut()
        await writers.change(writers.some(500))
        proxy.restore()
        await wait_complete(updater, 1)
        await writers.change(writers.some(500))
        await assert_comes_to_be(updater, await read_all(writers.manager))

        updater.take_touched()
        before, scans = contents(updater), updater.completed_count
        proxy.cut()
        await writers.change(writers.some(500))
        proxy.restore()
        await wait_complete(updater, scans + 1)
        await writers.change(writers.some(500))
        await assert_comes_to_be(updater, await read_all(writers.manager))

        after = contents(updater)
        changed = {i for i in before.keys() | after.keys() if before.get(i) != after.get(i)}
        assert changed <= set(updater.take_touched())
    await proxy.close()
    await ours.close()


async def test_rule_s8_a_denied_ledger_is_unreadable_in_the_ledger_map(
    server: ZooKeeperServer,
) -> None:
    ours = await ZooKeeperStore.open(server.address, session_timeout_s=PATIENT_SESSION_S)
    manager = LedgerManager(ours, ROOT, Layout.HIERARCHICAL)
    shut, open_one = 10**9, 10**9 + 1
    for ledger_id in (shut, open_one):
        await manager.create(ledger_id, closed(*BOOKIES[:3]))
    await asyncio.to_thread(
        set_permissions, server, manager.path(shut), Permissions.ALL & ~Permissions.READ
    )

    async with keeping_map(server.address) as updater, asyncio.timeout(20):
        await wait_complete(updater, 1)
        assert updater.ledger_map.unreadable == {shut}
        assert updater.ledger_map.get(open_one) is not None

        await manager.delete(shut, version=-1)
        rescan(updater)
        await wait_complete(updater, 2)
        assert updater.ledger_map.unreadable == set()
    await ours.close()


def set_permissions(server: ZooKeeperServer, path: str, permissions: int) -> None:
    """Set the permissions of the znode for all users."""
    client = KazooClient(hosts=server.address)
    client.start()
    try:
        client.set_acls(path, [ACL(permissions, ANYONE_ID_UNSAFE)])
    finally:
        client.stop()
        client.close()
