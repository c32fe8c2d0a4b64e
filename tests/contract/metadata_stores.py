"""Metadata stores of both kinds for the contract tests, and how to break them."""

import asyncio
import functools
import itertools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar

from kazoo.client import KazooClient

from ledgers.memory.store import Fault, MemoryStore, MemoryTree
from ledgers.store import MetadataStore, Operation
from ledgers.zookeeper.store import ZooKeeperStore
from tests.tcp_proxy import TcpProxy
from tests.zookeeper_server import PATIENT_SESSION_S, ZooKeeperServer

P = ParamSpec("P")
T = TypeVar("T")

TEST_TIMEOUT_S = 60

_root_numbers = itertools.count()


class World(Protocol):
    """Somewhere to open stores on. ``root``: an empty znode that nobody else uses."""

    root: str

    async def open(self) -> MetadataStore: ...

    async def suspend(self, store: MetadataStore) -> None:
        """Break its connection, and return when it knows."""
        ...

    async def resume(self, store: MetadataStore) -> None:
        """Let it connect again; does not wait for it."""
        ...

    async def expire(self, store: MetadataStore) -> None:
        """End its session on the server. A suspended store cannot know yet."""
        ...

    async def lose_reply(self, store: MetadataStore, request: Coroutine[Any, Any, T]) -> T:
        """The outcome of a request that is carried out, but whose reply is lost."""
        ...

    async def close(self) -> None: ...


class MemoryWorld:
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


class ZooKeeperWorld:
    """Every store has a proxy of its own between itself and the server."""

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
    """Take a session over, as anybody may who knows its id and password, and close it."""
    client = KazooClient(address, client_id=client_id)
    client.start()
    client.stop()
    client.close()


def on_loop(scenario: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Make a test of a coroutine function: on a loop of its own, bounded, its world closed after
    it."""

    @functools.wraps(scenario)
    def test(*args: P.args, **kwargs: P.kwargs) -> None:
        async def run() -> None:
            try:
                async with asyncio.timeout(TEST_TIMEOUT_S):
                    await scenario(*args, **kwargs)
            finally:
                for value in kwargs.values():
                    if isinstance(value, MemoryWorld | ZooKeeperWorld):
                        await value.close()

        asyncio.run(run())

    return test


def _memory(store: MetadataStore) -> MemoryStore:
    assert isinstance(store, MemoryStore), store
    return store
