"""Our sessions while ZooKeeper is down, hangs, or sends nonsense."""

import asyncio
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any

import pytest

from daemon.local.ports import LOOPBACK
from ledgers.errors import CorruptionError, SessionLostError
from ledgers.store import Event, EventKind, SessionState
from ledgers.zookeeper import kazoo_session
from ledgers.zookeeper.kazoo_internals import OneSessionHandler
from ledgers.zookeeper.store import ZooKeeperStore
from tests.contract.metadata_stores import end_session
from tests.tcp_proxy import TcpProxy
from tests.zookeeper_server import ZooKeeperServer, opened

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("no_session_thread_is_left")]


async def kind_and_path(events: AsyncIterator[Event]) -> tuple[EventKind, str]:
    event = await anext(events)
    return event.kind, event.path


async def test_a_session_and_its_watches_survive_a_server_restart(
    server: ZooKeeperServer,
) -> None:
    async with opened(server) as store, aclosing(store.watch("/", is_recursive=True)) as events:
        await anext(events)
        await store.create("/held", is_ephemeral=True)
        session_id = store.session_id
        assert await kind_and_path(events) == (EventKind.CREATED, "/held")

        server.process.kill()
        await store.wait_disconnected()
        reading = asyncio.ensure_future(store.get("/held"))
        await asyncio.to_thread(server.start)

        _, stat = await reading
        assert stat.ephemeral_owner == session_id == store.session_id
        assert await kind_and_path(events) == (EventKind.RESET, "/")
        await store.create("/after", is_ephemeral=True)
        assert await kind_and_path(events) == (EventKind.CREATED, "/after")


async def test_a_session_survives_a_server_that_never_answers(
    server: ZooKeeperServer,
) -> None:
    """A server that is starting may accept a connection and not answer."""
    proxy = TcpProxy(server.port)
    await proxy.start()
    store = await ZooKeeperStore.open(proxy.address, session_timeout_s=6)
    try:
        await store.create("/lives-on", is_ephemeral=True)
        session_id = store.session_id
        await asyncio.sleep(1)  # the server hears nothing of the session meanwhile

        proxy.cut()
        await proxy.ignore_one()

        _, stat = await store.get("/lives-on")
        assert stat.ephemeral_owner == session_id == store.session_id
    finally:
        await store.close()
        await proxy.close()


async def test_a_frozen_server_suspends_the_session(server: ZooKeeperServer) -> None:
    async with opened(server, session_timeout_s=1) as store:
        with frozen(server):
            await store.wait_disconnected()


async def test_a_frozen_server_is_silent_until_it_answers_again(server: ZooKeeperServer) -> None:
    async with opened(server) as store, asyncio.timeout(60):  # idle: only pings are sent
        with frozen(server):
            await until(lambda: store.silent_s > 1)
            assert store.state is SessionState.CONNECTED
        await until(lambda: store.silent_s == 0)


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110  # no event tells of it
        await asyncio.sleep(0.01)


async def test_a_session_ends_if_its_event_loop_hangs(
    server: ZooKeeperServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call may never return, for example on a disk that hangs. Others must get its locks."""
    monkeypatch.setattr(kazoo_session, "SUSPENDED_TIMEOUTS_MAX", 1)
    holds, goes_on = threading.Event(), threading.Event()

    async def lock_and_hang() -> None:
        async with opened(server, session_timeout_s=1, ends_with_loop=True) as store:
            await store.create("/held-by-one-that-hangs", is_ephemeral=True)
            await asyncio.sleep(2)  # pings are answered
            holds.set()
            goes_on.wait()
            await store.wait_lost()
            with pytest.raises(SessionLostError):
                await store.get("/")

    async with (
        opened(server) as other,
        aclosing(other.watch("/held-by-one-that-hangs")) as events,
        asyncio.timeout(60),
    ):
        await anext(events)
        hanging = asyncio.create_task(asyncio.to_thread(asyncio.run, lock_and_hang()))
        try:
            assert (await kind_and_path(events))[0] is EventKind.CREATED
            await asyncio.to_thread(holds.wait)
            assert (await kind_and_path(events))[0] is EventKind.DELETED
        finally:
            goes_on.set()
        await hanging


async def test_closing_does_not_wait_for_a_frozen_server(
    server: ZooKeeperServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kazoo_session, "GOODBYE_MAX_S", 0.1)
    store = await ZooKeeperStore.open(server.address)
    with frozen(server):
        async with asyncio.timeout(5):
            await store.close()


@contextmanager
def frozen(server: ZooKeeperServer) -> Iterator[None]:
    server.process.pause()
    try:
        yield
    finally:
        server.process.resume()


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


async def test_a_session_given_up_is_closed(
    server: ZooKeeperServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its locks would remain without an owner."""
    monkeypatch.setattr(kazoo_session, "SUSPENDED_TIMEOUTS_MAX", 0.1)
    proxy = TcpProxy(server.port)
    store = await ZooKeeperStore.open(await proxy.start(), session_timeout_s=4)
    proxy.cut()
    await store.wait_disconnected()
    proxy.hold_replies()
    proxy.admit()
    await proxy.wait_reply()  # the session is about to be connected again

    await store.wait_lost()
    proxy.restore()

    await proxy.wait_unused()
    await store.close()
    await proxy.close()


async def test_a_lost_store_never_connects_again(
    server: ZooKeeperServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule S3: by default, kazoo replaces a lost session with a new one."""
    attempts = watched_attempts(monkeypatch)
    async with opened(server) as store:
        password = store._session._client._session_passwd
        # The store may take the session back before the other client closes it. It connects once
        # more after the end of the session, when the server says that the session has expired.
        while (outcome := await attempts.get()) == "connected":
            await asyncio.to_thread(end_session, server.address, (store.session_id, password))
        await store.wait_lost()

        assert outcome == "the session is over"
        assert await attempts.get() == "the session is over"


def watched_attempts(monkeypatch: pytest.MonkeyPatch) -> "asyncio.Queue[str]":
    """Return a queue with the outcome of each attempt of a store to connect."""
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


async def test_a_crashed_connection_ends_the_session_and_is_reported() -> None:
    crashes: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: crashes.append(context))
    async with babbling_server() as hosts:
        store = await ZooKeeperStore.open(hosts)

        with pytest.raises(CorruptionError, match="unexpected answer"):
            await store.get("/")
        await store.wait_lost()
        await store.close()

    assert [str(crash["message"]) for crash in crashes] == ["the connection to ZooKeeper crashed"]


@asynccontextmanager
async def babbling_server() -> Any:
    """Start a server that answers a request that was never sent. Yield its address."""

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
"""The body of a reply to joined reads."""


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    (length,) = struct.unpack("!i", await reader.readexactly(4))
    return await reader.readexactly(length)


def frame(body: bytes) -> bytes:
    return struct.pack("!i", len(body)) + body
