"""A node's load on ZooKeeper: requests in flight, and requests a second."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from daemon.live_settings import LiveSettings
from daemon.local.cluster import LocalCluster
from daemon.session import open_session
from daemon.settings import Settings, ZooKeeperSettings
from ledgers.zookeeper.flow import REQUESTS_FIRST, REQUESTS_MIN, SLOW_MIN_S
from ledgers.zookeeper.store import ZooKeeperStore
from replication.journal import MetadataJournal
from replication.nodes import Role
from replication.orders import LimitsOrder, OrderStore, limits_znode
from tests.cluster.steps import wait_for
from tests.tcp_proxy import TcpProxy
from tests.zookeeper_server import PATIENT_SESSION_S, ZooKeeperServer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

CALLERS = 4 * REQUESTS_FIRST


async def test_fewer_requests_are_in_flight_while_zookeeper_is_slow(
    server: ZooKeeperServer,
) -> None:
    proxy = TcpProxy(server.port)
    store = await ZooKeeperStore.open(await proxy.start(), session_timeout_s=PATIENT_SESSION_S)

    async def ask_on_and_on() -> None:
        while True:
            await store.exists("/")  # never joined with another

    async with asyncio.TaskGroup() as tasks:
        callers = [tasks.create_task(ask_on_and_on()) for _ in range(CALLERS)]
        await wait_for(
            lambda: in_flight(store) > REQUESTS_FIRST, "more requests for a quick server"
        )

        proxy.reply_delay_s = 2 * SLOW_MIN_S
        await wait_for(lambda: in_flight(store) <= REQUESTS_MIN, "the fewest requests")

        proxy.reply_delay_s = 0.0
        await wait_for(lambda: in_flight(store) > REQUESTS_FIRST, "more requests again")
        for caller in callers:
            caller.cancel()
    await store.close()
    await proxy.close()


def in_flight(store: ZooKeeperStore) -> int:
    return len(store._session._in_flight)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[MetadataJournal]:
    with closing(MetadataJournal(tmp_path, process="test")) as journal:
        yield journal


async def test_both_services_follow_the_setting_and_an_order(
    cluster: LocalCluster, journal: MetadataJournal
) -> None:
    settings = replace(
        Settings(metadata_service_uri=cluster.metadata_service_uri),
        zookeeper=ZooKeeperSettings(requests_per_s=500),
    )
    async with (
        open_session(LiveSettings(settings), Role.WORKER, journal) as worker,
        open_session(LiveSettings(settings), Role.AUDITOR, journal) as auditor,
    ):
        stores = (worker.store, auditor.store)
        orders, znode = OrderStore(worker.store, worker.paths), limits_znode(worker.paths)

        async def wait_paced(requests_per_s: int) -> None:
            await wait_for(
                lambda: all(store.outbox.requests_per_s == requests_per_s for store in stores),
                f"pace of {requests_per_s} in both services",
            )

        await wait_paced(500)
        await orders.give(znode, LimitsOrder(requests_per_s=300), over=None)
        await wait_paced(300)
        stored = await orders.stored(znode)
        assert stored is not None
        await orders.withdraw(znode, over=stored)
        await wait_paced(500)
