"""The store on a real ZooKeeper: what the contract that it shares with the one in memory leaves out."""

import asyncio
import struct
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from daemon.local.ports import LOOPBACK, free_ports
from ledgers.errors import (
    CorruptionError,
    SessionLostError,
    SettingsError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.store import ANY_VERSION, Create, Event, EventKind, MultiFailed, SessionState
from ledgers.zookeeper import kazoo_session
from ledgers.zookeeper.kazoo_pipeline import OneSessionHandler
from ledgers.zookeeper.store import ZooKeeperStore
from tests.contract.metadata_stores import end_session, on_loop
from tests.tcp_proxy import TcpProxy
from tests.zookeeper_server import PATIENT_SESSION_S, ZooKeeperServer, running_zookeeper

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeperServer]:
    """Tests may kill it, and then start it again."""
    with running_zookeeper(tmp_path_factory.mktemp("zookeeper")) as server:
        yield server


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name == "zookeeper"] == []


@asynccontextmanager
async def opened(
    server: ZooKeeperServer, session_timeout_s: float = PATIENT_SESSION_S, **options: Any
) -> Any:
    store = await ZooKeeperStore.open(
        server.address, session_timeout_s=session_timeout_s, **options
    )
    try:
        yield store
    finally:
        await store.close()


# --- Opening -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hosts",
    [
        pytest.param(f"{LOOPBACK}:{free_ports(1)[0]}", id="nobody listens"),
        pytest.param("no-such-host.invalid:2181", id="a name that nobody knows"),
    ],
)
@on_loop
async def test_where_no_server_answers_opening_says_so_in_time(hosts: str) -> None:
    with pytest.raises(UnavailableError, match=f"no ZooKeeper server answers.*{hosts}"):
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


# --- The server breaks ---------------------------------------------------------------------------


async def told(events: AsyncIterator[Event]) -> tuple[EventKind, str]:
    event = await anext(events)
    return event.kind, event.path


@on_loop
async def test_a_session_and_its_watches_outlive_a_restart_of_the_server(
    server: ZooKeeperServer,
) -> None:
    async with opened(server) as store, aclosing(store.watch("/", is_recursive=True)) as events:
        await anext(events)
        await store.create("/held", is_ephemeral=True)
        session_id = store.session_id
        assert await told(events) == (EventKind.CREATED, "/held")

        server.process.kill()
        await store.wait_disconnected()
        reading = asyncio.ensure_future(store.get("/held"))
        await asyncio.to_thread(server.start)

        _, stat = await reading
        assert stat.ephemeral_owner == session_id == store.session_id
        assert await told(events) == (EventKind.RESET, "/")
        await store.create("/after", is_ephemeral=True)
        assert await told(events) == (EventKind.CREATED, "/after")


@on_loop
async def test_a_frozen_server_suspends_the_session(server: ZooKeeperServer) -> None:
    async with opened(server, session_timeout_s=1) as store:
        server.process.pause()
        try:
            await store.wait_disconnected()
        finally:
            server.process.resume()


@on_loop
async def test_closing_does_not_wait_for_a_frozen_server(
    server: ZooKeeperServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kazoo_session, "GOODBYE_MAX_S", 0.1)
    store = await ZooKeeperStore.open(server.address)
    server.process.pause()
    try:
        async with asyncio.timeout(5):
            await store.close()
    finally:
        server.process.resume()


@on_loop
async def test_a_session_without_a_server_for_too_long_counts_as_lost(
    server: ZooKeeperServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kazoo_session, "SUSPENDED_TIMEOUTS_MAX", 0.1)
    async with opened(server, session_timeout_s=4) as store:
        server.process.kill()
        try:
            with pytest.raises(SessionLostError):
                await store.get("/")
            await store.wait_lost()
        finally:
            await asyncio.to_thread(server.start)


@on_loop
async def test_a_session_that_is_given_up_does_not_live_on(
    server: ZooKeeperServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its locks would stand, and nobody would hold them."""
    monkeypatch.setattr(kazoo_session, "SUSPENDED_TIMEOUTS_MAX", 0.1)
    proxy = TcpProxy(server.port)
    store = await ZooKeeperStore.open(await proxy.start(), session_timeout_s=4)
    proxy.cut()
    await store.wait_disconnected()
    proxy.hold_replies()
    proxy.admit()
    await proxy.wait_reply()  # it is about to be connected again

    await store.wait_lost()
    proxy.restore()

    await proxy.wait_unused()
    await store.close()
    await proxy.close()


@on_loop
async def test_a_lost_store_never_connects_again(
    server: ZooKeeperServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule S3: left to itself, kazoo follows a lost session with a new one."""
    attempts = watched_attempts(monkeypatch)
    async with opened(server) as store:
        assert await attempts.get() == "connected"
        password = store._session._client._session_passwd
        await asyncio.to_thread(end_session, server.address, (store.session_id, password))
        assert await attempts.get() == "connected"  # to hear that the session has expired
        await store.wait_lost()

        assert await attempts.get() == "the session is over"
        assert await attempts.get() == "the session is over"


def watched_attempts(monkeypatch: pytest.MonkeyPatch) -> "asyncio.Queue[str]":
    """What became of each attempt of a store to connect."""
    attempts: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    create_connection = OneSessionHandler.create_connection

    def watched(self: OneSessionHandler, *args: Any, **options: Any) -> Any:
        outcome = "connected"
        try:
            return create_connection(self, *args, **options)
        except Exception as error:
            outcome = str(error)
            raise
        finally:
            loop.call_soon_threadsafe(attempts.put_nowait, outcome)

    monkeypatch.setattr(OneSessionHandler, "create_connection", watched)
    return attempts


@on_loop
async def test_a_connection_that_crashes_ends_the_session_and_is_heard_of() -> None:
    crashes: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: crashes.append(context))
    async with babbling_server() as hosts:
        store = await ZooKeeperStore.open(hosts)

        with pytest.raises(CorruptionError, match="do not understand"):
            await store.get("/")
        await store.wait_lost()
        await store.close()

    assert [str(crash["message"]) for crash in crashes] == ["the connection to ZooKeeper crashed"]


@asynccontextmanager
async def babbling_server() -> Any:
    """Answers a request that nobody made, after the first. Yields its address."""

    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_frame(reader)
        writer.write(frame(struct.pack("!iiqi16s?", 0, 10_000, 7, 16, bytes(16), False)))
        await read_frame(reader)
        writer.write(frame(struct.pack("!iqi", 1, 1, 0) + NO_PARTS))
        await read_frame(reader)
        writer.write(frame(struct.pack("!iqi", 4_711, 1, 0)))
        await reader.read()
        writer.close()

    listener = await asyncio.start_server(babble, LOOPBACK, 0)
    try:
        yield f"{LOOPBACK}:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()


NO_PARTS = struct.pack("!i?i", -1, True, -1)
"""Of a reply to joined reads."""


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    (length,) = struct.unpack("!i", await reader.readexactly(4))
    return await reader.readexactly(length)


def frame(body: bytes) -> bytes:
    return struct.pack("!i", len(body)) + body


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
