"""A ZooKeeper in memory, for tests and simulation: one tree, and any number of sessions on it.

It behaves as ZooKeeper does as far as ``tests/contract/test_metadata_store*.py`` goes: versions,
one zxid a transaction, ephemeral owners, counters of sequential names, persistent watches. Sessions
are suspended and expired by hand, and ``MemoryTree.faults`` loses requests and replies. Every
request yields to the loop on its way there and on its way back, so that sessions interleave. Left
out: ACLs and quotas.
"""

import asyncio
import enum
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TypeVar

from ledgers.clock import Clock, SystemClock
from ledgers.errors import (
    RejectedError,
    UnavailableError,
    UnknownOutcomeError,
    UnsupportedError,
)
from ledgers.memory.nodes import Nodes, Transaction
from ledgers.store import (
    ANY_VERSION,
    EVENTS_MAX,
    Create,
    Delete,
    Event,
    MultiFailed,
    Operation,
    OperationResult,
    SessionState,
    SetData,
    Stat,
)
from ledgers.zookeeper.parents import create_with_parents
from ledgers.zookeeper.session import READ_TRIES_MAX, REQUEST_BYTES_MAX, Session, check_size

T = TypeVar("T")


class Fault(enum.Enum):
    """What becomes of a request that does not get there and back."""

    LOST_REQUEST = "lost-request"
    """It never arrives."""
    LOST_REPLY = "lost-reply"
    """It is carried out, and its sender never hears of it."""


FaultHook = Callable[["MemoryStore", Sequence[Operation]], Fault | None]
"""Asked about every request as it leaves; a read comes without operations.

It may also suspend or expire the session, which loses the request.
"""


async def _yield() -> None:
    await asyncio.sleep(0)


class MemoryTree:
    """The znodes, and the sessions that the server knows."""

    def __init__(
        self, *, clock: Clock | None = None, latency: Callable[[], Awaitable[None]] = _yield
    ) -> None:
        """``latency``: awaited by every request on its way there, and again on its way back."""
        self.latency = latency
        self.faults: FaultHook | None = None
        self.has_recursive_watches = True
        """False: as ZooKeeper before 3.6."""
        self.nodes = Nodes()
        self._clock = clock or SystemClock()
        self._zxid = 0
        self._session_count = 0
        self._sessions: dict[int, Session] = {}

    def snapshot(self) -> dict[str, bytes]:
        """Every znode's data, by path."""
        return self.nodes.snapshot()

    def suspend(self, store: "MemoryStore") -> None:
        """Cut the connection: what is under way is lost, later calls wait."""
        store.session.suspend()

    def resume(self, store: "MemoryStore") -> None:
        """Connect again; LOST if the session has expired meanwhile."""
        if store.session_id in self._sessions:
            store.session.resume()
        else:
            store.session.lose()

    def lag(self, store: "MemoryStore") -> None:
        """Its server falls behind: it reads what stands now, until its next write or ``sync``.

        Its watches do not lag.
        """
        store.seen = self.nodes.copy()

    def expire(self, store: "MemoryStore") -> None:
        """The server gives the session up, and its ephemeral znodes go.

        A suspended store learns of it when it is resumed, any other at once.
        """
        self.end(store.session_id)
        if store.state is not SessionState.SUSPENDED:
            store.session.lose()

    def begin(self, session: Session) -> int:
        """Return the id of a new session."""
        self._session_count += 1
        self._sessions[self._session_count] = session
        return self._session_count

    def end(self, session_id: int) -> None:
        if self._sessions.pop(session_id, None) is not None:
            owned = self.nodes.owned_by(session_id)
            self.apply(session_id, [Delete(path=path) for path in owned])

    def apply(self, session_id: int, operations: Sequence[Operation]) -> list[OperationResult]:
        """All or nothing, as one transaction. Raises MultiFailed."""
        transaction = Transaction(
            self.nodes, zxid=self._zxid + 1, now_ms=self._clock.wall_ms(), session_id=session_id
        )
        results: list[OperationResult] = []
        for index, operation in enumerate(operations):
            try:
                results.append(transaction.apply(operation))
            except RejectedError as error:
                transaction.undo()
                raise MultiFailed(index, error) from error
        self._zxid += 1
        connected = [x for x in self._sessions.values() if x.state is SessionState.CONNECTED]
        for event in transaction.events:
            for session in connected:
                session.publish(event)
        return results


class MemoryStore:
    """One session on a ``MemoryTree``: a ``MetadataStore``."""

    def __init__(self, tree: MemoryTree) -> None:
        self.session = Session()
        self.seen: Nodes | None = None
        """What its server knows, when that is not the latest."""
        self._tree = tree
        self._session_id = tree.begin(self.session)
        self._request_count = 0
        self.request_bytes_max = REQUEST_BYTES_MAX

    @property
    def state(self) -> SessionState:
        return self.session.state

    @property
    def session_id(self) -> int:
        return self._session_id

    @property
    def request_count(self) -> int:
        return self._request_count

    async def wait_lost(self) -> None:
        await self.session.wait_lost()

    async def wait_connected(self) -> None:
        await self.session.wait_connected()

    async def wait_disconnected(self) -> None:
        await self.session.wait_disconnected()

    async def get(self, path: str) -> tuple[bytes, Stat]:
        def read() -> tuple[bytes, Stat]:
            node = self._nodes[path]
            return node.data, node.stat

        return await self._read(read)

    async def exists(self, path: str) -> Stat | None:
        def read() -> Stat | None:
            node = self._nodes.find(path)
            return None if node is None else node.stat

        return await self._read(read)

    async def children(self, path: str) -> list[str]:
        return await self._read(lambda: list(self._nodes[path].names))

    async def sync(self, path: str) -> None:
        await self._read(self._catch_up)

    async def create(
        self,
        path: str,
        data: bytes = b"",
        *,
        is_ephemeral: bool = False,
        is_sequential: bool = False,
        with_parents: bool = False,
    ) -> str:
        create = Create(
            path=path, data=data, is_ephemeral=is_ephemeral, is_sequential=is_sequential
        )
        if with_parents:
            return await create_with_parents(self, create)
        made = await self._write_one(create)
        assert isinstance(made, str), made
        return made

    async def set(self, path: str, data: bytes, *, version: int) -> Stat:
        stat = await self._write_one(SetData(path=path, data=data, version=version))
        assert isinstance(stat, Stat), stat
        return stat

    async def delete(self, path: str, *, version: int = ANY_VERSION) -> None:
        await self._write_one(Delete(path=path, version=version))

    async def multi(self, operations: Sequence[Operation]) -> list[OperationResult]:
        if not operations:
            return []
        check_size(operations, request_bytes_max=self.request_bytes_max)
        try:
            return await self._exchange(lambda: self._apply(operations), operations)
        except _ConnectionBroke:
            raise UnknownOutcomeError("the reply to a write was lost") from None

    async def watch(
        self, path: str, *, is_recursive: bool = False, events_max: int = EVENTS_MAX
    ) -> AsyncGenerator[Event, None]:
        await self.wait_connected()
        if is_recursive and not self._tree.has_recursive_watches:
            raise UnsupportedError("this tree is not watched as a whole", path=path)
        with self.session.subscription(
            path, is_recursive=is_recursive, events_max=events_max
        ) as subscription:
            while True:
                yield await subscription.next()

    async def close(self) -> None:
        self._tree.end(self._session_id)
        self.session.lose()

    async def _write_one(self, operation: Operation) -> OperationResult:
        try:
            (result,) = await self.multi([operation])
        except MultiFailed as failure:
            raise failure.cause from None
        return result

    @property
    def _nodes(self) -> Nodes:
        return self._tree.nodes if self.seen is None else self.seen

    def _catch_up(self) -> None:
        self.seen = None

    def _apply(self, operations: Sequence[Operation]) -> list[OperationResult]:
        self._catch_up()
        return self._tree.apply(self._session_id, operations)

    async def _read(self, read: Callable[[], T]) -> T:
        for _ in range(READ_TRIES_MAX):
            try:
                return await self._exchange(read, ())
            except _ConnectionBroke:
                continue
        raise UnavailableError("the connection broke again and again")

    async def _exchange(self, serve: Callable[[], T], operations: Sequence[Operation]) -> T:
        """A request, ``serve`` when it has arrived, and the reply."""
        await self.wait_connected()
        self._request_count += 1
        break_count = self.session.break_count
        faults = self._tree.faults
        fault = None if faults is None else faults(self, operations)
        await self._travel(break_count, is_lost=fault is Fault.LOST_REQUEST)
        try:
            return serve()
        finally:  # a refusal travels like any other reply
            await self._travel(break_count, is_lost=fault is Fault.LOST_REPLY)

    async def _travel(self, break_count: int, *, is_lost: bool) -> None:
        await self._tree.latency()
        self.session.raise_if_lost()
        if is_lost or self.session.break_count != break_count:
            raise _ConnectionBroke


class _ConnectionBroke(Exception):
    """A request or its reply was lost."""
