"""The store on a real ZooKeeper: what the contract that it shares with the one in memory leaves
out."""

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
from ledgers.store import ANY_VERSION, Create, MultiFailed, SessionState
from ledgers.zookeeper.store import ZooKeeperStore
from tests.contract.metadata_stores import on_loop
from tests.zookeeper_server import ZooKeeperServer, opened, running_zookeeper

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("no_session_thread_is_left")]


# --- Opening -------------------------------------------------------------------------------------


@on_loop
async def test_where_no_server_answers_opening_says_so_in_time() -> None:
    hosts = f"{LOOPBACK}:{free_ports(1)[0]}"

    with pytest.raises(UnavailableError) as caught:
        await ZooKeeperStore.open(hosts, connect_timeout_s=0.3)

    assert str(caught.value) == f"no ZooKeeper server answers (hosts={hosts}, waited_s=0.3)"


@on_loop
async def test_hosts_that_nobody_knows_an_address_of_are_named() -> None:
    hosts = f"no-such-host.invalid:2181,{LOOPBACK}:{free_ports(1)[0]}"

    with pytest.raises(UnavailableError, match=r"no_address_of=no-such-host\.invalid\)"):
        await ZooKeeperStore.open(hosts, connect_timeout_s=0.3)


@on_loop
async def test_a_server_that_says_nothing_is_given_up_in_time() -> None:
    async with silent_server() as hosts:
        with pytest.raises(UnavailableError, match="no ZooKeeper server answers"):
            await ZooKeeperStore.open(hosts, connect_timeout_s=0.3)


@on_loop
async def test_a_dead_server_among_the_hosts_leaves_time_for_the_others(
    server: ZooKeeperServer,
) -> None:
    async with silent_server() as dead:
        for _ in range(3):  # the order of the hosts is random
            store = await ZooKeeperStore.open(f"{dead},{server.address}", session_timeout_s=1)
            assert store.state is SessionState.CONNECTED
            await store.close()


@asynccontextmanager
async def silent_server() -> Any:
    """Takes connections, and says nothing. Yields its address."""
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
@on_loop
async def test_hosts_that_make_no_sense_are_a_setting_to_correct(
    hosts: str, complaint: str
) -> None:
    with pytest.raises(SettingsError, match=complaint):
        await ZooKeeperStore.open(hosts)


# --- Access --------------------------------------------------------------------------------------

CREDENTIALS = [("digest", "bookmender:secret")]


@on_loop
async def test_what_a_secured_store_creates_is_for_its_identity_alone(
    server: ZooKeeperServer,
) -> None:
    async with (
        opened(server, credentials=CREDENTIALS, is_secured=True) as ours,
        opened(server, credentials=CREDENTIALS) as same,
        opened(server) as stranger,
    ):
        await ours.create("/secured/a", b"data", with_parents=True)

        assert (await same.get("/secured/a"))[0] == b"data"
        for call in (
            stranger.get("/secured/a"),
            stranger.children("/secured"),
            stranger.set("/secured/a", b"", version=ANY_VERSION),
            stranger.delete("/secured/a"),
            stranger.create("/secured/b"),
        ):
            with pytest.raises(UnauthorizedError, match=r"ACL.*/secured"):
                await call
        with pytest.raises(MultiFailed) as failure:
            await stranger.multi([Create(path="/stranger"), Create(path="/secured/b")])
        assert failure.value.index == 1
        assert isinstance(failure.value.cause, UnauthorizedError)


@on_loop
async def test_what_bookkeeper_leaves_open_to_all_stays_open(server: ZooKeeperServer) -> None:
    """zkEnableSecurity has these exceptions, which operators' tools and clients rely on."""
    async with (
        opened(server, credentials=CREDENTIALS, is_secured=True) as ours,
        opened(server) as stranger,
    ):
        await ours.create("/open/lostBookieRecoveryDelay", b"0", with_parents=True)
        await ours.create("/open/idgen-long/HOB-0000000001", with_parents=True)

        await stranger.set("/open/lostBookieRecoveryDelay", b"5", version=0)
        await stranger.create("/open/idgen-long/HOB-0000000001/ID-", is_sequential=True)


@on_loop
async def test_a_secured_store_needs_credentials(server: ZooKeeperServer) -> None:
    async with opened(server, is_secured=True) as store:
        with pytest.raises(UnauthorizedError, match="credentials"):
            await store.create("/nobody")


@on_loop
async def test_credentials_that_the_server_refuses_are_an_error_at_once(
    server: ZooKeeperServer,
) -> None:
    with pytest.raises(UnauthorizedError, match="refuses our credentials"):
        await ZooKeeperStore.open(server.address, credentials=[("no-such-scheme", "x")])


# --- Quotas --------------------------------------------------------------------------------------


@on_loop
async def test_a_quota_that_is_used_up_is_trouble_that_may_be_over_one_day(
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
    "/zookeeper/quota/marks/zookeeper_limits": b"count=-1,bytes=-1=;byteHardLimit=-1;countHardLimit=2",
    "/zookeeper/quota/marks/zookeeper_stats": b"count=1,bytes=0",
}
"""The znode and one below it (``QuotaPath``, ``StatsTrack``)."""
