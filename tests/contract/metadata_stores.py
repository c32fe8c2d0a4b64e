"""Metadata stores of both kinds for the contract tests, and their faults."""

import asyncio
import functools
import itertools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar

from kazoo.client import KazooClient

from ledgers.store import MetadataStore, Operation
from ledgers.zookeeper.store import ZooKeeperStore
from tests.memory.store import Fault, MemoryStore, MemoryTree
from tests.tcp_proxy import TcpProxy
from tests.zookeeper_server import PATIENT_SESSION_S, ZooKeeperServer

P = ParamSpec("P")
T = TypeVar("T")

TEST_TIMEOUT_S = 120

_root_numbers = itertools.count()


class Backend(Protocol):
    """A place to open stores on. ``root``: an empty znode that no other test uses."""

    root: str

    async def open(self) -> MetadataStore: ...

    async def suspend(self, store: MetadataStore) -> None:
        """Break the store's connection, and return when the store has noticed."""
        ...

    async def resume(self, store: MetadataStore) -> None:
        """Let the store connect again, without waiting for it."""
        ...

    async def expire(self, store: MetadataStore) -> None:
        """End the store's session on the server. A suspended store cannot know yet."""
        ...

    async def lose_reply(self, store: MetadataStore, request: Coroutine[Any, Any, T]) -> T:
        """Return the outcome of a request that is executed, but whose reply is lost."""
        ...

    async def close(self) -> None: ...


class MemoryBackend:
    """A tree in memory."""

    root = "/root"

    def __init__(self) -> None:
        self._tree = MemoryTree()
        self._stores: list[MemoryStore] = []

    async def open(self) -> MetadataStore:
        store = MemoryStore(self._tree)
        if not self._stores:
            await store.create(self.root)
        self._stores.append(store)
        return store

    async def suspend(self, store: MetadataStore) -> None:
        self._tree.suspend(_memory(store))

    async def resume(self, store: MetadataStore) -> None:
        self._tree.resume(_memory(store))

    async def expire(self, store: MetadataStore) -> None:
        self._tree.expire(_memory(store))

    async def lose_reply(self, store: MetadataStore, request: Coroutine[Any, Any, T]) -> T:
        def lose_once(_: MemoryStore, operations: Sequence[Operation]) -> Fault:
            self._tree.faults = None
            return Fault.LOST_REPLY

        self._tree.faults = lose_once
        return await request

    async def close(self) -> None:
        for store in self._stores:
            await store.close()


class ZooKeeperBackend:
    """A real server. Every store has its own proxy in front of the server."""

    def __init__(self, server: ZooKeeperServer) -> None:
        self.root = f"/contract-{next(_root_numbers)}"
        self._server = server
        self._proxies: dict[MetadataStore, TcpProxy] = {}

    async def open(self) -> MetadataStore:
        proxy = TcpProxy(self._server.port)
        store = await ZooKeeperStore.open(await proxy.start(), session_timeout_s=PATIENT_SESSION_S)
        if not self._proxies:
            await store.create(self.root)
        self._proxies[store] = proxy
        return store

    async def suspend(self, store: MetadataStore) -> None:
        self._proxies[store].cut()
        await store.wait_disconnected()

    async def resume(self, store: MetadataStore) -> None:
        self._proxies[store].restore()

    async def expire(self, store: MetadataStore) -> None:
        assert isinstance(store, ZooKeeperStore), store
        password = store._session._client._session_passwd
        await asyncio.to_thread(end_session, self._server.address, (store.session_id, password))

    async def lose_reply(self, store: MetadataStore, request: Coroutine[Any, Any, T]) -> T:
        proxy = self._proxies[store]
        proxy.hold_replies()
        outcome = asyncio.get_running_loop().create_task(request)
        await proxy.wait_reply()
        proxy.cut()
        proxy.restore()
        return await outcome

    async def close(self) -> None:
        for store, proxy in self._proxies.items():
            await store.close()
            await proxy.close()


def end_session(address: str, client_id: tuple[int, bytes]) -> None:
    """Close a session with its id and password, as any client can."""
    client = KazooClient(address, client_id=client_id)
    client.start()
    client.stop()
    client.close()


def on_loop(scenario: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Make a test of a coroutine function. It runs on its own loop with a timeout, and its backend
    is closed."""

    @functools.wraps(scenario)
    def test(*args: P.args, **kwargs: P.kwargs) -> None:
        async def run() -> None:
            try:
                async with asyncio.timeout(TEST_TIMEOUT_S):
                    await scenario(*args, **kwargs)
            finally:
                for value in kwargs.values():
                    if isinstance(value, MemoryBackend | ZooKeeperBackend):
                        await value.close()

        asyncio.run(run())

    return test


def _memory(store: MetadataStore) -> MemoryStore:
    assert isinstance(store, MemoryStore), store
    return store
