"""The store on a real ZooKeeper, beyond the contract that it shares with the store in memory."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from daemon.local.ports import LOOPBACK, free_ports
from ledgers.errors import (
    SettingsError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.store import SessionState
from ledgers.zookeeper.kazoo_session import KazooSession
from ledgers.zookeeper.store import ZooKeeperStore
from tests.zookeeper_server import (
    PATIENT_SESSION_S,
    ZooKeeperServer,
    opened,
    running_zookeeper,
)

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("no_session_thread_is_left")]


# --- Opening -------------------------------------------------------------------------------------


async def test_opening_fails_in_time_if_no_server_answers() -> None:
    hosts = f"{LOOPBACK}:{free_ports(1)[0]}"

    with pytest.raises(UnavailableError) as caught:
        await ZooKeeperStore.open(hosts, connect_timeout_s=0.3)

    assert str(caught.value) == f"no ZooKeeper server answers (hosts={hosts}, waited_s=0.3)"


async def test_opening_fails_in_time_if_the_server_never_answers() -> None:
    async with silent_server() as hosts:
        with pytest.raises(UnavailableError, match="no ZooKeeper server answers"):
            await ZooKeeperStore.open(hosts, connect_timeout_s=0.3)


async def test_a_dead_server_leaves_time_for_the_other_hosts(
    server: ZooKeeperServer,
) -> None:
    async with silent_server() as dead:
        for _ in range(3):  # the order of the hosts is random
            store = await ZooKeeperStore.open(f"{dead},{server.address}", session_timeout_s=1)
            assert store.state is SessionState.CONNECTED
            await store.close()


@asynccontextmanager
async def silent_server() -> Any:
    """Start a server that accepts connections and never answers. Yield its address."""
    connections = []

    async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)

    listener = await asyncio.start_server(keep, LOOPBACK, 0)
    try:
        yield f"{LOOPBACK}:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()
        for writer in connections:
            writer.close()


@pytest.mark.parametrize(
    ("hosts", "complaint"),
    [
        pytest.param("", "not a connect string", id="empty"),
        pytest.param("host:port", "not a connect string", id="no port number"),
        pytest.param("host:2181/ledgers", "metadata service URI", id="a path"),
    ],
)
async def test_malformed_hosts_are_a_settings_error(hosts: str, complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        await ZooKeeperStore.open(hosts)


# --- Access --------------------------------------------------------------------------------------


async def test_a_secured_store_needs_an_identity(server: ZooKeeperServer) -> None:
    session = KazooSession(server.address, session_timeout_s=PATIENT_SESSION_S)
    await session.open(timeout_s=PATIENT_SESSION_S)
    store = ZooKeeperStore(session, is_secured=True)
    try:
        with pytest.raises(UnauthorizedError, match="refuses our ACL"):
            await store.create("/nobody")
    finally:
        await store.close()


# --- Quotas --------------------------------------------------------------------------------------


async def test_an_exhausted_quota_is_an_unavailable_error(
    tmp_path: Path,
) -> None:
    flags = ["-Dzookeeper.enforceQuota=true"]
    with running_zookeeper(tmp_path, flags=flags) as server:
        async with opened(server) as store:
            await store.create("/marks")
            for path, data in QUOTA_OF_MARKS.items():
                await store.create(path, data)
            await store.create("/marks/1")

            with pytest.raises(UnavailableError, match=r"quota of this path.*raise it.*/marks/2"):
                await store.create("/marks/2")

            await store.delete("/marks/1")
            await store.create("/marks/2")


QUOTA_OF_MARKS = {
    "/zookeeper/quota/marks": b"",
    "/zookeeper/quota/marks/zookeeper_limits": (
        b"count=-1,bytes=-1=;byteHardLimit=-1;countHardLimit=2"
    ),
    "/zookeeper/quota/marks/zookeeper_stats": b"count=1,bytes=0",
}
"""A quota of two: the znode and one child (``QuotaPath``, ``StatsTrack``)."""
