"""The data directory of a real ZooKeeper is copied, changed, and put back: a standalone server, and
an ensemble of three, whose election raises the epoch. Bookies are in memory."""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import cast

import pytest

from auditor.ledger_map_updater import LedgerMapUpdater
from checkpoints.receipts import ClientProcess
from checkpoints.restores import ChainFile
from daemon.local import servers as servers_module
from daemon.local.java import Java
from daemon.local.ports import free_ports
from daemon.local.processes import Child, wait_until
from daemon.local.servers import Servers, zookeeper_monitor
from daemon.local.spec import ClusterSpec
from ledgers.clock import SystemClock
from ledgers.errors import UnavailableError
from ledgers.zookeeper.store import ZooKeeperStore
from tests.checkpoints.feed_cluster import BOOKIES, FeedCluster, Leader, MemoryDisk
from tests.checkpoints.test_feed_restored import Catalogue
from tests.ledgers.hooked_bookies import HookedBookies
from tests.zookeeper_server import START_TIMEOUT_S

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

LOOPBACK = "127.0.0.1"
QUORUM_CLASS = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
SESSION_TIMEOUT_S = 4.0
WAIT_S = 60.0


class ZooKeepers:
    """One server, or an ensemble."""

    def __init__(self, folder: Path, count: int) -> None:
        self._folder, self._count = folder, count
        ports = free_ports(3 * count)
        self._ports, peers = ports[:count], ports[count:]
        self._ensemble = {
            f"server.{number + 1}": f"{LOOPBACK}:{peers[2 * number]}:{peers[2 * number + 1]}"
            for number in range(count if count > 1 else 0)
        }
        self._processes: list[Child] = []
        for number in range(count):
            self._data(number).mkdir(parents=True)
            (self._data(number) / "myid").write_text(str(number + 1))

    @property
    def hosts(self) -> str:
        return ",".join(f"{LOOPBACK}:{port}" for port in self._ports)

    def start(self) -> None:
        for number, port in enumerate(self._ports):
            spec = ClusterSpec(
                zookeeper_port=port,
                bookie_ports=(),
                zookeeper_settings={"initLimit": "20", "syncLimit": "10", **self._ensemble},
            )
            servers = Servers(data=self._folder / str(number), java=Java.find())
            self._processes.append(servers.zookeeper(spec))
        wait_until(self._serve, self._processes, timeout_s=START_TIMEOUT_S)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        self._processes = []

    def back_up(self, to: Path) -> None:
        """Copy the data while the servers run, as backups do."""
        for number in range(self._count):
            shutil.copytree(self._data(number), to / str(number))

    def restore(self, backup: Path) -> None:
        self.stop()
        for number in range(self._count):
            shutil.rmtree(self._data(number))
            shutil.copytree(backup / str(number), self._data(number))
        self.start()

    def _serve(self) -> bool:
        return all("zk_server_state" in zookeeper_monitor(port) for port in self._ports)

    def _data(self, number: int) -> Path:
        return self._folder / str(number) / "zookeeper" / "data"


@pytest.fixture(
    params=[
        pytest.param(1, id="standalone"),
        pytest.param(3, marks=pytest.mark.long(group="feed"), id="an ensemble of three"),
    ]
)
def zookeepers(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ZooKeepers]:
    monkeypatch.setattr(servers_module, "ZOOKEEPER_CLASS", QUORUM_CLASS)
    found = ZooKeepers(tmp_path / "servers", request.param)
    try:
        found.start()
        yield found
    finally:
        found.stop()


class RealCluster(FeedCluster):
    """A cluster whose metadata is in ZooKeeper."""

    def __init__(self, zookeepers: ZooKeepers) -> None:
        super().__init__()
        self.zookeepers = zookeepers
        self.clock = SystemClock()  # type: ignore[assignment]
        self.bookies = HookedBookies(BOOKIES, clock=self.clock)

    async def open_store(self) -> ZooKeeperStore:
        return await ZooKeeperStore.open(
            self.zookeepers.hosts, session_timeout_s=SESSION_TIMEOUT_S, connect_timeout_s=30.0
        )

    async def connect(self) -> None:
        """Open the session of the test itself again."""
        await self.store.close()
        self.store = await self.open_store()  # type: ignore[assignment]
        self.manager = self.new_manager(self.store)

    @asynccontextmanager
    async def node(self, disk: MemoryDisk) -> AsyncIterator[None]:
        """Run a node for the duration of the block. It opens sessions until it is stopped."""
        leader = self.start_leader(disk)
        assert leader.task is not None
        try:
            yield
        finally:
            leader.task.cancel()
            await asyncio.gather(leader.task, return_exceptions=True)

    async def present_ids(self) -> set[int]:
        return {i async for listed in self.manager.ledger_ids() for i in listed}

    async def collect(self) -> None:
        """Let bookies delete the ledgers that ZooKeeper does not have."""
        existing = await self.present_ids()
        for bookie in map(self.bookies.bookie, BOOKIES):
            for ledger_id in bookie._ledgers.keys() - existing:
                del bookie._ledgers[ledger_id]

    async def _lead_in_session(self, leader: Leader, disk: MemoryDisk) -> None:
        while True:
            with suppress(UnavailableError, ExceptionGroup):  # like a daemon, it starts again
                leader.store = await self.open_store()
                try:
                    leader.updater = LedgerMapUpdater(
                        store=leader.store,
                        manager=self.new_manager(leader.store),
                        clock=self.clock,
                    )
                    await self._lead(leader, disk)
                finally:
                    await leader.store.close()
            await asyncio.sleep(0.5)


async def wait_equal(cluster: RealCluster, *catalogues: Catalogue) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while True:
        present = await cluster.present_ids()
        differing = [sorted(each.ledger_ids ^ present) for each in catalogues]
        if not any(differing):
            return
        assert time.monotonic() < deadline_s, f"the catalogues differ in {differing}"
        await asyncio.sleep(0.2)


async def test_clients_are_told_that_zookeeper_was_restored(
    zookeepers: ZooKeepers, tmp_path: Path
) -> None:
    """First the disk of a node tells. Then nothing but the receipts in SQLite does."""

    async def main(cluster: RealCluster) -> None:
        await cluster.prepare()
        await cluster.enable()
        in_zookeeper = Catalogue(cluster)
        in_sqlite = Catalogue(cluster, receipts=f"sqlite:///{tmp_path}/feed.db")
        disk = cast(MemoryDisk, ChainFile(tmp_path / "node", cluster="one"))

        async with cluster.node(disk), running(in_zookeeper), running(in_sqlite):
            await cluster.create(901)
            await wait_equal(cluster, in_zookeeper, in_sqlite)
            await asyncio.to_thread(zookeepers.back_up, tmp_path / "first")
        async with cluster.node(disk), running(in_zookeeper), running(in_sqlite):
            await cluster.delete(901)
            await cluster.create(902)
            await wait_equal(cluster, in_zookeeper, in_sqlite)
            await asyncio.to_thread(zookeepers.restore, tmp_path / "first")
            await cluster.connect()
            assert {901, 902} & await cluster.present_ids() == {901}
            await wait_equal(cluster, in_zookeeper, in_sqlite)
            for _ in range(30):
                await cluster.create()
            await wait_equal(cluster, in_zookeeper, in_sqlite)
        generation = (await cluster.chain()).generation
        assert (await cluster.chain()).is_after_restore
        assert in_zookeeper.comparison_count >= 2  # once more if ZooKeeper fails meanwhile
        assert in_sqlite.comparison_count >= 2

        async with cluster.node(MemoryDisk()), running(in_sqlite):
            await asyncio.to_thread(zookeepers.back_up, tmp_path / "second")
        told_count = in_sqlite.comparison_count
        async with cluster.node(MemoryDisk()), running(in_sqlite):
            await cluster.delete(901)
            await wait_equal(cluster, in_sqlite)
        await asyncio.to_thread(zookeepers.restore, tmp_path / "second")
        await cluster.connect()
        await cluster.collect()
        in_sqlite.process = ClientProcess()
        async with cluster.node(MemoryDisk()), running(in_sqlite):
            await wait_equal(cluster, in_sqlite)
            for _ in range(30):
                await cluster.create()
            await wait_equal(cluster, in_sqlite)
        assert 901 in in_sqlite.ledger_ids
        assert in_sqlite.comparison_count > told_count
        assert (await cluster.chain()).generation == generation

    cluster = RealCluster(zookeepers)
    await cluster.connect()
    try:
        await main(cluster)
    finally:
        await cluster.store.close()


@asynccontextmanager
async def running(catalogue: Catalogue) -> AsyncIterator[None]:
    task = asyncio.create_task(catalogue.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
